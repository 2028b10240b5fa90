"""`plan(recipe, cluster) -> Plan`: the best mesh and settings for a recipe, its speed, memory, duration and cost."""

from dataclasses import dataclass, replace

from headway.errors import RecipeError, UsageError
from headway.hardware import Ceilings, Cluster
from headway.hardware.cluster import GPU_HOURS_BETWEEN_FAILURES
from headway.plan.architecture import Architecture
from headway.plan.costs import Fidelity, make_cost_model
from headway.plan.efficiencies import Efficiencies
from headway.plan.estimate import Estimate
from headway.plan.fit_advice import smallest_change
from headway.plan.flops import parameters
from headway.plan.goodput import Goodput, goodput, save_seconds, stall_seconds
from headway.plan.search import Rank, RankedPlan, SearchResult, search
from headway.plan.settings import Software
from headway.plan.task import SearchSpace, TrainingTask
from headway.plan.trainer import stated_mesh, trainer_precision, trainer_software
from headway.recipe import Recipe, with_settings

MOST_SEQUENCES = 10**8
"""Largest plausible batch, and sequence length."""
RESTART_S = 120.0
"""Assumed seconds from a failure to the next step: detection, new processes, restore."""
SECONDS_PER_DAY = 86400.0
ROOM = 0.05
"""Share of device memory that stays free when only some layers are recomputed: predicted peaks on an H200 are off by
up to 6 %, 1 % on average. A stated memory_gb is used as is."""
GIB = 2**30


@dataclass(frozen=True)
class CheckpointStorage:
    """What the checkpoints of a run take on disk, and what there is."""

    save_bytes: float
    """Size of one checkpoint."""
    steps: int
    keep_last: int
    keep_every_steps: int
    capacity_bytes: float | None = None
    """What the cluster has; None if unknown."""

    @property
    def kept(self) -> int:
        """Checkpoints kept at the end of the run, at most; one more is there while it is written."""
        multiples = self.steps // self.keep_every_steps if self.keep_every_steps else 0
        return self.keep_last + multiples

    @property
    def peak_bytes(self) -> float:
        """The most that is there at once."""
        return self.save_bytes * (self.kept + 1)

    @property
    def advice(self) -> str | None:
        """The keys that make the checkpoints fit; None if they do, or if the capacity is unknown."""
        if self.capacity_bytes is None or self.peak_bytes <= self.capacity_bytes:
            return None
        room = int(self.capacity_bytes // self.save_bytes) - 1
        if room < 1:
            return "it does not hold two, and the old one is removed after the new one is durable"
        keep_last = min(self.keep_last, room)
        if room > keep_last and self.keep_every_steps:
            return f"checkpoint.keep_every_steps={-(-self.steps // (room - keep_last))} fits"
        every = ", keep_every_steps=0" if self.keep_every_steps else ""
        return f"checkpoint.keep_last={keep_last}{every} fits"


@dataclass(frozen=True)
class RunForecast:
    """The full run at a plan's speed, with failures and checkpoints."""

    steps: int
    tokens: int
    seconds: float
    """Wall time."""
    device_hours: float
    price_per_device_hour: float | None
    goodput: Goodput
    storage: CheckpointStorage

    @property
    def days(self) -> float:
        """Days of wall time."""
        return self.seconds / SECONDS_PER_DAY

    @property
    def cost(self) -> float | None:
        """Cost of the run; None without a price."""
        return None if self.price_per_device_hour is None else self.device_hours * self.price_per_device_hour


@dataclass(frozen=True)
class Plan:
    """A planned recipe on a cluster."""

    name: str
    architecture: Architecture
    cluster: Cluster
    fidelity: Fidelity
    seq: int
    batch: int
    result: SearchResult
    """The best plan and its runners-up."""
    run: RunForecast
    """The recipe at the best plan's speed."""

    @property
    def best(self) -> RankedPlan:
        """The best plan."""
        return self.result.plans[0]

    @property
    def runnable(self) -> RankedPlan | None:
        """The best plan that this version's trainer runs; None if none fits."""
        return self.result.runnable


def make_task(
    recipe: Recipe, cluster: Cluster, arch: Architecture | None = None, imbalance: float = 1.0
) -> TrainingTask:
    """The training task of a recipe under Headway's trainer; `arch` replaces the recipe's model."""
    if arch is None and recipe.model.class_ is not None:
        raise UsageError(
            f"model.class = {recipe.model.class_}: the cost of a custom class is unknown",
            hint="train it without a plan, on the mesh in [parallel]",
        )
    return TrainingTask(
        architecture=arch or recipe.model.architecture(),
        seq=recipe.data.seq,
        batch=max(recipe.train.batches),
        software=trainer_software(recipe, cluster.chip),
        precision=trainer_precision(recipe),
        imbalance=imbalance,
    )


def plan(
    recipe: Recipe,
    cluster: Cluster,
    *,
    fidelity: Fidelity = "default",
    parameters: Efficiencies | None = None,
    ceilings: Ceilings | None = None,
    arch: Architecture | None = None,
    imbalance: float = 1.0,
    choices: SearchSpace | None = None,
    rank: Rank = "time",
    price: float | None = None,
    keep: int = 6,
) -> Plan:
    """Find the best settings for a recipe and its runners-up, and forecast the full run."""
    if max(recipe.train.batches) > MOST_SEQUENCES or recipe.data.seq > MOST_SEQUENCES:
        raise UsageError(f"a batch of {recipe.train.batch:,} sequences of {recipe.data.seq:,} tokens is too large")
    cluster = cap_memory(cluster, recipe)
    costs = make_cost_model(cluster, fidelity, parameters, ceilings)
    task = make_task(recipe, cluster, arch, imbalance)
    space = narrow_space(recipe, cluster, choices or SearchSpace())
    result = search(task, costs, space, rank=rank, keep=keep)
    if not result.plans:
        advice = smallest_change(task, cluster, space, smaller_states(recipe, cluster))
        raise UsageError(f"{recipe.name} does not fit on {cluster.name}", hint=advice.sentence)
    return Plan(
        name=recipe.name,
        architecture=task.architecture,
        cluster=cluster,
        fidelity=fidelity,
        seq=task.seq,
        batch=task.batch,
        result=result,
        run=_run(recipe, cluster, result.plans[0].estimate, price),
    )


def smaller_states(recipe: Recipe, cluster: Cluster) -> list[tuple[tuple[str, ...], Software]]:
    """Settings that make the optimizer's states smaller, from the largest, and the trainer's software with each."""
    train = recipe.train
    choices: list[tuple[str, ...]] = [("train.moments=bfloat16",)] if train.moments == "float32" else []
    if train.optimizer == "adamw":
        choices.append(("train.optimizer=adamw-8bit",))
        choices.append(("train.weights=bfloat16", "train.optimizer=adamw-8bit"))
    software: list[tuple[tuple[str, ...], Software]] = []
    for settings in choices:
        try:
            software.append((settings, trainer_software(with_settings(recipe, settings), cluster.chip)))
        except RecipeError:  # another key excludes it
            continue
    return software


def cap_memory(cluster: Cluster, recipe: Recipe) -> Cluster:
    """The cluster with device memory capped at the recipe's train.memory_gb."""
    limit_gb = recipe.train.memory_gb
    if limit_gb is None or limit_gb * GIB >= cluster.chip.memory_bytes:
        return cluster
    return replace(cluster, chip=replace(cluster.chip, memory_bytes=int(limit_gb * GIB)))


def narrow_space(recipe: Recipe, cluster: Cluster, choices: SearchSpace) -> SearchSpace:
    """The search space without what the recipe states, and with what it leaves open to the trainer."""
    train, parallel = recipe.train, recipe.parallel
    if train.microbatch is not None and choices.microbatches is None:
        choices = replace(choices, microbatches=(train.microbatch,))
    if train.recompute is not None:
        choices = replace(choices, recompute=(train.recompute,))
    open_blocks = train.recompute_blocks is None and (train.recompute is None or train.memory_gb is not None)
    room = ROOM if train.memory_gb is None else 0.0
    choices = replace(choices, blocks=train.recompute_blocks, least_blocks=open_blocks, room=room)
    keep_weights = None if parallel is None else parallel.keep_weights
    choices = replace(choices, keeps_weights=(False, True) if keep_weights is None else (keep_weights,))
    reduce_each = None if parallel is None else parallel.reduce_each
    choices = replace(choices, reduces_each=(False, True) if reduce_each is None else (reduce_each,))
    if parallel is None or choices.mesh is not None:
        return choices
    interleaved = parallel.schedule == "interleaved"
    return replace(
        choices,
        mesh=stated_mesh(parallel, cluster.devices),
        schedules=(parallel.schedule,),
        chunks=(parallel.chunks,) if interleaved else None,
        stages=parallel.stages,
    )


def _run(recipe: Recipe, cluster: Cluster, best: Estimate, price: float | None) -> RunForecast:
    steps, sequences = recipe.train.steps, recipe.train.sequences(recipe.train.steps)
    failures = cluster.gpu_hours_between_failures
    if failures is None and cluster.chip.name != "cpu":
        failures = GPU_HOURS_BETWEEN_FAILURES
    software = best.settings.software
    bytes_each = 2 * software.moment_bytes + (software.master_bytes or software.weight_bytes)
    if software.states is not None:
        bytes_each = software.states.block_bytes + software.weight_bytes
    state_bytes = parameters(best.architecture) * bytes_each
    stall_s = stall_seconds(state_bytes / cluster.devices, best.step.seconds, gpu=cluster.chip.name != "cpu")
    forecast = goodput(
        run_s=sequences / best.settings.batch * best.step.seconds,
        devices=cluster.devices,
        gpu_hours_between_failures=failures,
        save_s=stall_s,
        restart_s=RESTART_S,
        step_s=best.step.seconds,
        write_s=save_seconds(state_bytes, cluster.nodes, cluster.storage_bytes_s),
    )
    hours = forecast.wall_s / 3600 * cluster.devices
    per_hour = price if price is not None else cluster.price_per_gpu_hour
    checkpoint = recipe.checkpoint
    storage = CheckpointStorage(
        state_bytes, steps, checkpoint.keep_last, checkpoint.keep_every_steps, cluster.storage_bytes
    )
    return RunForecast(steps, sequences * recipe.data.seq, forecast.wall_s, hours, per_hour, forecast, storage)
