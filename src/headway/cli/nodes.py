"""`headway nodes`: the machines that an engine has."""

from typing import TYPE_CHECKING

from headway.cli.options import EngineName, Json, Runs

if TYPE_CHECKING:
    from headway.cluster.engines import Machine

__all__ = ["nodes"]

WIDTH = 80
GIB = 2**30


def nodes(engine: EngineName = "local", runs: Runs = None, json: Json = False) -> None:
    """List an engine's machines: what each has, and what is free of it."""
    from dataclasses import asdict

    from headway.cli.text import print_json
    from headway.cluster.engines.settings import open_engine
    from headway.track import runs_root

    found = open_engine(engine, runs_root(runs)).inventory()
    if json:
        print_json([asdict(machine) for machine in found])
        return
    print("\n".join(_table(found)))
    free = sum(machine.gpus_free for machine in found)
    print(f"{len(found)} machines, {free} of {sum(machine.gpus for machine in found)} GPUs free")
    print(f"next: headway submit RECIPE --engine {engine} --on CHIPxPERNODE")


def _table(found: "list[Machine]") -> list[str]:
    width = max([len("machine"), *(len(machine.name) for machine in found)])
    head = f"{'machine':{width}}  {'state':5}  {'GPUs':>4}  {'free':>4}  {'CPUs':>5}  {'memory':>8}  groups"
    rows = []
    for machine in found:
        memory = f"{machine.memory_bytes / GIB:,.0f} GiB"
        row = f"{machine.name:{width}}  {machine.state:5}  {machine.gpus:>4}  {machine.gpus_free:>4}  {machine.cpus:>5}"
        rest = ",".join(machine.groups) + (f"  ({machine.reason})" if machine.reason else "")
        rows.append(f"{row}  {memory:>8}  {rest}".rstrip()[:WIDTH])
    return [head.rstrip(), *rows]
