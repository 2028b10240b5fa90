"""`headway doctor --engine E`: checks the configuration of an engine."""

from dataclasses import asdict
from textwrap import wrap
from typing import Any

from headway.cluster.engines.settings import engine_settings
from headway.cluster.engines.slurm.commands import run
from headway.cluster.engines.slurm.parse import PARTITIONS, parse_partitions
from headway.cluster.engines.slurm.site_advice import advise, parse_configuration
from headway.errors import UsageError


def look_at_engine(name: str) -> tuple[dict[str, Any], list[str]]:
    """Return what an engine's configuration has and lacks for runs, as JSON-ready values and as text."""
    engine_settings(name)
    if name != "slurm":
        raise UsageError(f"nothing to check for engine {name}", hint="headway doctor --engine slurm")
    conf = parse_configuration(run("scontrol", "show", "config"))
    partitions = parse_partitions(run("sinfo", "--noheader", f"--format={PARTITIONS}"))
    advice = advise(conf, partitions)
    missing = [item for item in advice if not item.good]
    lines = [f"Slurm {conf['SLURM_VERSION']} answers; runs work with it as is"]
    for item in sorted(advice, key=lambda item: item.good):
        lines.append(f"  {'ok   ' if item.good else 'lacks'} {item.key} = {item.found}"[:80])
        lines += wrap(item.text, 80, initial_indent=" " * 8, subsequent_indent=" " * 8)
    lines.append(f"{len(missing)} of {len(advice)} can be improved" if missing else "nothing is missing")
    return {"engine": name, "version": conf["SLURM_VERSION"], "advice": [asdict(item) for item in advice]}, lines
