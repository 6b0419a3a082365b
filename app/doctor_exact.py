"""`baton doctor --exact`: both frameworks on this machine's own devices, compared, as a report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import typer

from app import doctor_facts as facts
from app.doctor_facts import Device, Package, System
from app.probe import AGREEMENT_BOUND, Agreement, compare, kv_bound, require_agreement
from app.service import Side
from app.terminal import err, step
from protocol.checkpoint import read_checkpoint
from protocol.errors import ConfigError
from protocol.halves import install_command


def report(model: Path, output: Path | None, *, as_json: bool) -> None:
    """Compare, and write Markdown (or JSON) to ``output`` or stdout. Status 1 if they differ.

    Raises ``ConfigError``: ``half_not_installed``, ``output_unusable``, and what
    ``read_checkpoint`` and both sides raise of a checkpoint.
    """
    require_both(facts.sides())
    if output is not None and not output.absolute().parent.is_dir():
        raise _unusable(output, "there is no such directory")
    checkpoint = read_checkpoint(model)
    with step("compare torch with MLX on a probe"):
        found = compare(model)
    identity = checkpoint.identity.digest()
    if as_json:
        told = {"agrees": agrees(found), "identity": identity.hex()} | found.as_json()
        text = json.dumps(told, indent=2) + "\n"
    else:
        packages = facts.packages(("decoder", "producer"))
        devices = [facts.device("mlx"), facts.device("torch")]
        now = datetime.now(UTC)
        text = markdown(found, identity, facts.system(), packages, devices, now)
    _write(text, output)
    if not agrees(found):
        raise typer.Exit(1)


def require_both(lacking: Mapping[Side, Sequence[str]]) -> None:
    """Raise ``ConfigError`` (``half_not_installed``) unless both frameworks are here."""
    absent = {side: modules for side, modules in lacking.items() if modules}
    if not absent:
        return
    hint = "; or run this where both halves are: " + install_command("both")
    if "decoder" in absent:
        hint = "on the Mac `baton node qualify` compares with this machine over the link" + hint
    else:
        hint = "`baton node qualify NAME` compares with a paired producer over the link" + hint
    raise ConfigError(
        "both frameworks are compared in one process, which needs Baton's two halves",
        reason="half_not_installed",
        field="modules",
        found="without " + ", ".join(name for names in absent.values() for name in names),
        hint=hint,
    )


def agrees(found: Agreement) -> bool:
    """Whether a comparison is within its bounds."""
    try:
        require_agreement(found)
    except ConfigError:
        return False
    return True


def markdown(
    found: Agreement,
    identity: bytes,
    system: System,
    packages: Sequence[Package],
    devices: Sequence[Device],
    now: datetime,
) -> str:
    """The report."""
    bound = kv_bound(found)
    verdict = (
        "within the bounds" if agrees(found) else "**beyond the bounds: do not use this pair**"
    )
    lines = [
        f"# Exactness of {found.model}",
        "",
        f"torch and MLX prefilled the same {found.positions} positions, and MLX went on from both "
        f"caches. They are {verdict}.",
        "",
        "| | |",
        "|---|---|",
        f"| model | {_cell(found.model)}, identity `{identity.hex()[:16]}`, "
        f"computed in {found.dtype} |",
        f"| machine | {system.told}, Python {system.python} |",
        *(f"| {one.framework} computes on | {one.gpu or 'the processor'} |" for one in devices),
        *(f"| {one.name} | {_release(one)} |" for one in packages),
        f"| when | {now:%Y-%m-%d %H:%M} UTC |",
        "",
        "| | found | bound |",
        "|---|---:|---:|",
        f"| largest relative error of a row | {found.worst:.2e} | {bound:.0e} |",
        f"| same next token, of {found.compared} | {found.agreement:.1%} "
        f"| {AGREEMENT_BOUND[found.dtype]:.0%} |",
        "",
        "Errors are those of the worst element of a layer, relative to the largest magnitude of "
        "its array. Rounding grows from layer to layer; another meaning jumps.",
        "",
        "| layer | error | of the bound |",
        "|---:|---:|---:|",
        *(
            f"| {number} | {error:.2e} | {error / bound:.1%}{_beyond(error, bound)} |"
            for number, error in enumerate(found.errors)
        ),
        "",
    ]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _beyond(error: float, bound: float) -> str:
    return "" if error <= bound else " **beyond**"  # also what is no number


def _release(found: Package) -> str:
    if not found.measured or found.version.partition("+")[0] == found.measured:
        return found.version
    return f"{found.version} (Baton was measured with {found.measured})"


def _write(text: str, output: Path | None) -> None:
    if output is None:
        print(text, end="", flush=True)
        return
    try:
        output.write_text(text)
    except OSError as error:
        raise _unusable(output, error.strerror or "") from error
    err.print(f"the report is in {output}", markup=False, soft_wrap=True)


def _unusable(output: Path, why: str) -> ConfigError:
    return ConfigError(
        f"the report cannot be written to {output}: {why}",
        reason="output_unusable",
        field="output",
    )
