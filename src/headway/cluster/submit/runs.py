"""Has an engine start a run's agent: what `headway submit` and its companions do, beside printing."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from headway.agent.saving.restore_points import need_store
from headway.agent.supervise.outcome import recorded_exit_status
from headway.cluster.engines.engine import OVER, REQUEUE, JobStatus, LaunchRequest, State
from headway.cluster.engines.settings import EngineSettings, engine_settings, open_engine
from headway.cluster.engines.submissions import Submission, last_submission, note_submission
from headway.cluster.submit.code_delivery import code_for, pack_code
from headway.cluster.submit.provenance import record_provenance
from headway.cluster.submit.store_runs import ask, delete_run, upload_run
from headway.errors import EngineError, HeadwayError, RunError, StateError, UsageError
from headway.hardware import Cluster, Devices
from headway.recipe import Recipe, with_settings
from headway.state.handshake import KEY_VARIABLE
from headway.track import RunFolder, list_runs, lock_holder, read_recipe, run_id, summarize
from headway.track.suspects import read_suspects

if TYPE_CHECKING:
    from headway.agent import Attempt

__all__ = ["SubmittedRun", "cancel", "describe", "provisional_run", "request_for", "requeue", "standings", "submit_run"]

CPUS_PER_GPU = 4
"""That a job asks for where nobody says: a worker, its agent's share, and what reads the data."""
GIB = 2**30
SOON_S = 10.0
"""How long a store may take to say how a job ended that its engine has forgotten."""


def request_for(
    attempt: "Attempt", cluster: Cluster, engine: str, spares: int = 0, *, dry: bool = False, shared: bool = True
) -> LaunchRequest:
    """What an engine is asked for a run: its agent on each machine, and on so many more that wait for a loss, with the
    code that it trains with. Unless it is `dry`, that is packed where it has to be. Where no folder is `shared`, agents
    have the run from its object store."""
    run, settings = attempt.folder, engine_settings(engine)
    shared = shared and settings.shared
    gpus = 0 if cluster.chip.name == "cpu" else cluster.per_node
    recipe = read_recipe(run)
    copied = record_provenance(run, recipe, settings.snapshot)
    if not shared:
        _need_code_there(settings, copied)
    code = code_for(
        settings,
        engine,
        run.path.parent,
        gpus=gpus,
        data=[part.path for part in recipe.data.parts.values()],
        snapshot=copied,
        pack=not dry,
    )
    command: tuple[str, ...] = (*code.words, "-m", "headway.cli.main", "agent")
    command += (
        ("--run", run.name, "--runs", str(run.path.parent)) if shared else ("--run", need_store(recipe, run.name))
    )
    if attempt.nodes + spares > 1:
        command += ("--nodes", str(attempt.nodes), "--workers", str(attempt.workers))
    if spares:
        command += ("--spares", str(spares))
    request = LaunchRequest(
        name=run.name,
        command=command,
        folder=run.path,
        shared=shared,
        machines=cluster.nodes + spares,
        spares=spares,
        gpus=gpus,
        cpus=settings.cpus or (gpus * CPUS_PER_GPU if gpus else cluster.per_node),
        memory_bytes=None if settings.memory_gib is None else int(settings.memory_gib * GIB),
        limit_s=settings.limit_s,
        environment=code.environment | dict(settings.environment),
        secrets=_secrets(settings.secrets, alone=shared or attempt.nodes + spares == 1),
        setup=settings.setup,
        site={**settings.site, **code.site},
    )
    return request if settings.grace_s is None else replace(request, grace_s=settings.grace_s)


def submit_run(
    recipe: Recipe,
    root: Path,
    cluster: Cluster,
    engine: str,
    name: str | None = None,
    spares: int = 0,
    *,
    shared: bool = True,
) -> Submission:
    """A new run, and the job that an engine has for it. Whatever goes wrong leaves neither."""
    shared = shared and engine_settings(engine).shared
    if not shared:
        url = need_store(recipe, name or recipe.name)
        _need_key(cluster.nodes + spares)
        ask(url)  # what can be known before anything is there
    # It takes long the first time, and a run that is half made should not wait for it.
    pack_code(engine, root.absolute())
    with provisional_run(recipe, root, cluster, name) as attempt:
        request = request_for(attempt, cluster, engine, spares, shared=shared)
        with nullcontext() if shared else _stored(attempt.folder):
            submission = Submission(engine, open_engine(engine, root).launch(request), cluster.name, request)
        note_submission(attempt.run, submission)
    return submission


def describe(
    recipe: Recipe,
    root: Path,
    cluster: Cluster,
    engine: str,
    name: str | None = None,
    spares: int = 0,
    *,
    shared: bool = True,
) -> str:
    """What would be sent; the run is made, checked and taken back."""
    if not (shared and engine_settings(engine).shared):
        need_store(recipe, name or recipe.name)
    with provisional_run(recipe, root, cluster, name, keep=False) as attempt:
        request = request_for(attempt, cluster, engine, spares, dry=True, shared=shared)
        return open_engine(engine, root).describe(request)


def _need_code_there(settings: EngineSettings, copied: Path | None) -> None:
    """Refuse code that machines could only have from the runs' folder, which they do not see. No store brings it: what
    comes from there is never executed."""
    staged = settings.code == "staged" and settings.container is None
    if staged or copied is not None:
        raise UsageError(
            f"{'code is staged' if staged else 'snapshot is on'}, and machines do not see the runs' folder",
            hint="have it installed at the same path on each machine, or in a container",
        )


def _need_key(machines: int) -> None:
    """Machines that see no common folder know each other by a key of whoever submits."""
    if machines > 1 and KEY_VARIABLE not in os.environ:
        raise UsageError(
            f"{machines} machines that see no common folder know each other by a key, and {KEY_VARIABLE} has none",
            hint=f"export {KEY_VARIABLE}=$(openssl rand -hex 32)",
        )


def _secrets(named: tuple[str, ...], alone: bool) -> tuple[str, ...]:
    """The key goes with those that need it."""
    return named if alone or KEY_VARIABLE in named else (*named, KEY_VARIABLE)


@contextmanager
def _stored(run: RunFolder) -> Iterator[None]:
    """Have a new run's small files in its store, where its place must be free; it is again if something fails."""
    try:
        upload_run(run)
        yield
    except BaseException:
        with suppress(StateError):
            delete_run(need_store(read_recipe(run), run.name), run_id(run))
        raise


@contextmanager
def provisional_run(
    recipe: Recipe, root: Path, cluster: Cluster, name: str | None, keep: bool = True
) -> Iterator["Attempt"]:
    """A run for the devices of a cluster, which goes away again if something fails."""
    kind = "cpu" if cluster.chip.name == "cpu" else "cuda"
    if recipe.train.device == "auto":
        recipe = with_settings(recipe, [f"train.device={kind}"])
    if recipe.train.device != kind:
        raise UsageError(
            f"train.device is {recipe.train.device}, and --on {cluster.name} is {kind}", hint="leave train.device out"
        )
    from headway.agent import new_run  # the other verbs here do without, and start sooner

    on = Devices(kind, cluster.devices, cluster.chip.name)  # type: ignore[arg-type]
    stated = recipe.parallel is not None and recipe.parallel.shard is not None
    workers = cluster.nodes if kind == "cpu" and not stated else None  # a worker a machine, where no mesh says more
    attempt = new_run(recipe, root.absolute(), name=name, on=on, workers=workers, nodes=cluster.nodes)
    try:
        yield attempt
    except BaseException:
        keep = False
        raise
    finally:
        if not keep:
            shutil.rmtree(attempt.folder.path, ignore_errors=True)


# -- jobs of runs


@dataclass(frozen=True)
class SubmittedRun:
    """A run's newest job, and how it stands."""

    run: RunFolder
    submission: Submission
    status: JobStatus


def standings(root: Path, runs: list[RunFolder] | None = None) -> list[SubmittedRun]:
    """How the jobs of all runs stand, one question an engine; an engine that does not answer says so in their stead."""
    found = [(run, last_submission(run.path)) for run in (list_runs(root) if runs is None else runs)]
    given = [(run, submission) for run, submission in found if submission is not None]
    told = dict[tuple[str, str], JobStatus]()
    for engine in sorted({submission.engine for _, submission in given}):
        jobs = [submission.job for _, submission in given if submission.engine == engine]
        try:
            answers = open_engine(engine, root).status(jobs)
        except EngineError as error:
            answers = {job: JobStatus("unknown", error.message) for job in jobs}
        told |= {(engine, job): status for job, status in answers.items()}
    return [SubmittedRun(run, one, _by_its_records(run, one, told[one.engine, one.job])) for run, one in given]


def _by_its_records(run: RunFolder, submission: Submission, status: JobStatus) -> JobStatus:
    """How a job stands of which its engine knows nothing any more: as its records in the store say."""
    if status.state != "unknown" or submission.request.shared:
        return status
    from headway.agent.remote.store_mirror import fetch_run

    try:
        fetch_run(need_store(read_recipe(run), run.name), run.path.parent, SOON_S)
    except HeadwayError as error:
        return replace(status, reason=f"{status.reason}; {error.message}")
    ended = recorded_exit_status(run)
    if ended is None:
        return replace(status, reason=f"{status.reason}, and its records do not say how it ended")
    state: State = "failed" if ended else "finished"
    reason = "it has saved, and was not started again" if ended == REQUEUE else summarize(run).reason
    return replace(status, state=state, exit_status=ended, reason=f"{reason} (as its records say)")


def cancel(root: Path, run: RunFolder) -> SubmittedRun:
    """Have a run's job end: it saves, and nobody starts it again."""
    before = _standing(root, run)
    engine = open_engine(before.submission.engine, root)
    engine.cancel(before.submission.job)
    return _standing(root, run)


def requeue(root: Path, run: RunFolder, avoid: tuple[str, ...] = ()) -> SubmittedRun:
    """Have a run started again: one that runs saves first, one that is over has a new job."""
    before = _standing(root, run)
    state, old = before.status.state, before.submission
    engine = open_engine(old.engine, root)
    if state in ("running", "ending") and not avoid:
        engine.signal(old.job, signal.SIGUSR1)
    elif state in OVER:
        if lock_holder(run) is not None:
            raise RunError(f"run {run.name} is in use by process {lock_holder(run)}", hint=f"headway stop {run.name}")
        suspects = read_suspects(run.path, time.time())
        request = replace(old.request, avoid=tuple(dict.fromkeys((*old.request.avoid, *suspects, *avoid))))
        note_submission(run.path, replace(old, job=engine.launch(request), request=request))
    else:
        hint = f"headway cancel {run.name}, and then again" if avoid else "headway jobs shows what it waits for"
        raise RunError(f"the job of run {run.name} is {state} already: {before.status.reason or old.job}", hint=hint)
    return _standing(root, run)


def _standing(root: Path, run: RunFolder) -> SubmittedRun:
    found = standings(root, [run])
    if not found:
        raise RunError(f"run {run.name} was not submitted to an engine", hint="headway stop ends a run of this machine")
    return found[0]
