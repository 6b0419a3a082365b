"""`baton cache`: figures, verification, deletion, and a directory that a decoder holds."""

from __future__ import annotations

import errno
import json
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console

from app import cli, settings
from app.cache_figures import print_section
from mac_decoder.config import DecoderConfig
from mac_decoder.store import index
from mac_decoder.store.key import load_or_make
from mac_decoder.store.lock import NAME as LOCK
from mac_decoder.store.store import Store
from protocol.blocks import namespace
from protocol.checkpoint import read_checkpoint
from protocol.identity import Identity
from tests.mac_decoder.reuse.made import FULL, SLIDING
from tests.mac_decoder.store.made import IDENTITY, OTHER_IDENTITY, conversation, made

CAP = 1 << 30
NOBODY = "http://127.0.0.1:9"
TEXTS = [conversation(620, 1), conversation(300, 2)]

Tree = dict[str, bytes]
Answer = tuple[int, str, str]


class Home:
    """A decoder's directories, and the command line told where they are."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root = root
        self.options = ["--cache-dir", str(root / "cache"), "--state-dir", str(root / "state")]
        config = DecoderConfig("", cache_dir=self.options[1], state_dir=self.options[3])
        self.directory, self.key_path = config.cache_path, config.store_key_path
        self._capsys = capsys

    def open(self) -> Store:
        return Store.open(self.directory, load_or_make(self.key_path), CAP, 0)

    def fill(self, *identities: Identity) -> Home:
        """Two conversations of two layouts for each identity."""
        key = load_or_make(self.key_path)
        with self.open() as store:
            for identity in identities or (IDENTITY,):
                space = namespace(key, identity.digest())
                for layout, text in zip((SLIDING, FULL), TEXTS, strict=True):
                    store.publish(space, identity, *made(layout, text, space=space))
        return self

    def tree(self) -> Tree:
        """Every file and directory but the lock, with its bytes."""
        return {
            path.relative_to(self.root).as_posix(): path.read_bytes() if path.is_file() else b""
            for path in self.root.rglob("*")
            if path.name != LOCK
        }

    def on_disk(self) -> int:
        return sum(p.stat().st_size for p in self.directory.rglob("*") if p.is_file())

    def run(self, *arguments: str, here: bool = True) -> Answer:
        """Exit status, standard output and standard error of `baton cache`."""
        sys.argv = ["baton", "cache", *arguments, *(self.options if here else ())]
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = self._capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    def json(self, *arguments: str, status: int = 0) -> dict:
        found, printed, complaint = self.run(*arguments, "--json")
        assert found == status, complaint
        return json.loads(printed)

    def tear(self) -> None:
        """As a crash leaves it: with a half-written file."""
        (self.directory / "temp" / "torn").write_bytes(b"half")


@pytest.fixture
def home(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Home:
    monkeypatch.setattr(sys, "argv", sys.argv)
    return Home(tmp_path, capsys)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)


@contextmanager
def decoder(status: object) -> Iterator[str]:
    """Something that listens and has this ``/status``."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(status).encode()
            self.send_response(200 if self.path == "/status" else 404)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Keep the test's output clean."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


# -- without a cache


@pytest.mark.parametrize(
    "command",
    [("stats",), ("verify",), ("prune", "--to", "1GB"), ("prune", "--stale"), ("clear", "--yes")],
)
@pytest.mark.parametrize("there", [False, True])
def test_no_cache_is_said_and_none_is_made(
    home: Home, command: tuple[str, ...], there: bool
) -> None:
    if there:
        home.directory.mkdir(parents=True)
    before = home.tree()
    status, printed, _ = home.run(*command)
    assert status == 0
    assert f"no cache at {home.directory}" in printed
    found = home.json(*command)
    figures = found["cache"] if command[0] == "stats" else found
    limits = ("cap", "floor")
    assert not any(figures[name] for name in figures if name not in (*limits, "directory"))
    assert home.tree() == before


def test_a_lost_key_is_not_made_anew(home: Home) -> None:
    home.fill()
    home.key_path.unlink()
    before = home.tree()
    for command in (("verify",), ("verify", "--dry-run"), ("prune", "--stale")):
        status, _, complaint = home.run(*command)
        assert (status, "store_key_missing" in complaint) == (78, True)
    # What cannot be authenticated can still be counted, and removed.
    other = home.json("stats")["cache"]["other_files"]
    assert other["foreign_key"]["files"] == home.json("clear", "--dry-run")["files"] == 5
    assert home.tree() == before
    home.run("clear", "--yes")
    assert not home.key_path.exists()
    assert not list(home.directory.rglob("*.safetensors"))


# -- stats


def test_the_directorys_figures(home: Home) -> None:
    home.fill(IDENTITY, OTHER_IDENTITY)
    with home.open() as store:
        expected = store.stats()
    (home.directory / "notes.txt").write_text("mine")
    found = home.json("stats")
    assert (found["source"], found["at"]) == ("directory", str(home.directory))
    cache = found["cache"]
    assert set(cache) == {
        "entries", "withheld", "blocks", "on_disk", "referenced", "cap", "floor", "identities",
        "other_files",
    }  # fmt: skip
    assert cache["entries"] == 4
    assert cache["on_disk"] == home.on_disk()
    assert cache["referenced"] == expected.referenced != cache["on_disk"]
    assert cache["cap"] > 0 < cache["floor"]
    assert {name: tally["entries"] for name, tally in cache["identities"].items()} == {
        IDENTITY.digest().hex(): 2,
        OTHER_IDENTITY.digest().hex(): 2,
    }
    assert cache["other_files"]["unknown"] == {"files": 1, "bytes": 4}
    _, printed, _ = home.run("stats")
    for shown in ("on_disk", "referenced", f"{cache['on_disk']:,}", f"{cache['referenced']:,}"):
        assert shown in printed


def test_a_running_decoder_is_asked_first(home: Home) -> None:
    home.fill()
    section = {"durable": {"on_disk": 12345, "cuts": 7}, "keeping_bytes": 0}
    with decoder({"model": "m", "cache": section}) as url, home.open():
        assert home.json("stats", "--url", url) == {
            "source": "decoder",
            "at": url,
            "cache": section,
        }
        _, printed, _ = home.run("stats", "--url", url)
        assert "durable on_disk" in printed
        assert "12,345 bytes" in printed


def test_the_usual_address_is_asked_unless_a_directory_is_named(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    with decoder({"cache": {"on_disk": 1}}) as url:
        monkeypatch.setattr("app.status.DEFAULT_URL", url)
        status, printed, _ = home.run("stats", "--json", here=False)
        assert (status, json.loads(printed)["source"]) == (0, "decoder")
        assert home.json("stats")["source"] == "directory"


def test_a_directory_that_was_typed_goes_before_the_decoder_of_the_settings(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    with decoder({"cache": {"on_disk": 1}}) as url:
        file = home.root / "config.toml"
        file.write_text(f"[serve]\nport = {url.rpartition(':')[2]}\nstate-dir = '/nowhere'")
        monkeypatch.setattr(settings, "default_path", lambda: file)
        status, printed, _ = home.run("stats", "--json", here=False)
        assert (status, json.loads(printed)["at"]) == (0, url)
        assert home.json("stats")["source"] == "directory"


@pytest.mark.parametrize("status", [{"model": "m"}, {"cache": None}, ["something else"]])
def test_a_decoder_without_a_cache_leaves_the_directory(home: Home, status: object) -> None:
    home.fill()
    with decoder(status) as url:
        assert home.json("stats", "--url", url)["source"] == "directory"
    assert home.json("stats", "--url", NOBODY)["cache"]["entries"] == 2


# -- verify


def test_what_is_whole_is_read_whole(home: Home) -> None:
    home.fill()
    found = home.json("verify")
    stored = list(home.directory.rglob("*.safetensors"))
    assert (found["files"], found["bad"]) == (len(stored), [])
    assert found["bytes"] == sum(path.stat().st_size for path in stored)
    assert set(found) == {
        "directory", "dry_run", "files", "bytes", "mixed_histories", "bad", "not_verified",
    }  # fmt: skip
    status, printed, _ = home.run("verify")
    assert status == 0
    assert f"{found['bytes']:,} bytes" in printed


def test_one_flipped_byte_anywhere_is_status_1_and_names_the_file(home: Home) -> None:
    home.fill()
    for path in sorted(home.directory.rglob("*.safetensors")):
        whole = path.read_bytes()
        for at in (0, 7, 8, 60, len(whole) // 2, len(whole) - 1):
            flip(path, at)
            before = home.tree()
            status, printed, _ = home.run("verify", "--dry-run")
            assert (status, path.name in printed.replace("\n", "")) == (1, True), (path, at)
            assert home.tree() == before
            path.write_bytes(whole)
    assert home.run("verify", "--dry-run")[0] == 0


def test_what_is_wrong_goes_to_quarantine(home: Home) -> None:
    home.fill()
    path = next((home.directory / "cuts").iterdir())
    flip(path, -1)
    found = home.json("verify", status=1)
    assert found["bad"] == [{"file": f"cuts/{path.name}", "reason": "digest_differs"}]
    assert not path.exists()
    assert (home.directory / "quarantine" / f"cuts-{path.name}").exists()
    again = home.json("verify")
    assert again["not_verified"]["quarantined"]["files"] == 1


def test_a_damaged_index_is_named(home: Home) -> None:
    home.fill()
    path = home.directory / index.NAME
    with home.open() as store:
        name = next(iter(store._held.ledger.cuts))
    flip(path, path.read_bytes().rindex(name))
    before = home.tree()
    status, printed, _ = home.run("verify", "--dry-run")
    assert (status, index.NAME in printed) == (1, True)
    assert home.tree() == before
    assert home.run("verify")[0] == 1
    assert home.run("verify")[0] == 0
    assert home.json("stats")["cache"]["entries"] == 2


# -- prune and clear


@pytest.mark.parametrize(
    "command",
    [("prune", "--to", "0"), ("prune", "--to", "30kB"), ("prune", "--stale"), ("clear",)],
)
@pytest.mark.parametrize("torn", [False, True])
def test_a_dry_run_changes_nothing_and_says_what_the_real_one_does(
    home: Home, command: tuple[str, ...], torn: bool
) -> None:
    home.fill()
    if torn:
        home.tear()
    if torn and "--to" not in command:
        # A start makes it anew, and then it counts for the size.
        index.remove(home.directory)
    before, held = home.tree(), home.on_disk()
    found = home.json(*command, "--dry-run")
    assert found == {
        "directory": str(home.directory),
        "dry_run": True,
        "files": found["files"],
        "bytes": found["bytes"],
        "on_disk": held,
        "passed_over": [],
    }
    assert home.tree() == before
    status, printed, _ = home.run(*command, *(("--yes",) if command == ("clear",) else ()))
    assert status == 0
    assert f"deleted {found['files']} files, {found['bytes']:,} bytes" in printed
    gone = {name for name in before if name not in home.tree()}
    assert len(gone) == found["files"]
    assert sum(len(before[name]) for name in gone) == found["bytes"]
    if command == ("prune", "--to", "30kB"):
        assert home.on_disk() <= 30_000


def test_pruning_to_a_size_takes_the_least_recently_used(home: Home) -> None:
    home.fill()
    held = home.on_disk()
    assert home.json("prune", "--to", f"{held}")["files"] == 0
    found = home.json("prune", "--to", f"{held - 1}")
    assert found["on_disk"] == home.on_disk() < held
    with home.open() as store:
        assert [cut.position for cut in store._held.ledger.cuts.values()] == [len(TEXTS[1])]


def test_stale_is_what_a_named_checkpoint_cannot_use(
    home: Home, checkpoint: Callable[..., Path]
) -> None:
    model = checkpoint("llama")
    mine = read_checkpoint(model).identity
    home.fill(mine, replace(mine, weights="22" * 32))
    before = home.tree()
    assert home.json("prune", "--stale")["files"] == 0
    assert home.tree() == before
    assert home.json("prune", "--stale", "--model", str(model))["files"] == 5
    assert list(home.json("stats")["cache"]["identities"]) == [mine.digest().hex()]


@pytest.mark.parametrize(
    "options",
    [(), ("--to", "1GB", "--stale"), ("--to", "1GB", "--model", "m"), ("--to", "much")],
)
def test_a_prune_that_does_not_say_what_is_wrong_usage(
    home: Home, options: tuple[str, ...]
) -> None:
    home.fill()
    before = home.tree()
    assert home.run("prune", *options)[0] == 2
    assert home.tree() == before


def test_clear_leaves_what_is_not_ours(home: Home) -> None:
    home.fill()
    (home.directory / "notes.txt").write_text("mine")
    status, printed, _ = home.run("clear", "--yes")
    assert (status, "left alone: 1 files" in printed) == (0, True)
    assert (home.directory / "notes.txt").read_text() == "mine"
    assert not list(home.directory.rglob("*.safetensors"))


@pytest.mark.parametrize("command", [("prune", "--to", "0"), ("clear", "--yes")])
@pytest.mark.parametrize("verified", [True, False])
def test_what_is_no_file_stops_nothing(
    home: Home, command: tuple[str, ...], verified: bool
) -> None:
    home.fill(IDENTITY, OTHER_IDENTITY)
    folder, pipe, empty, damaged = sorted((home.directory / "blocks").iterdir())[:4]
    for path in (folder, pipe):
        path.unlink()
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    os.mkfifo(pipe)
    empty.write_bytes(b"")
    flip(damaged, -1)
    if verified:
        bad = {one["file"]: one["reason"] for one in home.json("verify", status=1)["bad"]}
        expected = ("not_a_file", "not_a_file", "file_malformed", "digest_differs")
        for path, reason in zip((folder, pipe, empty, damaged), expected, strict=True):
            assert bad[f"blocks/{path.name}"] == reason
            assert not path.exists()
        again = home.json("verify", status=1)["bad"]
        assert {one["file"]: one["reason"] for one in again} == dict.fromkeys(bad, "file_missing")
        assert len(again) == len(bad)
    found = home.json(*command)
    assert found["passed_over"] == []
    assert found["on_disk"] == home.on_disk()
    left = {path.name for path in home.directory.rglob("*") if path.is_file()}
    assert left == {"notes.txt", index.NAME, LOCK, "CACHEDIR.TAG"}


@pytest.mark.parametrize("command", [("prune", "--to", "0"), ("clear", "--yes")])
def test_a_file_that_cannot_be_removed_is_named_and_the_rest_goes(
    home: Home, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that must not be changed (``chattr +i``, ``chflags uchg``)."""
    home.fill()
    kept = sorted((home.directory / "blocks").iterdir())[0]
    unlink = os.unlink

    def refusing(path: str | Path, *rest: object, **named: object) -> None:
        if str(path) == str(kept):
            raise PermissionError(errno.EPERM, "Operation not permitted")
        unlink(path, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "unlink", refusing)
    status, printed, _ = home.run(*command)
    assert status == 0
    named = f"passed over: blocks/{kept.name} cannot be removed (not_permitted)"
    assert named in printed
    assert list(home.directory.rglob("*.safetensors")) == [kept]
    found = home.json(*command)
    assert found["passed_over"] == [{"file": f"blocks/{kept.name}", "reason": "not_permitted"}]
    assert found["files"] == 0
    assert found["on_disk"] == home.on_disk()


def test_clear_is_refused_where_nobody_can_be_asked(home: Home) -> None:
    home.fill()
    before = home.tree()
    status, _, complaint = home.run("clear")
    assert (status, "not_confirmed" in complaint, "--yes" in complaint) == (1, True, True)
    assert home.tree() == before


@pytest.mark.parametrize("answer", ["n", "y"])
def test_clear_asks_on_a_terminal(home: Home, answer: str) -> None:
    home.fill()
    before = home.tree()
    files = home.json("clear", "--dry-run")["files"]
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "app.cli", "cache", "clear", *home.options],
        stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as child:  # fmt: skip
        os.write(ours, answer.encode() + b"\n")
        printed, asked = child.communicate(timeout=60)
    os.close(ours)
    os.close(theirs)
    assert f"delete {files} files" in asked
    if answer == "y":
        assert (child.returncode, f"deleted {files} files" in printed) == (0, True)
        assert home.on_disk() < sum(map(len, before.values()))
    else:
        assert (child.returncode, home.tree()) == (1, before)


# -- a directory in use


@pytest.mark.parametrize(
    "command",
    [("stats",), ("verify",), ("verify", "--dry-run"), ("prune", "--stale"), ("clear", "--yes")],
)
def test_a_directory_in_use_says_by_whom_and_what_to_do(
    home: Home, command: tuple[str, ...]
) -> None:
    home.fill()
    with home.open():
        before = home.tree()
        status, _, complaint = home.run(*command)
        assert home.tree() == before
    said = " ".join(complaint.split())
    assert (status, "store_locked" in said) == (78, True)
    assert f"process {os.getpid()} (" in said
    assert "pytest" in said
    assert "baton cache stats --url" in said
    assert home.run(*command)[0] == 0


def test_the_commands_import_neither_framework(home: Home) -> None:
    home.fill()
    script = (
        "import sys; from app.commands import app; "
        f"app(['cache', 'verify', *{home.options!r}], standalone_mode=False); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'mlx', 'mlx_lm', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=120).returncode == 0


def test_a_decoders_figures_are_read_in_a_narrow_terminal(monkeypatch, capsys):
    monkeypatch.setattr("app.cache_figures.out", Console(width=80))
    section = {
        "durable": {"identities": {"ab" * 32: [6, 16_381_760]}, "on_disk": 17_000_000},
        "derived": {
            "hit_rate": {"value": 0.5, "tag": "measured"},
            "joules_saved": {"value": None, "tag": "unavailable"},
        },
    }
    print_section("decoder", section)
    shown = capsys.readouterr().out
    for expected in ("abababababab ", "16,381,760", "17,000,000", "0.5", "measured", "-", "6"):
        assert expected in shown
    assert "ab" * 32 not in shown
    print_section("decoder", {})
    assert "starting" in capsys.readouterr().out
