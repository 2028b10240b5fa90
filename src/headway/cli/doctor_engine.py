"""`headway doctor --engine E`: checks the configuration of an engine."""

from collections.abc import Sequence
from dataclasses import asdict
from textwrap import wrap
from typing import Any

from headway.cli.text import columns, plural
from headway.cluster.engines.settings import engine_settings, reach_engine
from headway.cluster.engines.slurm.commands import run
from headway.cluster.engines.slurm.parse import PARTITIONS, parse_partitions
from headway.cluster.engines.slurm.site_advice import Advice, advise, parse_configuration
from headway.errors import UsageError
from headway.track import runs_root


def look_at_engine(name: str) -> tuple[dict[str, Any], list[str]]:
    """Return what an engine's configuration has and lacks for runs, as JSON-ready values and as text."""
    engine_settings(name)
    if name == "ray":
        return _look_at_ray()
    if name != "slurm":
        raise UsageError(f"nothing to check for engine {name}", hint="headway doctor --engine slurm, or ray")
    conf = parse_configuration(run("scontrol", "show", "config"))
    partitions = parse_partitions(run("sinfo", "--noheader", f"--format={PARTITIONS}"))
    advice = advise(conf, partitions)
    return {"engine": name, "version": conf["SLURM_VERSION"], "advice": [asdict(item) for item in advice]}, [
        f"Slurm {conf['SLURM_VERSION']} answers; runs work with it as is",
        *advice_lines(advice),
    ]


def advice_lines(advice: Sequence[Advice]) -> list[str]:
    """Return what is missing, then what is there, as wide as the terminal."""
    missing, width, indent = [item for item in advice if not item.good], columns(), " " * 8
    lines = list[str]()
    for item in sorted(advice, key=lambda item: item.good):
        lines.append(f"  {'ok   ' if item.good else 'lacks'} {item.key} = {item.found}"[:width])
        lines += wrap(item.text, width, initial_indent=indent, subsequent_indent=indent)
    return [*lines, f"{len(missing)} of {len(advice)} can be improved" if missing else "nothing is missing"]


def _look_at_ray() -> tuple[dict[str, Any], list[str]]:
    """Connect to the Ray cluster, as a submission does, and list what it has; raise EngineError if that fails."""
    machines = reach_engine("ray", runs_root()).inventory()
    gpus, cpus = sum(machine.gpus for machine in machines), sum(machine.cpus for machine in machines)
    names = ", ".join(machine.name for machine in machines)
    lines = [
        f"Ray answers and accepts this process: {plural(len(machines), 'node')}, {plural(gpus, 'GPU')}, {cpus:g} CPUs"
    ]
    lines += wrap(names, columns(), initial_indent="  ", subsequent_indent="  ")
    return {"engine": "ray", "machines": [asdict(machine) for machine in machines]}, lines
