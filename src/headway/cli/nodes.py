"""`headway nodes`: lists an engine's machines and what is free."""

from dataclasses import asdict

from headway.cli.options import EngineName, Json, Runs
from headway.cli.text import columns, plural, print_json
from headway.cluster.engines import Machine
from headway.cluster.engines.settings import reach_engine
from headway.track import runs_root

GIB = 2**30


def nodes(engine: EngineName = "local", runs: Runs = None, json: Json = False) -> None:
    """List an engine's machines and what is free."""
    machines = reach_engine(engine, runs_root(runs)).inventory()
    if json:
        print_json([asdict(machine) for machine in machines])
        return
    print("\n".join(_table(machines)))
    free = sum(machine.gpus_free for machine in machines if machine.state != "away")
    gpus = sum(machine.gpus for machine in machines)
    print(f"{plural(len(machines), 'machine')}, {free} of {plural(gpus, 'GPU')} free")
    print(f"next: headway submit RECIPE --engine {engine} --on CHIPxPERNODE")


def _table(machines: list[Machine]) -> list[str]:
    width = max([len("machine"), *(len(machine.name) for machine in machines)])
    head = f"{'machine':{width}}  {'state':5}  {'GPUs':>4}  {'free':>4}  {'CPUs':>5}  {'memory':>8}  groups"
    rows = []
    for machine in machines:
        memory = f"{machine.memory_bytes / GIB:,.0f} GiB"
        row = f"{machine.name:{width}}  {machine.state:5}  {machine.gpus:>4}  {machine.gpus_free:>4}  {machine.cpus:>5}"
        rest = ",".join(machine.groups) + (f"  ({machine.reason})" if machine.reason else "")
        rows.append(f"{row}  {memory:>8}  {rest}".rstrip()[: columns()])
    return [head.rstrip(), *rows]
