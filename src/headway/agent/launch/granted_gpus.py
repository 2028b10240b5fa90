"""The GPUs that an elastic run has been granted on each machine, as its engine tells them."""

from collections.abc import Mapping

from headway.errors import UsageError


def granted_gpus(environment: Mapping[str, str]) -> tuple[int, ...]:
    """Return the GPUs on each machine of this start, by HEADWAY_GPUS: a worker per GPU."""
    text, machines = environment.get("HEADWAY_GPUS", ""), environment.get("HEADWAY_MACHINES", "").split(",")
    counts = tuple(int(count) for count in text.split(",") if count.isdecimal())
    if not all(counts) or len(counts) != len(machines) or len(counts) != text.count(",") + 1:
        raise UsageError(
            f"--elastic needs the GPUs on each machine; HEADWAY_GPUS is {text!r} for {len(machines)} machines",
            hint="the service sets it for its jobs; an agent of a node that is older does not",
        )
    return counts
