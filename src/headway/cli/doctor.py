"""`headway doctor`: looks at what a run would stand on, and says what it is good for."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli.options import Json

if TYPE_CHECKING:
    from headway.hardware.network import HostNetwork, Transport
    from headway.hardware.storage import StorageRates

__all__ = ["doctor"]


def doctor(
    storage: Annotated[
        Path | None, typer.Option("--storage", metavar="PATH", help="Measure the disk that holds this folder.")
    ] = None,
    network: Annotated[
        bool, typer.Option("--network", help="Show interfaces and RDMA, and what NCCL would use.")
    ] = False,
    with_: Annotated[
        str | None, typer.Option("--with", metavar="HOST:PORT", help="With --network: measure TCP to a listener.")
    ] = None,
    listen: Annotated[
        str | None, typer.Option("--listen", metavar="HOST:PORT", help="With --network: be one, until Ctrl-C.")
    ] = None,
    token_env: Annotated[
        str | None,
        typer.Option("--token-env", metavar="NAME", help="Variable with a token both sides know; needed off loopback."),
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", min=0.1, max=30, help="How long to measure, about.")] = 5.0,
    engine: Annotated[
        str | None, typer.Option("--engine", metavar="ENGINE", help="Say what its configuration lacks: slurm.")
    ] = None,
    json: Json = False,
) -> None:
    """Look at what a run would stand on: a disk, the network here or between two machines, an engine."""
    from headway.cli.text import print_json
    from headway.errors import UsageError

    _check(network, with_, listen)
    if storage is None and not network and engine is None:
        raise UsageError("say what to look at", hint="headway doctor --storage PATH, --network or --engine slurm")
    if listen is not None:
        _listen(listen, _token(token_env))
        return
    found: dict[str, Any] = {}
    lines: list[str] = []
    if storage is not None:
        found["storage"], said = _storage(storage, seconds)
        lines += said
    if network:
        found["network"], said = _network(with_, _token(token_env), seconds)
        lines += [""] * bool(lines) + said
    if engine is not None:
        from headway.cli.doctor_engine import look_at_engine

        found["engine"], said = look_at_engine(engine)
        lines += [""] * bool(lines) + said
    if json:
        print_json(found)
        return
    print("\n".join(lines))
    print(f"next: {_next(storage, with_) if engine is None else f'headway nodes --engine {engine}'}")


def _check(network: bool, with_: str | None, listen: str | None) -> None:
    from headway.errors import UsageError

    if (with_ or listen) and not network:
        raise UsageError(f"--{'with' if with_ else 'listen'} goes with --network", hint="headway doctor --help")
    if with_ and listen:
        raise UsageError("one side listens and the other measures", hint="--listen there, --with here")


def _next(storage: Path | None, with_: str | None) -> str:
    if storage is not None:
        return "headway train RECIPE --runs DIR"
    return "headway plan RECIPE" if with_ else "headway doctor --network --listen HOST:PORT, --with it elsewhere"


def _token(name: str | None) -> str | None:
    from headway.errors import UsageError

    if name is None:
        return None
    if not os.environ.get(name):
        raise UsageError(f"there is no variable {name}, or it is empty", hint=f"export {name}=... on both sides")
    return os.environ[name]


# -- storage


def _storage(path: Path, seconds: float) -> tuple[dict[str, Any], list[str]]:
    from headway.hardware.storage import measure_storage, uses

    with _bar() as progress:
        found = measure_storage(path, seconds, progress)
    good = uses(found)
    document = {**vars(found), "uses": [vars(one) for one in good]}
    lines = [*_rates(found), ""]
    lines += _wrapped([(f"use it for {one.what}" if one.good else f"not for {one.what}", one.why) for one in good])
    if not any(one.good for one in good):
        lines.append("good for nothing that a run writes or reads")
    return document, lines


def _rates(found: "StorageRates") -> list[str]:
    kind = found.file_system or "file system not known"
    how = "around the page cache" if found.cold else "the page cache may have helped"
    return [
        f"{found.path}: {kind}, {found.free_bytes / 1e9:,.1f} GB free",
        f"  write         {found.write_bytes_s / 1e6:>10,.0f} MB/s, fsync included",
        f"  read          {found.read_bytes_s / 1e6:>10,.0f} MB/s, {how}",
        f"  durable lines {found.flushes_s:>10,.0f} /s, 4 KiB and fsync each",
        f"  files made    {found.creates_s:>10,.0f} /s, looked at {found.stats_s:,.0f}",
        f"  files renamed {found.renames_s:>10,.0f} /s, removed {found.unlinks_s:,.0f}",
        f"  locks         {'work' if found.locks else 'do not work':>10}",
    ]


# -- network


def _network(with_: str | None, token: str | None, seconds: float) -> tuple[dict[str, Any], list[str]]:
    from headway.hardware.network import find_network, main_address, transport

    found, host = find_network(), os.environ.get("HEADWAY_HOST") or main_address()
    # As agents have it: by the address that they call each other at, where there is one to call at.
    chosen = transport(found, host=None if host == "127.0.0.1" else host)
    document: dict[str, Any] = {
        "interfaces": [vars(one) for one in found.interfaces],
        "rdma": [vars(one) for one in found.rdma],
        "gpudirect": found.gpudirect,
        "transport": vars(chosen),
    }
    lines = [*_found(found), *_chosen(chosen)]
    if with_ is not None:
        from headway.hardware.link_bench import measure

        rates = measure(with_, token, seconds / 2)
        document["with"] = {"address": with_, **vars(rates)}
        lines.append(
            f"TCP with {with_}: {rates.there_bytes_s / 1e9:.2f} GB/s there, {rates.back_bytes_s / 1e9:.2f} back, "
            f"{rates.round_trip_s * 1e6:.0f} us"
        )
    return document, lines


def _found(found: "HostNetwork") -> list[str]:
    lines = []
    for one in found.interfaces:
        speed = f"{one.gigabits_s:g} Gb/s" if one.gigabits_s else "speed not known"
        where = ", ".join(one.addresses[:2]) or "no address"
        lines.append(f"{one.name:<12} {'up' if one.up else 'down':<5}{speed:>16}  {where}"[:80])
    for card in found.rdma:
        state = "up" if card.active else "down"
        lines.append(f"{card.name:<12} {state:<5}{card.gigabits_s:>11g} Gb/s  {card.kind}"[:80])
    return lines


def _chosen(chosen: "Transport") -> list[str]:
    lines = ["", *_wrapped([(f"between machines: {chosen.name}", chosen.why)])]
    for name, value in chosen.variables.items():
        lines.append(f"  {name}={value}{'  (set by you)' if name in chosen.kept else ''}")
    return lines


def _listen(address: str, token: str | None) -> None:
    from headway.hardware.link_bench import listen

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    listen(address, token, ready=lambda at: say(f"listening on {at} until Ctrl-C"), report=say)


# -- how it looks


def _wrapped(pairs: list[tuple[str, str]]) -> list[str]:
    """Something and why, no wider than a terminal."""
    import textwrap

    return [line for what, why in pairs for line in textwrap.wrap(f"{what}: {why}", 80, subsequent_indent="  ")]


@contextmanager
def _bar() -> Iterator[Callable[[str, float], None]]:
    """A bar on a terminal, else a line a stage; on stderr either way."""
    if not sys.stderr.isatty():
        said = set[str]()

        def say(stage: str, _share: float) -> None:
            if stage not in said:
                said.add(stage)
                print(f"measuring {stage}", file=sys.stderr, flush=True)

        yield say
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("measuring {task.description:9}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("write", total=1.0)
        yield lambda stage, share: bars.update(task, description=stage, completed=share)
