"""Elastic runs of the service: the sizes that a run may have, checked and completed before it is submitted."""

from collections.abc import Sequence
from dataclasses import dataclass

from headway.cluster.engines.engine import Machine
from headway.errors import UsageError
from headway.hardware import Cluster, Devices
from headway.recipe import Recipe

FORM = "GPUs, the smallest size first, with or without relative speeds: 8,16,32 or 8:1,16:1.9,32:3.4"


@dataclass(frozen=True)
class ElasticSizes:
    """The sizes of a run."""

    speeds: tuple[tuple[int, float], ...]
    """GPUs, and how fast the run is with them."""
    share: int
    """The most GPUs that a node will give it."""
    most_cpus: int
    """Of the nodes that can give so many."""

    @property
    def text(self) -> str:
        """As the setting `sizes` of a job."""
        return ",".join(f"{gpus}:{speed:g}" for gpus, speed in self.speeds)

    def cpus(self, per_gpu: int) -> int:
        """Return the CPUs to request on each node, whichever size it has: enough for the largest share of a node."""
        return max(min(self.share * per_gpu, self.most_cpus), 1)


def elastic_sizes(recipe: Recipe, cluster: Cluster, text: str, machines: Sequence[Machine]) -> ElasticSizes:
    """Return the sizes of a resolved recipe; those without a speed get one from their plans. UsageError for sizes that
    do not work on such devices and machines."""
    from headway.agent.launch.elastic_sizes import check_elastic, predicted_speeds  # slow to import, seldom needed

    check_elastic(recipe)
    stated = parse_sizes(recipe.name, text)
    _check_machines(recipe, cluster, machines)
    first = next(iter(stated))
    if first != cluster.devices:
        raise UsageError(
            f"run {recipe.name}: the smallest size is {first} GPUs, but --on {cluster.name} has {cluster.devices}",
            hint=f"--on {cluster.chip.name}x{first}, with the GPUs of the smallest size",
        )
    kind = "cpu" if cluster.chip.name == "cpu" else "cuda"
    predicted = predicted_speeds(recipe, stated, lambda size: Devices(kind, size, cluster.chip.name))  # type: ignore[arg-type]
    speeds = relative_speeds(recipe.name, stated, predicted)
    most = max((machine.gpus for machine in machines), default=0)
    cpus = max((machine.cpus for machine in machines if machine.gpus == most), default=1)
    return ElasticSizes(speeds, min(max(stated), most) or 1, cpus)


def parse_sizes(name: str, text: str) -> dict[int, float | None]:
    """Return the stated sizes, each with its speed or None: some have one, or none has."""
    try:
        pairs = [(int(gpus), float(speed) if colon else None) for gpus, colon, speed in map(_split, text.split(","))]
    except ValueError:
        raise UsageError(f"run {name}: sizes are {text!r}", hint=FORM) from None
    sizes = dict(pairs)
    missing = [gpus for gpus, speed in pairs if speed is None]
    if len(sizes) != len(pairs) or sorted(sizes) != list(sizes) or min(sizes) < 1:
        raise UsageError(f"run {name}: sizes are {text!r}, not increasing from 1", hint=FORM)
    if missing and len(missing) != len(pairs):
        raise UsageError(f"run {name}: size {missing[0]} has no speed, and others have", hint=FORM)
    return sizes


def _split(part: str) -> tuple[str, str, str]:
    return part.strip().partition(":")


def relative_speeds(
    name: str, stated: dict[int, float | None], predicted: dict[int, float]
) -> tuple[tuple[int, float], ...]:
    """Return the stated speeds, else those of the plans relative to the smallest size; UsageError for a size that its
    plan says is no faster than a smaller one."""
    first = next(iter(stated))
    speeds = list[tuple[int, float]]()
    for gpus, speed in stated.items():
        relative = round(predicted[gpus] / predicted[first], 3) if speed is None else speed
        if speeds and speed is None and relative <= speeds[-1][1]:
            raise UsageError(
                f"run {name}: {gpus} GPUs are predicted to be no faster than {speeds[-1][0]}",
                hint="leave that size out, or state measured speeds: 8:1,16:1.9",
            )
        speeds.append((gpus, relative))
    return tuple(speeds)


def _check_machines(recipe: Recipe, cluster: Cluster, machines: Sequence[Machine]) -> None:
    """Raise UsageError for a run on CPUs whose sizes would hold real GPUs."""
    real = [machine.name for machine in machines if machine.gpus and machine.groups != ("fake",)]
    if cluster.chip.name == "cpu" and real:
        raise UsageError(
            f"run {recipe.name}: sizes are GPUs, which --on {cluster.name} has none of; node {real[0]} has real ones",
            hint="--on CHIPxN; only emulated nodes (headway up --emulate) take runs on CPUs with sizes",
        )
