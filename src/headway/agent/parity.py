"""The parity check: proof that a mesh computes what one process does, by running the same steps on both.

`check_parity` validates everything first, so that a mesh that cannot run is refused before any process starts. Then it
runs one trial in a single process and one on each mesh, in folders that are removed at the end.
"""

import contextlib
import json
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.agent.attempt import Attempt
from headway.agent.launch.mesh_checks import count_workers, default_workers
from headway.agent.launch.prepare import new_run
from headway.agent.launch.resolve import resolve_recipe
from headway.agent.parity_compare import (
    ModuleSums,
    Tolerances,
    TrialNumbers,
    Verdict,
    compare_trials,
    merge_sums,
    tolerances_of,
)
from headway.agent.supervise.outcome import AttemptOutcome
from headway.agent.supervise.supervisor import supervise_run
from headway.agent.workers.env import worker_environment
from headway.agent.workers.zygote import ZygoteClient
from headway.errors import HeadwayError, RunError, UsageError, WorkerError, plural
from headway.hardware import devices
from headway.plan.settings import AXES
from headway.recipe import FaultPlan, Parallel, ParityTrial, Recipe, with_mesh
from headway.recipe.families.mixtral import MixtureLike
from headway.state import open_checkpoint, read_box
from headway.track import read_recipe

ELSEWHERE = ("headway logs", "headway resume", "headway report", "checkpoint.")
"""Parts of hints that refer to a run folder; that of a trial is gone when they are read."""


@dataclass(frozen=True)
class MeshParity:
    """The result for one mesh."""

    mesh: str
    """Description: shard 2 x tensor 2."""
    parallel: Parallel
    """As resolved for the trial."""
    workers: int
    microbatch: int | None
    """Rows per pass; None is a worker's whole share."""
    seconds: float
    """Duration of the trial and the comparison."""
    verdict: Verdict | None = None
    """None if the trial failed."""
    error: str | None = None
    hint: str | None = None

    @property
    def equal(self) -> bool:
        """Whether it ran and computed what one process computes."""
        return self.verdict is not None and self.verdict.equal


@dataclass(frozen=True)
class ParityReport:
    """The result of a parity check."""

    recipe: str
    steps: int
    dtype: str
    device: str
    tolerances: Tolerances
    losses: Sequence[float]
    """Losses of the single process."""
    meshes: tuple[MeshParity, ...]

    @property
    def equal(self) -> bool:
        """Whether all meshes are equal."""
        return all(mesh.equal for mesh in self.meshes)


def check_parity(
    recipe: Recipe,
    meshes: Sequence[Parallel],
    root: Path,
    *,
    steps: int = 3,
    keep: Path | None = None,
    report: Callable[[str], None] = lambda _: None,
    warm: ZygoteClient | None = None,
) -> ParityReport:
    """Compare each mesh with a single process.

    `root` has the runs that the recipe may start from, `report` is called with progress messages, and `keep` names a
    new folder in which the trials stay.
    """
    assert steps >= 1, "no step, no gradient"
    recipe = _by_rows(_with_device(resolve_recipe(recipe, root), meshes))
    results = list[MeshParity]()
    with _folder(keep) as folder, _stoppable():
        try:
            # 1 validate, and refuse what cannot run
            unsharded = recipe.model_copy(update={"parallel": None})
            single = new_run(unsharded, folder, name="single", workers=1)
            single = single.model_copy(update={"faults": FaultPlan()})  # faults are injected into the mesh only
            attempts = [_prepare_mesh(recipe, mesh, folder, i) for i, mesh in enumerate(meshes, 1)]
            with _shared_zygote(folder, single, warm) as zygote:
                # 2 one process
                report("one process")
                outcome = _run(single, steps, zygote)
                if outcome.state == "failed":
                    raise WorkerError(f"one process, without a mesh: {outcome.reason}", hint=_hint(outcome))
                losses = read_trial(_trial_folder(single)).losses
                # 3 each mesh
                for mesh, attempt in zip(meshes, attempts, strict=True):
                    name = describe(mesh, attempt.workers)
                    report(f"{name}: {plural(attempt.workers, 'worker')} on {attempt.device}")
                    results.append(_compare_mesh(single, attempt, name, steps, zygote))
                    if keep is None:
                        shutil.rmtree(attempt.run)
        except KeyboardInterrupt:
            raise WorkerError(f"stopped on request after {len(results)} of {len(meshes)} meshes") from None
    return ParityReport(
        recipe.name, steps, recipe.train.dtype, single.device, tolerances_of(recipe.train), losses, tuple(results)
    )


def describe(parallel: Parallel, workers: int) -> str:
    """Describe a mesh and its other settings: shard 2 x pipeline 2, interleaved."""
    sizes = parallel.sizes(workers)
    parts = [" x ".join(f"{axis} {sizes[axis]}" for axis in AXES if sizes.get(axis, 1) > 1) or "one worker"]
    if parallel.pipeline > 1 and parallel.schedule != "1f1b":
        parts.append(parallel.schedule)
    if parallel.chunks > 2:
        parts.append(f"{parallel.chunks} chunks")
    if parallel.stages is not None:
        parts.append(f"stages {':'.join(map(str, parallel.stages))}")
    if parallel.context_attention is not None:
        parts.append(parallel.context_attention)
    if parallel.keep_weights:
        parts.append("weights kept")
    if parallel.reduce_each:
        parts.append("reduced each")
    return ", ".join(parts)


# -- before any process


def _with_device(recipe: Recipe, meshes: Sequence[Parallel]) -> Recipe:
    """Choose the device: GPUs for all trials if there are enough for the largest mesh, else the CPU."""
    available = devices(recipe.train.device)
    default = default_workers(available)
    most = max(count_workers(recipe.model_copy(update={"parallel": mesh}), None, default) for mesh in meshes)
    too_few = available.kind == "cuda" and most > available.count and recipe.train.device == "auto"
    train = recipe.train.model_copy(update={"device": "cpu" if too_few else available.kind})
    return recipe.model_copy(update={"train": train})


def _by_rows(recipe: Recipe) -> Recipe:
    """A model with an auxiliary loss has one per microbatch: with one row in each they are the same on every mesh."""
    if not isinstance(recipe.model, MixtureLike) or not recipe.model.balance:
        return recipe
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"microbatch": 1})})


def _prepare_mesh(recipe: Recipe, mesh: Parallel, folder: Path, number: int) -> Attempt:
    try:
        return new_run(with_mesh(recipe, mesh, "this mesh"), folder, name=f"mesh-{number}")
    except HeadwayError as error:
        kind = UsageError if error.exit_status == UsageError.exit_status else RunError
        raise kind(f"{describe(mesh, 1)}: {error.message}", hint=error.hint) from None


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    """The folder of the trials: a new one that stays, or a temporary one."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="headway-check-", ignore_cleanup_errors=True) as temporary:
            yield Path(temporary)
        return
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise UsageError(f"--keep {keep}: not an empty folder", hint="name a folder that does not exist yet")
    yield keep.resolve()


# -- trials


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end this process as Ctrl-C does, so that nothing is left behind."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _shared_zygote(folder: Path, attempt: Attempt, warm: ZygoteClient | None) -> Iterator[ZygoteClient]:
    """One zygote for all trials, so that torch is imported once."""
    if warm is not None:
        yield warm
        return
    zygote = ZygoteClient.start(folder / "zygote.log", worker_environment(attempt))
    try:
        yield zygote
    finally:
        zygote.kill()  # it may still be importing, and all of its workers have ended
        zygote.close()


def _run(attempt: Attempt, steps: int, zygote: ZygoteClient) -> AttemptOutcome:
    """Run one trial; raise KeyboardInterrupt if a stop was requested, whatever the outcome."""
    attempt.folder.logs.mkdir(exist_ok=True)
    stops = [0]
    trial = ParityTrial(folder=str(_trial_folder(attempt)), steps=steps)
    outcome = supervise_run(attempt.model_copy(update={"trial": trial}), on_tick=stops.append, warm=zygote)
    if stops[-1] or outcome.state == "stopped":
        raise KeyboardInterrupt
    return outcome


def _compare_mesh(single: Attempt, attempt: Attempt, mesh: str, steps: int, zygote: ZygoteClient) -> MeshParity:
    started = time.monotonic()
    outcome = _run(attempt, steps, zygote)
    recipe = read_recipe(attempt.folder)
    verdict, error, hint = None, None, None
    if outcome.state == "failed":
        error, hint = outcome.reason, _hint(outcome)
    else:
        trials = read_trial(_trial_folder(single)), read_trial(_trial_folder(attempt))
        verdict = compare_trials(*trials, tolerances_of(recipe.train))
    return MeshParity(
        mesh=mesh,
        parallel=recipe.parallel or Parallel(),
        workers=attempt.workers,
        microbatch=recipe.train.microbatch,
        seconds=time.monotonic() - started,
        verdict=verdict,
        error=error,
        hint=hint,
    )


def _hint(outcome: AttemptOutcome) -> str:
    if outcome.hint is None or any(part in outcome.hint for part in ELSEWHERE):
        return "--keep DIR keeps the trials and their logs"
    return outcome.hint


def _trial_folder(attempt: Attempt) -> Path:
    return attempt.run / "trial"


# -- what trials write


def read_trial(folder: Path) -> TrialNumbers:
    """Read what a trial wrote; its tensors stay on disk until they are accessed."""
    trial = json.loads((folder / "trial.json").read_text())
    ranks = [json.loads(file.read_text()) for file in sorted(folder.glob("marks-*.json"))]
    steps = range(1, len(trial["losses"]) + 1)
    return TrialNumbers(
        losses=trial["losses"],
        module_sums=merge_sums(
            [ModuleSums(tuple(row["place"]), row["name"], row["sum"], row["squares"], row["count"]) for row in rows]
            for rows in ranks
        ),
        gradients=[TrialTensors(_step(folder / "gradients", step), "gradient/") for step in steps],
        parameters=[TrialTensors(_step(folder / "parameters", step), "model/") for step in steps],
        adamw=TrialTensors(_step(folder / "adamw", steps[-1]), "model/"),
        order=trial["order"],
    )


def _step(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


class TrialTensors(Mapping[str, NDArray[Any]]):
    """The tensors of a checkpoint whose names have a prefix, by the rest of their names; each read on access."""

    def __init__(self, path: Path, prefix: str) -> None:
        self._checkpoint = open_checkpoint(path)
        tensors = self._checkpoint.manifest.tensors
        self._names = {name.removeprefix(prefix): name for name in tensors if name.startswith(prefix)}

    def __getitem__(self, name: str) -> NDArray[Any]:
        full = self._names[name]
        entry = self._checkpoint.manifest.tensors[full]
        bits = read_box(self._checkpoint, full, (0,) * len(entry.shape), entry.shape)
        if entry.dtype == "bfloat16":  # NumPy has none: it is the upper half of a float32
            return (bits.astype(np.uint32) << 16).view(np.float32)
        return bits.view(entry.dtype if not entry.dtype.startswith("float8") else bits.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
