"""Runs as jobs of an engine: submit, cancel, requeue, and their states."""

import os
import re
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from headway.agent.saving.restore_points import need_store
from headway.agent.supervise.outcome import recorded_exit_status
from headway.cluster.engines.engine import OVER, REQUEUE, Engine, JobStatus, LaunchRequest, State
from headway.cluster.engines.settings import EngineSettings, engine_settings, open_engine, reach_engine
from headway.cluster.engines.submissions import Submission, last_submission, note_submission
from headway.cluster.submit.code_delivery import code_for, pack_code
from headway.cluster.submit.elastic_runs import ElasticSizes, elastic_sizes
from headway.cluster.submit.provenance import record_provenance
from headway.cluster.submit.store_runs import check_store, delete_run, upload_run
from headway.errors import EngineError, EngineUnreachable, HeadwayError, RunError, StateError, UsageError
from headway.hardware import Cluster, Devices
from headway.recipe import Recipe, with_settings
from headway.state.handshake import KEY_VARIABLE
from headway.track import RunFolder, command, list_runs, lock_holder, read_plan, read_recipe, run_id, summarize
from headway.track.access import umask_of
from headway.track.run_folder import create_private_folder
from headway.track.suspects import read_suspects

if TYPE_CHECKING:
    from headway.agent import Attempt

CPUS_PER_GPU = 4
"""Default request of a job: the worker, its share of the agent, and data loading."""
STARTUP_S = 30.0
"""From the start of a job to the first step of a small model on an idle machine it takes a third of this; large models
take longer, and no estimate knows how much."""
GIB = 2**30
SOON_S = 10.0
"""How long a store may take to tell how a forgotten job ended."""


def request_for(
    attempt: "Attempt",
    cluster: Cluster,
    engine: str,
    spares: int = 0,
    *,
    dry: bool = False,
    shared: bool = True,
    site: Mapping[str, str] | None = None,
    sizes: ElasticSizes | None = None,
) -> LaunchRequest:
    """The request for a run: its agent on each machine, and on `spares` more. Code is packed if it is staged, unless
    `dry`. If no folder is `shared`, agents fetch the run from its object store. A run with `sizes` is elastic: at each
    start its agents learn the machines and GPUs that it has."""
    run, settings = attempt.folder, engine_settings(engine)
    shared = shared and settings.shared
    recipe = read_recipe(run)
    copied = record_provenance(run, recipe, settings.snapshot)
    if not shared:
        _check_code_installed(settings, copied)
    code = code_for(
        settings,
        engine,
        run.path.parent,
        gpus=0 if cluster.chip.name == "cpu" else cluster.per_node,
        data=[part.path for part in recipe.data.parts.values()],
        snapshot=copied,
        pack=not dry,
    )
    command = (*code.command, "-m", "headway.cli.main", "agent", "--run")
    command += (run.name, "--runs", str(run.path.parent)) if shared else (need_store(recipe, run.name),)
    command += _size_options(attempt, spares, elastic=sizes is not None)
    alone = sizes is None and attempt.nodes + spares == 1
    key = () if shared or alone else (KEY_VARIABLE,)
    curve = {} if sizes is None else {"sizes": sizes.text, "spread": "yes"}
    machines, gpus, cpus = _resources(cluster, spares, sizes)
    request = LaunchRequest(
        name=run.name,
        command=command,
        folder=run.path,
        shared=shared,
        machines=machines,
        spares=spares,
        gpus=gpus,
        cpus=settings.cpus or cpus,
        memory_bytes=None if settings.memory_gib is None else int(settings.memory_gib * GIB),
        environment=code.environment | dict(settings.environment),
        secrets=tuple(dict.fromkeys((*settings.secrets, *key))),
        setup=settings.setup,
        site={**settings.site, **code.site, **(site or {}), **curve},
    )
    return _with_limits(request, run, settings)


def _size_options(attempt: "Attempt", spares: int, *, elastic: bool) -> tuple[str, ...]:
    """What agents are told of the size of a run: an elastic one has another at each start."""
    if elastic:
        return ("--elastic",)
    alone = attempt.nodes + spares == 1
    nodes = () if alone else ("--nodes", str(attempt.nodes), "--workers", str(attempt.workers))
    return (*nodes, "--spares", str(spares)) if spares else nodes


def _resources(cluster: Cluster, spares: int, sizes: ElasticSizes | None) -> tuple[int, int, int]:
    """Machines, and the GPUs and CPUs that a run asks for on each. An elastic one asks for the GPUs of its smallest
    size, on whatever machines."""
    on_cpus = cluster.chip.name == "cpu"
    if sizes is not None:
        return 1, cluster.devices, sizes.cpus(1 if on_cpus else CPUS_PER_GPU)
    gpus = 0 if on_cpus else cluster.per_node
    return cluster.nodes + spares, gpus, gpus * CPUS_PER_GPU or cluster.per_node


def _with_limits(request: LaunchRequest, run: RunFolder, settings: EngineSettings) -> LaunchRequest:
    """The request with the time limit and grace period that the settings have now."""
    plan = read_plan(run)
    startup_s = STARTUP_S + (0.0 if plan is None else plan.step_s)
    grace_s = LaunchRequest.grace_s if settings.grace_s is None else settings.grace_s
    return replace(request, limit_s=settings.limit_s, grace_s=grace_s, startup_s=startup_s)


def submit_run(
    recipe: Recipe,
    root: Path,
    cluster: Cluster,
    engine: str,
    name: str | None = None,
    spares: int = 0,
    *,
    shared: bool = True,
    site: Mapping[str, str] | None = None,
) -> Submission:
    """Create a run and submit it as a job. A failure leaves neither."""
    shared = shared and engine_settings(engine).shared
    elastic = _sizes_text(engine, site) is not None
    if not shared:
        url = need_store(recipe, name or recipe.name)
        _check_key(cluster.nodes + spares + elastic)
        check_store(url)  # before anything is created
    create_private_folder(root)
    started = reach_engine(engine, root)
    sizes = _sizes(recipe, root, cluster, engine, started, site)
    # Before the run is created: it takes long the first time.
    pack_code(engine, root.absolute())
    with provisional_run(recipe, root, cluster, name, elastic=elastic) as attempt:
        request = request_for(attempt, cluster, engine, spares, shared=shared, site=site, sizes=sizes)
        with nullcontext() if shared else _uploaded(attempt.folder):
            submission = Submission(engine, started.launch(request), cluster.name, request)
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
    site: Mapping[str, str] | None = None,
) -> str:
    """What would be submitted; the run is created, checked and removed again."""
    if not (shared and engine_settings(engine).shared):
        need_store(recipe, name or recipe.name)
    started = reach_engine(engine, root)
    sizes = _sizes(recipe, root, cluster, engine, started, site)
    with provisional_run(recipe, root, cluster, name, keep=False, elastic=sizes is not None) as attempt:
        request = request_for(attempt, cluster, engine, spares, dry=True, shared=shared, site=site, sizes=sizes)
        return started.describe(request)


def _sizes_text(engine: str, site: Mapping[str, str] | None) -> str | None:
    """The sizes of an elastic run, as its submitter or engines.toml states them."""
    return {**engine_settings(engine).site, **(site or {})}.get("sizes")


def _sizes(
    recipe: Recipe, root: Path, cluster: Cluster, engine: str, started: Engine, site: Mapping[str, str] | None
) -> ElasticSizes | None:
    """The sizes of an elastic run, planned for its recipe; None for any other."""
    text = _sizes_text(engine, site)
    if text is None:
        return None
    from headway.agent.launch.resolve import resolve_recipe

    resolved = resolve_recipe(_on_devices(recipe, cluster), root.absolute())
    return elastic_sizes(resolved, cluster, text, started.inventory())


def _check_code_installed(settings: EngineSettings, copied: Path | None) -> None:
    """Raise UsageError for code that is only in the folder of runs, which machines do not see. It does not travel
    through stores: nothing that comes from there is executed."""
    staged = settings.code == "staged" and settings.container is None
    if staged or copied is not None:
        raise UsageError(
            f"{'code is staged' if staged else 'snapshot is on'}, but machines do not see the folder of runs",
            hint="install the code at the same path on each machine, or in a container",
        )


def _check_key(machines: int) -> None:
    """Raise UsageError if machines without a shared folder have no key to authenticate each other."""
    if machines > 1 and KEY_VARIABLE not in os.environ:
        raise UsageError(
            f"{machines} machines without a shared folder need a key, and {KEY_VARIABLE} is not set",
            hint=f"export {KEY_VARIABLE}=$(openssl rand -hex 32)",
        )


@contextmanager
def _uploaded(run: RunFolder) -> Iterator[None]:
    """Upload the small files of a new run to its store, and delete them again if something fails."""
    try:
        upload_run(run)
        yield
    except BaseException:
        with suppress(StateError):
            delete_run(need_store(read_recipe(run), run.name), run_id(run))
        raise


@contextmanager
def provisional_run(
    recipe: Recipe, root: Path, cluster: Cluster, name: str | None, keep: bool = True, *, elastic: bool = False
) -> Iterator["Attempt"]:
    """Create a run for the devices of a cluster; remove it again if something fails, or without `keep`. One that is
    `elastic` has a worker per device, on CPUs too."""
    recipe, kind = _on_devices(recipe, cluster), _kind(cluster)
    from headway.agent import new_run  # slow to import, and not needed otherwise

    on = Devices(kind, cluster.devices, cluster.chip.name)  # type: ignore[arg-type]
    has_mesh = recipe.parallel is not None and recipe.parallel.shard is not None
    workers = cluster.nodes if kind == "cpu" and not has_mesh else None  # one per machine by default
    workers = cluster.devices if elastic else workers
    try:
        attempt = new_run(recipe, root.absolute(), name=name, on=on, workers=workers, nodes=cluster.nodes)
    except HeadwayError as error:
        error.hint = _in_terms_of_on(error.hint, "GPUs" if kind == "cuda" else "machines" if workers else "cores")
        raise
    try:
        with umask_of(attempt.run):
            yield attempt
    except BaseException:
        keep = False
        raise
    finally:
        if not keep:
            shutil.rmtree(attempt.folder.path, ignore_errors=True)


def _kind(cluster: Cluster) -> str:
    return "cpu" if cluster.chip.name == "cpu" else "cuda"


def _on_devices(recipe: Recipe, cluster: Cluster) -> Recipe:
    """The recipe with the kind of devices that a cluster has."""
    kind = _kind(cluster)
    if recipe.train.device == "auto":
        recipe = with_settings(recipe, [f"train.device={kind}"])
    if recipe.train.device != kind:
        raise UsageError(
            f"train.device is {recipe.train.device}, but --on {cluster.name} is {kind}", hint="remove train.device"
        )
    return recipe


def _in_terms_of_on(hint: str | None, unit: str) -> str | None:
    """A hint of `headway train` for `headway submit`, where `--on` sets the number of workers: pure."""
    return hint and re.sub(r"--workers (\d+(?: or \d+)?)", rf"\1 {unit} in --on", hint)


# -- jobs of runs

_UNREACHABLE = (EngineUnreachable, UsageError)
"""Errors that say nothing of a job: its engine does not answer, or this shell lacks the engine's address."""


@dataclass(frozen=True)
class SubmittedRun:
    """A run's newest job, and its state."""

    run: RunFolder
    submission: Submission
    status: JobStatus
    problem: EngineError | UsageError | None = None
    """Why its engine did not tell the state, if that is so."""

    @property
    def unreachable(self) -> EngineUnreachable | UsageError | None:
        """Why its engine does not answer, or cannot be asked from here, if that is so."""
        return self.problem if isinstance(self.problem, _UNREACHABLE) else None


def submitted_runs(root: Path, runs: list[RunFolder] | None = None) -> list[SubmittedRun]:
    """The newest jobs of all runs that were submitted, or of these, with one query per engine. An engine that does not
    answer leaves their states unknown, and no other engine's."""
    newest = [(run, last_submission(run.path)) for run in (list_runs(root) if runs is None else runs)]
    submitted = [(run, submission) for run, submission in newest if submission is not None]
    statuses, problems = dict[tuple[str, str], JobStatus](), dict[str, EngineError | UsageError]()
    for engine in sorted({submission.engine for _, submission in submitted}):
        jobs = [submission.job for _, submission in submitted if submission.engine == engine]
        engine_settings(engine)  # a mistake in engines.toml is no reason to call an engine unreachable
        try:
            answers = reach_engine(engine, root).status(jobs)
        except (EngineError, UsageError) as error:  # a UsageError: no address of the cluster is set here
            problems[engine] = error
            reason = f"{engine} is unreachable" if isinstance(error, _UNREACHABLE) else error.message
            answers = {job: JobStatus("unknown", reason) for job in jobs}
        statuses |= {(engine, job): status for job, status in answers.items()}
    return [
        SubmittedRun(
            run,
            submission,
            _status_from_records(run, submission, statuses[submission.engine, submission.job]),
            problems.get(submission.engine),
        )
        for run, submission in submitted
    ]


def _status_from_records(run: RunFolder, submission: Submission, status: JobStatus) -> JobStatus:
    """The state of a job that its engine has forgotten, from the run's records in the store; why one failed, from those
    here."""
    if status.state == "failed" and status.exit_status == 1 and (summary := summarize(run)).state == "failed":
        newest = max((path.stat().st_mtime for path in run.events.glob("*-agent.jsonl")), default=0.0)
        return replace(status, reason=f"{status.reason}: {summary.reason}") if newest > submission.time else status
    if status.state != "unknown":
        return status
    if submission.request.shared:
        summary = summarize(run)
        if summary.state != "finished":  # a run that saved or failed may wait for its next start
            return status
        return replace(status, state="finished", exit_status=0, reason=f"{summary.reason} (from its records)")
    from headway.agent.remote.store_mirror import fetch_run

    try:
        fetch_run(need_store(read_recipe(run), run.name), run.path.parent, SOON_S)
    except HeadwayError as error:
        return replace(status, reason=f"{status.reason}; {error.message}")
    exit_status = recorded_exit_status(run)
    if exit_status is None:
        return replace(status, reason=f"{status.reason}; its records show no end")
    state: State = "failed" if exit_status else "finished"
    reason = "saved, but was not restarted" if exit_status == REQUEUE else summarize(run).reason
    return replace(status, state=state, exit_status=exit_status, reason=f"{reason} (from its records)")


def cancel(root: Path, run: RunFolder) -> SubmittedRun:
    """Cancel a run's job: it saves, and is not restarted."""
    before = _submitted(root, run)
    if before.unreachable is not None:
        raise before.unreachable
    open_engine(before.submission.engine, root).cancel(before.submission.job)
    return _submitted(root, run)


def requeue(root: Path, run: RunFolder, avoid: tuple[str, ...] = ()) -> SubmittedRun:
    """Restart a run: a running one saves first; one that its engine holds back is released; one that is over, or that
    its engine does not know any more, gets a new job."""
    before = _submitted(root, run, run.command("resume"))
    state, submission = before.status.state, before.submission
    engine = open_engine(submission.engine, root)
    if state in ("running", "ending") and not avoid:
        engine.signal(submission.job, signal.SIGUSR1)
    elif state in OVER or state == "unknown":
        if before.problem is not None and before.unreachable is None:
            raise before.problem  # its job may well run
        engine.probe()
        if lock_holder(run) is not None:
            raise RunError(f"run {run.name} is in use by process {lock_holder(run)}", hint=run.command("stop"))
        request = _with_limits(submission.request, run, engine_settings(submission.engine))
        suspects = read_suspects(run.path, time.time())
        request = replace(request, avoid=tuple(dict.fromkeys((*request.avoid, *suspects, *avoid))))
        note_submission(run.path, replace(submission, job=engine.launch(request), request=request))
    elif avoid or not engine.release(submission.job):
        hint = f"{run.command('cancel')}, then requeue" if avoid else f"{command(root, 'jobs')} shows what it waits for"
        reason = before.status.reason or submission.job
        raise RunError(f"the job of run {run.name} is already {state}: {reason}", hint=hint)
    return _submitted(root, run)


def _submitted(root: Path, run: RunFolder, instead: str | None = None) -> SubmittedRun:
    """Return a run's job; `instead` is the command for a run that has none."""
    submitted = submitted_runs(root, [run])
    if not submitted:
        hint = instead or f"{command(root, 'jobs')} lists submitted runs"
        hint = run.command("stop") if lock_holder(run) is not None else hint
        raise RunError(f"run {run.name} was not submitted to an engine", hint=hint, usage=True)
    return submitted[0]
