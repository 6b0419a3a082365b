// A page's HTML, kept as the decoder says: parts are changed in place, so that what has the
// focus keeps it, and what is open stays open. Nothing is worded or computed here.

const EVENT = "act";
const NEVER_MS = 4000;

function attributes(from, to) {
  for (const { name, value } of [...to.attributes]) {
    if (from.getAttribute(name) !== value) from.setAttribute(name, value);
  }
  for (const { name } of [...from.attributes]) {
    const own = (name === "open" && /^(DETAILS|DIALOG)$/.test(from.tagName)) || name === "hidden";
    if (!own && !to.hasAttribute(name)) from.removeAttribute(name);
  }
}

function morph(from, to) {
  if (from.nodeType !== to.nodeType || from.nodeName !== to.nodeName) {
    from.replaceWith(to);
    return;
  }
  if (from.nodeType !== Node.ELEMENT_NODE) {
    if (from.nodeValue !== to.nodeValue) from.nodeValue = to.nodeValue;
    return;
  }
  attributes(from, to);
  // What somebody types or chooses is theirs.
  if (/^(INPUT|TEXTAREA|SELECT)$/.test(from.nodeName)) return;
  const old = [...from.childNodes];
  const made = [...to.childNodes];
  made.forEach((node, at) => (at < old.length ? morph(old[at], node) : from.append(node)));
  old.slice(made.length).forEach((node) => node.remove());
}

function parsed(html) {
  const holder = document.createElement("template");
  holder.innerHTML = html;
  return holder.content.firstElementChild;
}

function part(id) {
  return document.querySelector(`[data-part="${CSS.escape(id)}"]`);
}

// Rows tell their paths by their place, which changes for all of them when one comes.
function replace_paths(row, base, at) {
  const start = `${base}.${at}`;
  if (row.dataset.base === start) return;
  const before = row.dataset.base;
  row.dataset.base = start;
  if (!before) return;
  for (const fact of row.querySelectorAll("[data-path]")) {
    fact.dataset.path = start + fact.dataset.path.slice(before.length);
  }
}

const OPS = {
  set(id, html) {
    const found = part(id);
    if (found) morph(found, parsed(html));
  },
  rows(id, order, changed, base) {
    const holder = part(id);
    if (!holder) return;
    const keyed = [...holder.children].filter((row) => row.dataset.key);
    const old = new Map(keyed.map((row) => [row.dataset.key, row]));
    // First, so that those that stay are where they belong: a row that is moved loses the focus.
    const stay = new Set(order);
    old.forEach((row, key) => stay.has(key) || row.remove());
    let at = keyed.find((row) => row.isConnected) ?? null;
    order.forEach((key, place) => {
      let row = old.get(key);
      if (row && key in changed) {
        morph(row, parsed(changed[key]));
      } else if (!row) {
        row = parsed(changed[key]);
        row.classList.add("fresh");
      }
      if (row === at) at = at.nextElementSibling;
      else holder.insertBefore(row, at);
      if (base) replace_paths(row, base, place);
    });
    filter();
  },
  text(id, texts) {
    const holder = part(id);
    if (!holder) return;
    for (const [key, text] of Object.entries(texts)) {
      const cell = holder.querySelector(`[data-key="${CSS.escape(key)}"] [data-age]`);
      if (cell && cell.textContent !== text) cell.textContent = text;
    }
  },
  append(id, text) {
    const found = part(id);
    if (!found) return;
    const low = window.innerHeight + window.scrollY >= document.body.scrollHeight - 80;
    found.append(text);
    if (low) window.scrollTo(0, document.body.scrollHeight);
  },
  open(html) {
    const made = parsed(html);
    const open = document.querySelector("#baton dialog[open]");
    if (open) {
      morph(open, made);
      if (!open.contains(document.activeElement)) focus_first(open);
      return;
    }
    document.getElementById("dialogs").replaceChildren(made);
    const asker = document.activeElement;
    made.addEventListener("close", () => {
      made.remove();
      if (asker && asker.isConnected) asker.focus();
      send({ do: "closed" });
    });
    made.showModal();
    focus_first(made);
  },
  close() {
    document.querySelector("#baton dialog[open]")?.close();
  },
};

function focus_first(dialog) {
  (dialog.querySelector("[autofocus]") ?? dialog.querySelector("h2"))?.focus();
}

let send = () => {};

function filter() {
  const chosen = [...document.querySelectorAll("select[data-filter]")];
  if (!chosen.length) return;
  const rows = document.querySelectorAll("[data-request]");
  let shown = 0;
  for (const row of rows) {
    const fits = chosen.every(({ value, dataset }) => !value || row.dataset[dataset.filter] === value);
    row.hidden = !fits;
    shown += fits;
  }
  const none = document.querySelector("[data-none]");
  if (none) none.hidden = shown > 0;
}

function themed(choice) {
  if (choice === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = choice;
  try {
    localStorage.setItem("baton-theme", choice);
  } catch {
    // Without a place to remember it, it holds for this page.
  }
  for (const button of document.querySelectorAll("[data-theme-choice]")) {
    button.setAttribute("aria-pressed", String(button.dataset.themeChoice === choice));
  }
}

function told(form) {
  const fields = {};
  for (const field of form.elements) {
    if (!field.name) continue;
    if (field.type === "checkbox") fields[field.name] = field.checked;
    else if (field.type !== "radio" || field.checked) fields[field.name] = field.value;
  }
  return fields;
}

function pressed(button) {
  const { expands } = button.dataset;
  if (expands) {
    const open = button.getAttribute("aria-expanded") !== "true";
    button.setAttribute("aria-expanded", String(open));
    document.getElementById(expands).hidden = !open;
    if (!open) return;
  }
  send({ ...button.dataset });
}

function listen() {
  document.addEventListener("click", (event) => {
    const theme = event.target.closest("[data-theme-choice]");
    if (theme) return themed(theme.dataset.themeChoice);
    if (event.target.closest("[data-logout]")) {
      fetch("/logout", { method: "POST", referrerPolicy: "same-origin" }).then(() => location.assign("/login"));
      return;
    }
    if (event.target.closest("[data-dismiss]")) return OPS.close();
    const filling = event.target.closest("button[data-fills]");
    if (filling) {
      const field = document.getElementById(filling.dataset.fills);
      field.value = filling.dataset.with;
      field.focus();
      return;
    }
    const button = event.target.closest("button[data-do]");
    if (button) return pressed(button);
    // A row opens wherever it is clicked, unless to mark its text.
    const row = event.target.closest("[data-request] .first, [data-request] .stack");
    const toggle = row?.parentElement.querySelector("[data-expands]");
    if (toggle && !String(getSelection())) pressed(toggle);
  });
  document.addEventListener("submit", (event) => {
    event.preventDefault();
    const form = event.target;
    if (form.querySelector("[type=submit]:disabled")) return;
    send({ ...form.dataset, ...told(form) });
    if (form.dataset.clears !== undefined) {
      form.querySelectorAll("textarea").forEach((field) => (field.value = ""));
    }
  });
  document.addEventListener("change", (event) => {
    const { target } = event;
    if (!target.matches("select[data-filter]")) return;
    sessionStorage.setItem(`baton-${target.dataset.filter}`, target.value);
    filter();
  });
  document.addEventListener("keydown", (event) => {
    // What a word means goes away without the pointer or the focus being moved on.
    const { activeElement } = document;
    if (event.key === "Escape" && activeElement.matches(".term")) activeElement.blur();
    // Enter sends, Shift and Enter is a new line; not while an input method composes.
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    if (!event.target.matches("textarea[data-enter]")) return;
    event.preventDefault();
    event.target.form.requestSubmit();
  });
  document.addEventListener("visibilitychange", tell_whether_seen);
}

function tell_whether_seen() {
  send({ do: document.hidden ? "hidden" : "shown" });
}

function watch_connection() {
  const popup = document.getElementById("popup");
  const banner = document.getElementById("lost");
  if (!popup || !banner) return;
  const began = performance.now();
  const look = () => {
    // The popup comes when a connection is lost; one that was never made is none either.
    const never = performance.now() - began > NEVER_MS && window.socket && !window.socket.connected;
    const lost = popup.ariaHidden === "false" || Boolean(never);
    banner.dataset.lost = String(lost);
    banner.firstElementChild.textContent = lost ? banner.dataset.says : "";
  };
  new MutationObserver(look).observe(popup, { attributes: true });
  setInterval(look, NEVER_MS / 2);
  look();
}

export default {
  template: "<div></div>",
  props: { html: String },
  mounted() {
    const root = document.createElement("div");
    root.id = "baton";
    root.innerHTML = this.html;
    document.body.prepend(root);
    send = (said) => this.$emit(EVENT, said);
    listen();
    watch_connection();
    for (const one of document.querySelectorAll("select[data-filter]")) {
      one.value = sessionStorage.getItem(`baton-${one.dataset.filter}`) ?? "";
      if (one.selectedIndex < 0) one.value = "";
    }
    filter();
    themed(document.documentElement.dataset.theme ?? "auto");
    tell_whether_seen();
  },
  methods: {
    patch(ops) {
      for (const [name, ...given] of ops) OPS[name](...given);
    },
  },
};
