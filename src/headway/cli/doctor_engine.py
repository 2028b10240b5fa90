"""What `headway doctor --engine E` says of an engine."""

from dataclasses import asdict
from textwrap import wrap
from typing import Any

__all__ = ["look_at_engine"]


def look_at_engine(name: str) -> tuple[dict[str, Any], list[str]]:
    """What an engine's configuration has and lacks for runs: for programs, and in lines for people."""
    from headway.cluster.engines.settings import engine_settings
    from headway.cluster.engines.slurm.commands import run
    from headway.cluster.engines.slurm.parse import PARTITIONS, parse_partitions
    from headway.cluster.engines.slurm.site_advice import advise, parse_configuration
    from headway.errors import UsageError

    engine_settings(name)
    if name != "slurm":
        raise UsageError(f"there is nothing to look at in {name}", hint="headway doctor --engine slurm")
    conf = parse_configuration(run("scontrol", "show", "config"))
    partitions = parse_partitions(run("sinfo", "--noheader", f"--format={PARTITIONS}"))
    found = advise(conf, partitions)
    missing = [one for one in found if not one.good]
    lines = [f"Slurm {conf['SLURM_VERSION']} answers, and runs work with it as it is"]
    for one in sorted(found, key=lambda one: one.good):
        lines.append(f"  {'ok   ' if one.good else 'lacks'} {one.key} = {one.found}"[:80])
        lines += wrap(one.text, 80, initial_indent=" " * 8, subsequent_indent=" " * 8)
    lines.append(f"{len(missing)} of {len(found)} could be better" if missing else "nothing is missing")
    return {"engine": name, "version": conf["SLURM_VERSION"], "advice": [asdict(one) for one in found]}, lines
