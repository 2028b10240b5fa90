"""`headway doctor`: checks storage, network, an engine or the sandbox before a run."""

import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from headway.cli.doctor_engine import look_at_engine
from headway.cli.options import Json
from headway.cli.progress import terminal_bars
from headway.cli.text import columns, print_json
from headway.errors import UsageError
from headway.hardware.link_bench import listen, measure
from headway.hardware.network import HostNetwork, Transport, find_network, main_address, transport
from headway.hardware.storage import StorageRates, measure_storage, uses
from headway.rl.sandbox import why_no_sandbox


def doctor(
    storage: Annotated[
        Path | None, typer.Option("--storage", metavar="PATH", help="Benchmark the file system of this folder.")
    ] = None,
    network: Annotated[bool, typer.Option("--network", help="Show interfaces, RDMA and what NCCL will use.")] = False,
    with_: Annotated[
        str | None, typer.Option("--with", metavar="HOST:PORT", help="With --network: measure TCP to a listener.")
    ] = None,
    listen: Annotated[
        str | None, typer.Option("--listen", metavar="HOST:PORT", help="With --network: listen until Ctrl-C.")
    ] = None,
    token_env: Annotated[
        str | None,
        typer.Option("--token-env", metavar="NAME", help="Variable with a shared token; required off loopback."),
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", min=0.1, max=30, help="Approximate time to measure.")] = 5.0,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            metavar="ENGINE",
            help="Check an engine: slurm's configuration, or whether ray accepts this process.",
        ),
    ] = None,
    sandbox: Annotated[
        bool, typer.Option("--sandbox", help="Check that code of answers can be run in a sandbox, for rl.rewards.")
    ] = False,
    json: Json = False,
) -> None:
    """Check storage, network, an engine or the sandbox before a run.

    Exits with 1 if the sandbox cannot be built.
    """
    _check(network, with_, listen)
    if storage is None and not network and engine is None and not sandbox:
        raise UsageError("nothing to check", hint="use --storage PATH, --network, --engine slurm|ray or --sandbox")
    if listen is not None:
        _listen(listen, _token(token_env))
        return
    document: dict[str, Any] = {}
    lines: list[str] = []
    if storage is not None:
        document["storage"], text = _storage(storage, seconds)
        lines += text
    if network:
        document["network"], text = _network(with_, _token(token_env), seconds)
        lines += [""] * bool(lines) + text
    if engine is not None:
        document["engine"], text = look_at_engine(engine)
        lines += [""] * bool(lines) + text
    if sandbox:
        document["sandbox"], text = _sandbox()
        lines += [""] * bool(lines) + text
    if json:
        print_json(document)
    else:
        print("\n".join(lines))
        if storage is not None or network or engine is not None:
            print(f"next: {_next(storage, with_) if engine is None else f'headway nodes --engine {engine}'}")
    if sandbox and not document["sandbox"]["works"]:
        raise typer.Exit(1)


def _check(network: bool, with_: str | None, listen: str | None) -> None:
    if (with_ or listen) and not network:
        raise UsageError(f"--{'with' if with_ else 'listen'} needs --network", hint="headway doctor --help")
    if with_ and listen:
        raise UsageError(
            "--with and --listen exclude each other", hint="use --listen on one machine, --with on the other"
        )


def _next(storage: Path | None, with_: str | None) -> str:
    if storage is not None:
        return "headway train RECIPE --runs DIR"
    return (
        "headway plan RECIPE"
        if with_
        else "headway doctor --network --listen HOST:PORT here, --with HOST:PORT elsewhere"
    )


def _token(name: str | None) -> str | None:
    if name is None:
        return None
    if not os.environ.get(name):
        raise UsageError(f"environment variable {name} is unset or empty", hint=f"export {name}=... on both machines")
    return os.environ[name]


# -- storage


def _storage(path: Path, seconds: float) -> tuple[dict[str, Any], list[str]]:
    with _bar() as progress:
        rates = measure_storage(path, seconds, progress)
    usable = uses(rates)
    document = {**vars(rates), "uses": [vars(use) for use in usable]}
    lines = [*_rates(rates), ""]
    lines += _wrapped([(f"use it for {use.what}" if use.good else f"not for {use.what}", use.why) for use in usable])
    if not any(use.good for use in usable):
        lines.append("not suitable for anything that a run reads or writes")
    return document, lines


def _rates(rates: StorageRates) -> list[str]:
    kind = rates.file_system or "unknown file system"
    how = "page cache bypassed" if rates.cold else "page cache may have helped"
    return [
        f"{rates.path}: {kind}, {rates.free_bytes / 1e9:,.1f} GB free",
        f"  write         {rates.write_bytes_s / 1e6:>10,.0f} MB/s, fsync included",
        f"  read          {rates.read_bytes_s / 1e6:>10,.0f} MB/s, {how}",
        f"  durable lines {rates.flushes_s:>10,.0f} /s, 4 KiB and fsync each",
        f"  file creates  {rates.creates_s:>10,.0f} /s, stats {rates.stats_s:,.0f} /s",
        f"  file renames  {rates.renames_s:>10,.0f} /s, unlinks {rates.unlinks_s:,.0f} /s",
        f"  locks         {'work' if rates.locks else 'do not work':>10}",
    ]


# -- sandbox


def _sandbox() -> tuple[dict[str, Any], list[str]]:
    why = why_no_sandbox()
    line = "sandbox: works" if why is None else f"sandbox: cannot be built: {why}"
    return {"works": why is None, "why": why}, textwrap.wrap(line, 80, subsequent_indent="  ")


# -- network


def _network(with_: str | None, token: str | None, seconds: float) -> tuple[dict[str, Any], list[str]]:
    host_network, host = find_network(), os.environ.get("HEADWAY_HOST") or main_address()
    # As agents choose it: by the address that they reach each other at, if there is one.
    chosen = transport(host_network, host=None if host == "127.0.0.1" else host)
    document: dict[str, Any] = {
        "interfaces": [vars(device) for device in host_network.interfaces],
        "rdma": [vars(device) for device in host_network.rdma],
        "gpudirect": host_network.gpudirect,
        "transport": vars(chosen),
    }
    lines = [*_interface_lines(host_network), *_transport_lines(chosen)]
    if with_ is not None:
        rates = measure(with_, token, seconds / 2)
        document["with"] = {"address": with_, **vars(rates)}
        lines.append(
            f"TCP with {with_}: {rates.there_bytes_s / 1e9:.2f} GB/s out, {rates.back_bytes_s / 1e9:.2f} GB/s back, "
            f"{rates.round_trip_s * 1e6:.0f} us"
        )
    return document, lines


def _interface_lines(host_network: HostNetwork) -> list[str]:
    lines = []
    for interface in host_network.interfaces:
        speed = f"{interface.gigabits_s:g} Gb/s" if interface.gigabits_s else "unknown speed"
        addresses = ", ".join(interface.addresses[:2]) or "no address"
        lines.append(f"{interface.name:<12} {'up' if interface.up else 'down':<5}{speed:>16}  {addresses}"[: columns()])
    for card in host_network.rdma:
        state = "up" if card.active else "down"
        lines.append(f"{card.name:<12} {state:<5}{card.gigabits_s:>11g} Gb/s  {card.kind}"[: columns()])
    return lines


def _transport_lines(chosen: Transport) -> list[str]:
    lines = ["", *_wrapped([(f"between machines: {chosen.name}", chosen.why)])]
    for name, value in chosen.variables.items():
        lines.append(f"  {name}={value}{'  (set by you)' if name in chosen.kept else ''}")
    return lines


def _listen(address: str, token: str | None) -> None:
    def print_line(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    listen(address, token, ready=lambda at: print_line(f"listening on {at} until Ctrl-C"), report=print_line)


# -- output


def _wrapped(pairs: list[tuple[str, str]]) -> list[str]:
    """Return pairs of statement and reason, as wide as the terminal."""
    return [line for what, why in pairs for line in textwrap.wrap(f"{what}: {why}", columns(), subsequent_indent="  ")]


@contextmanager
def _bar() -> Iterator[Callable[[str, float], None]]:
    """Yield what draws a bar on a terminal, else prints one line per stage; on stderr."""
    if not sys.stderr.isatty():
        shown = set[str]()

        def show(stage: str, _share: float) -> None:
            if stage not in shown:
                shown.add(stage)
                print(f"measuring {stage}", file=sys.stderr, flush=True)

        yield show
        return
    with terminal_bars("measuring {task.description:9}", "Bar", "TimeRemaining") as bars:
        task = bars.add_task("write", total=1.0)
        yield lambda stage, share: bars.update(task, description=stage, completed=share)
