"""Describe a job on a Ray cluster, for --dry-run."""

import shlex
from collections.abc import Mapping

from headway.cluster.engines.engine import LaunchRequest

__all__ = ["describe_job"]


def describe_job(request: LaunchRequest, bundle: Mapping[str, float], strategy: str) -> str:
    """The placement group, and what runs in each of its bundles; secrets by name only."""
    resources = ", ".join(f"{name} {amount:g}" for name, amount in bundle.items())
    lines = [f"placement group, {strategy}: {request.machines} x {{{resources}}}"]
    if request.array is not None:
        at_once = f", {request.at_once} at a time" if request.at_once else ""
        lines.append(f"once per array task: {request.array}{at_once}")
    if request.avoid:
        lines.append(f"not on {', '.join(request.avoid)}")
    lines += [f"in each bundle, in {request.folder}:"]
    lines += [f"  {name}={shlex.quote(value)}" for name, value in sorted(request.environment.items())]
    lines += [f"  {name}=(from the submitter's environment)" for name in request.secrets]
    lines += [f"  {line}" for line in request.setup]
    lines.append(f"  {shlex.join(request.command)}")
    limit = "none" if request.limit_s is None else f"{request.limit_s:g} s"
    lines.append(f"time limit {limit}, SIGUSR1 {request.grace_s:g} s before a stop")
    return "\n".join(lines) + "\n"
