"""`baton doctor`: what this machine and its producers have, and what to do about the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer
from rich.markup import escape
from rich.table import Table

from app import doctor_facts as facts
from app import doctor_findings as findings
from app import doctor_links as links
from app import doctor_network as network
from app.cache_place import CacheDir, StateDir
from app.doctor_findings import Finding, Verdict
from app.service import Installed, Side
from app.service_arguments import value_of
from app.status import DEFAULT_PORT, base_url, first_key
from app.terminal import out, print_json, step
from mac_decoder.config import DecoderConfig
from protocol.addresses import is_loopback
from trust.secrets import Choice, default_choice

MARKS: dict[Verdict, str] = {
    "ok": "[green]ok[/]",
    "remark": "[yellow]remark[/]",
    "wrong": "[bold red]wrong[/]",
}


@dataclass(frozen=True)
class Asked:
    """What is to be looked at."""

    model: Path | None = None
    port: int | None = None
    url: str = ""
    key: str | None = None
    state_dir: Path | None = None
    cache_dir: Path | None = None
    secrets: Choice | None = None
    producers: tuple[str, ...] = ()


def doctor(
    model: Annotated[Path | None, typer.Option(help="A checkpoint to look at.")] = None,
    port: Annotated[
        int | None, typer.Option(help="The decoder's port: the service's, or 8000.")
    ] = None,
    url: Annotated[
        str, typer.Option(help="A running decoder: HOST:PORT or a URL; this machine's if none.")
    ] = "",
    api_keys_file: Annotated[
        Path | None, typer.Option(help="The decoder's file of API keys, if it asks for one.")
    ] = None,
    producer: Annotated[
        list[str] | None,
        typer.Option(help="A producer beside those that are paired: HOST or HOST:PORT."),
    ] = None,
    state_dir: StateDir = None,
    cache_dir: CacheDir = None,
    secrets: Annotated[
        Choice | None,
        typer.Option(help="How secrets are kept, as `baton serve` has it.", show_default=False),
    ] = None,
    exact: Annotated[
        Path | None,
        typer.Option(
            metavar="MODEL_DIR", help="Compare torch and MLX on this checkpoint, and report."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Where the report of --exact goes, instead of here.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Look at this machine, its decoder and its producers, and say what to do about each finding.

    Ends with status 1 if anything is wrong.
    """
    if output is not None and exact is None:
        raise typer.BadParameter("--output goes with --exact")
    if exact is not None:
        from app.doctor_exact import report

        return report(exact, output, as_json=as_json)
    key = None if api_keys_file is None else first_key(api_keys_file)
    asked = Asked(model, port, url, key, state_dir, cache_dir, secrets, tuple(producer or ()))
    with step("look at this machine and its producers"):
        found = list(examine(asked))
    if as_json:
        print_json([asdict(finding) for finding in found])
    else:
        out.print(_table(found))
    if any(finding.verdict == "wrong" for finding in found):
        raise typer.Exit(1)


def examine(asked: Asked) -> Iterator[Finding]:
    """Everything that is looked at, in the order in which it is shown."""
    system = facts.system()
    lacking = facts.sides()
    able: list[Side] = [side for side, modules in lacking.items() if not modules]
    services: dict[Side, Installed | None] = {side: facts.service(side) for side in able}
    asked = _as_installed(asked, services.get("decoder"))
    config = DecoderConfig(
        model="", state_dir=str(asked.state_dir or ""), cache_dir=str(asked.cache_dir or "")
    )
    model = None if asked.model is None else facts.model(asked.model)
    yield findings.python(system)
    for package in facts.packages(able):
        yield findings.package(package)
    yield findings.sides(lacking)
    devices: list[facts.Device] = []
    if "decoder" in able:
        devices.append(facts.device("mlx"))
        yield findings.decoders_device(devices[-1], system)
    if "producer" in able:
        devices.append(facts.device("torch"))
        yield findings.producers_device(devices[-1], system)
    yield findings.memory(facts.memory(), devices, model)
    if model is not None:
        yield from findings.model(model)
    yield findings.disk(facts.disk(config.cache_path))
    yield from findings.directories(facts.directories(facts.private_directories(config)))
    registries: dict[Side, facts.Registry] = {
        side: facts.registry(
            side, config.state_path.parent / side, asked.secrets or default_choice()
        )
        for side in able
    }
    for registry in registries.values():
        yield from findings.secrets(registry, facts.keyring_usable())
    for side, service in services.items():
        yield from findings.service(side, service)
    targets = network.targets(registries.get("decoder"), services.get("decoder"), asked.producers)
    yield from _connected(asked, system, services, targets, model)


def _connected(
    asked: Asked,
    system: facts.System,
    services: Mapping[Side, Installed | None],
    targets: Sequence[network.Target],
    model: facts.Model | None,
) -> Iterator[Finding]:
    """What listens here, and what can be reached."""
    decoders = asked.port or DEFAULT_PORT
    ports = [facts.port(decoders, "the decoder")] if "decoder" in services else []
    baton_listens = any(port.is_baton for port in ports)
    if "producer" in services:
        handoffs = _option("--port", services["producer"]) or facts.LINK_PORT
        ports.append(facts.port(int(handoffs), "handoffs"))
        ports.append(facts.port(facts.PAIRING_PORT, "pairing"))
    for port in ports:
        yield findings.port(port)
    yield links.firewall(network.firewalls(system), "producer" in services)
    url = asked.url or f"127.0.0.1:{decoders}"
    running = facts.running(url, asked.key)
    yield findings.running(running, baton_listens and not asked.url)
    elsewhere = not is_loopback(urlsplit(base_url(url)).hostname or "")
    yield findings.clock(facts.clock(running, elsewhere=elsewhere))
    if not targets:
        for cable in network.cables(system):
            yield from links.interface(cable, "network")
    for target in targets:
        reached = network.reach(target, system)
        yield from links.producer(reached, system, running, model, facts.baton_version())
    known = {target.url for target in targets}
    for link in running.links:
        if link.get("name") not in known:
            yield links.linked(link, f"producer {link.get('name')}", system, reachable=False)


def _as_installed(asked: Asked, service: Installed | None) -> Asked:
    """What was not said, as the installed decoder has it."""
    state, cache = (_option(option, service) for option in ("--state-dir", "--cache-dir"))
    port, secrets = (_option(option, service) for option in ("--port", "--secrets"))
    return replace(
        asked,
        port=asked.port or int(port or DEFAULT_PORT),
        state_dir=asked.state_dir or (Path(state) if state else None),
        cache_dir=asked.cache_dir or (Path(cache) if cache else None),
        secrets=asked.secrets or (secrets if secrets in ("keyring", "file") else None),
    )


def _option(option: str, service: Installed | None) -> str:
    return value_of(option, (service and service.arguments) or ())


def _table(found: list[Finding]) -> Table:
    table = Table.grid(padding=(0, 2))
    for finding in found:
        text = escape(finding.found)
        if finding.what_to_do:
            text += f"\n[bold]→[/] {escape(finding.what_to_do)}"
        table.add_row(MARKS[finding.verdict], escape(finding.subject), text)
    return table
