"""Sweeps: many runs of one recipe, one per point of a grid, as one job array of an engine.

runs/.sweeps/<name>/
  making.json         which runs it will have: written first, to clean up if its creator dies
  points-<token>/     one script per point, which array tasks find by their index
  jobs/               their logs
  sweep.json          the job, and the runs with their settings: written last, and nothing trains before

A sweep without sweep.json was never submitted, since its creator died. The next sweep removes it, with its runs.

Without a shared folder, runs travel through their object stores (store_runs.py), there are no scripts, and the list of
runs in the store commits a sweep. The content of sweep.json is in ready.json before that.
"""

import fcntl
import hashlib
import os
import re
import secrets
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from headway.agent.saving.restore_points import need_store
from headway.cluster.engines.engine import OVER, LaunchRequest
from headway.cluster.engines.settings import engine_settings, reach_engine
from headway.cluster.engines.submissions import Submission, note_submission
from headway.cluster.submit.grid import GridAxis, point_names, points, short_keys
from headway.cluster.submit.runs import SubmittedRun, provisional_run, request_for, requeue, submitted_runs
from headway.cluster.submit.store_runs import (
    Progress,
    check_store,
    commit,
    delete_runs,
    is_committed,
    revoke,
    sweep_address,
    upload_runs,
)
from headway.errors import HeadwayError, RecipeError, RunError, StateError, UsageError
from headway.hardware import Cluster, default_cluster, devices, known_chip, parse_on
from headway.recipe import Recipe, load_recipe
from headway.track import RunFolder, command, run_id, write_json
from headway.track.access import new_run_mode, umask_of
from headway.track.runs import create_private_folder

FORMAT = 1
RECORD, READY, MAKING, OF_RUN, LOCK = "sweep.json", "ready.json", "making.json", "sweep.json", "lock"
PATIENCE_S = 120
"""How long an array task that starts at once waits for sweep.json; longer than file systems cache its absence."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,47}")


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep."""

    run: str
    settings: dict[str, str]
    """By key, as written."""
    address: str = ""
    """In its object store, if there is no shared folder."""


@dataclass(frozen=True)
class Sweep:
    """A submitted sweep."""

    name: str
    engine: str
    job: str
    on: str
    points: tuple[SweepRun, ...]
    keys: dict[str, str]
    """The name of each key of the grid in tables."""
    identity: str
    """Hash of the request: an equal request is the same sweep."""
    time: float = 0.0
    """Unix seconds."""
    format: int = FORMAT


@dataclass(frozen=True)
class SweepRequest:
    """A requested sweep: everything that is known before anything is created."""

    name: str
    points: tuple[SweepRun, ...]
    recipes: tuple[Recipe, ...]
    keys: dict[str, str]
    cluster: Cluster
    engine: str
    at_once: int | None = None

    @property
    def no_shared_folder(self) -> bool:
        """Whether runs travel through their object stores."""
        return any(point.address for point in self.points)

    @property
    def identity(self) -> str:
        """Equal for equal recipes on the same devices."""
        parts = [self.engine, self.cluster.name, str(self.at_once)]
        parts += [recipe.model_dump_json() for recipe in self.recipes]
        parts += ["apart"] if self.no_shared_folder else []
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


_SWEEP = TypeAdapter(Sweep)


def request_sweep(
    file: Path,
    settings: Sequence[str],
    axes: Sequence[GridAxis],
    *,
    engine: str,
    on: Cluster | None = None,
    name: str | None = None,
    at_once: int | None = None,
    shared: bool = True,
) -> SweepRequest:
    """The request for a sweep; an invalid point raises before anything is created. If no folder is `shared`, each run
    needs an object store."""
    recipes = tuple(_load_recipe(file, settings, point) for point in points(axes))
    by_recipe = dict[str, dict[str, str]]()
    for recipe, point in zip(recipes, points(axes), strict=True):
        first = by_recipe.setdefault(recipe.model_dump_json(), point)
        if first is not point:
            same = " and ".join(" ".join(f"{key}={value}" for key, value in each.items()) for each in (first, point))
            raise UsageError(f"{same} are the same run", hint="remove one of them")
    name = name or f"{recipes[0].name}-{secrets.token_hex(2)}"
    if not _NAME.fullmatch(name) or name == "last":
        raise UsageError(
            f"invalid sweep name {name!r}",
            hint="at most 48 letters, digits, dots, dashes and underscores, a letter or digit first; not `last`",
        )
    shared = shared and engine_settings(engine).shared
    runs = tuple(
        SweepRun(run, point, "" if shared else need_store(recipe, run))
        for run, point, recipe in zip(point_names(name, axes), points(axes), recipes, strict=True)
    )
    cluster = on or _default_devices(recipes[0], engine)
    return SweepRequest(name, runs, recipes, short_keys(axes), cluster, engine, at_once)


def _default_devices(recipe: Recipe, engine: str) -> Cluster:
    """One device of this machine, for its own queue; other engines need --on."""
    if engine != "local":
        raise UsageError(f"--engine {engine} needs --on", hint="--on CHIPxPERNODE: h100x8, or cpux4")
    available = devices(recipe.train.device)
    return parse_on("cpux1") if available.kind == "cpu" else default_cluster(known_chip(available.name), 1)


def _load_recipe(file: Path, settings: Sequence[str], point: Mapping[str, str]) -> Recipe:
    try:
        return load_recipe(file, [*settings, *(f"{key}={value}" for key, value in point.items())])
    except RecipeError as error:
        load_recipe(file, settings)  # an error without the grid is reported as such
        message, hint = error.message.replace("--set", "--grid", 1), error.hint
        key = next((key for key in point if key in message), None)
        if key and " list" in message:
            hint = f"a list has brackets: --grid '{key}=[1,2],[3,4]'"
        raise RecipeError(message, hint=hint) from None


# -- submitting


def start_sweep(wanted: SweepRequest, root: Path, progress: Progress = lambda *_: None) -> tuple[Sweep, bool]:
    """Submit a sweep; return it, and whether it is new: an equal request is the existing sweep. A failure leaves
    nothing. `progress` is called as runs are uploaded to their stores."""
    with _sweeps_lock(root):
        _remove_unsubmitted(root)
        if is_sweep(root, wanted.name):
            existing = find_sweep(root, wanted.name)
            if existing.identity != wanted.identity:
                raise RunError(
                    f"sweep {existing.name} already exists with other settings",
                    hint=f"choose another --name; {command(root, 'sweep', existing.name)} shows it",
                    usage=True,
                )
            return existing, False
        engine = reach_engine(wanted.engine, root)
        with _created(wanted, root) as draft, _uploaded(wanted, draft, progress):
            job = engine.launch(draft.request)
            try:
                sweep = Sweep(
                    wanted.name, wanted.engine, job, wanted.cluster.name, wanted.points, wanted.keys, wanted.identity,
                    time.time(),
                )  # fmt: skip
                for index, request in enumerate(draft.requests):
                    note_submission(request.folder, Submission(sweep.engine, f"{job}_{index}", sweep.on, request))
                _publish(sweep, draft)
            except BaseException:
                with suppress(HeadwayError):
                    engine.cancel(job)
                raise
        return sweep, True


def describe_sweep(wanted: SweepRequest, root: Path) -> str:
    """What would be submitted; the runs are created, checked and removed again."""
    with _sweeps_lock(root):
        _remove_unsubmitted(root)
        with _created(wanted, root, keep=False) as draft:
            return reach_engine(wanted.engine, root).describe(draft.request)


@dataclass(frozen=True)
class _Draft:
    """The runs of a sweep before it is submitted."""

    folder: Path
    request: LaunchRequest
    """All runs as one array."""
    requests: list[LaunchRequest]
    """One per run."""
    address: str = ""
    """Where array tasks find their runs in a store, if there is no shared folder."""


@contextmanager
def _created(wanted: SweepRequest, root: Path, keep: bool = True) -> Iterator[_Draft]:
    """Create the runs of a sweep; remove them again if something fails, or without `keep`."""
    folder, token, by_store = folder_of_sweep(root, wanted.name), secrets.token_hex(4), wanted.no_shared_folder
    address = sweep_address(wanted.recipes[0], wanted.name, token) if by_store else ""
    _check_names(wanted, root)
    with ExitStack() as stack:
        stack.push(lambda kind, error, _: None if keep and not kind else _remove(folder, error))
        folder.mkdir(parents=True)
        folder.chmod(new_run_mode())
        stack.enter_context(umask_of(folder))
        making: dict[str, object] = {"format": FORMAT, "token": token, "runs": [point.run for point in wanted.points]}
        write_json(folder / MAKING, making)
        requests, stored = list[LaunchRequest](), dict[str, str]()
        for point, recipe in zip(wanted.points, wanted.recipes, strict=True):
            attempt = stack.enter_context(provisional_run(recipe, root, wanted.cluster, point.run, keep=keep))
            facts = {"format": FORMAT, "sweep": wanted.name, "token": token, "settings": point.settings}
            write_json(attempt.run / OF_RUN, facts)
            requests.append(request_for(attempt, wanted.cluster, wanted.engine, dry=not keep, shared=not by_store))
            stored |= {point.address: run_id(attempt.folder)} if by_store else {}
        if by_store:
            write_json(folder / MAKING, making | {"place": address, "stored": stored})
            command = _command_by_store(wanted, requests, address)
        else:
            command = _command_by_scripts(folder, folder / f"points-{token}", requests)
        request = replace(
            requests[0],
            name=wanted.name,
            command=command,
            folder=folder,
            array=len(requests),
            at_once=wanted.at_once,
        )
        yield _Draft(folder, request, requests, address)


def _remove(folder: Path, error: BaseException | None) -> None:
    """Remove a sweep's folder. If some of it is left in a store, rename it for the next sweep to clean up."""
    if not isinstance(error, _LeftInStore):
        shutil.rmtree(folder, ignore_errors=True)
        return
    write_json(folder / MAKING, from_json((folder / MAKING).read_bytes()) | {"runs": []})
    folder.rename(folder.with_name(f".{folder.name}-{secrets.token_hex(4)}"))


def _command_by_scripts(folder: Path, scripts: Path, requests: Sequence[LaunchRequest]) -> tuple[str, ...]:
    """The command of all array tasks with a shared folder: run the script of the task's index. In bash, which every
    engine and container has."""
    scripts.mkdir()
    for index, request in enumerate(requests):
        (scripts / f"{index}.sh").write_text(_script(request, folder, scripts))
    return "bash", "-c", 'exec bash -- "$0/$HEADWAY_ARRAY_INDEX.sh"', str(scripts)


def _command_by_store(wanted: SweepRequest, requests: Sequence[LaunchRequest], address: str) -> tuple[str, ...]:
    """The command of all array tasks without one: the agent, which finds its run in the store by the task's index."""
    commands = [
        tuple(address if argument == point.address else argument for argument in request.command)
        for point, request in zip(wanted.points, requests, strict=True)
    ]
    first = requests[0]
    for request, words in zip(requests, commands, strict=True):
        if (words, request.environment, request.site) != (commands[0], first.environment, first.site):
            raise UsageError(
                f"{first.name} and {request.name} need different commands, which requires a shared folder",
                hint="remove `snapshot`, give containers the same data, or submit them with headway submit",
            )
    return commands[0]


class _LeftInStore(StateError):
    """A sweep was not submitted, and some of it is left in a store."""


@contextmanager
def _uploaded(wanted: SweepRequest, draft: _Draft, progress: Progress) -> Iterator[None]:
    """Upload the runs of a sweep without a shared folder; delete them again if something fails."""
    if not wanted.no_shared_folder:
        yield
        return
    folders = {point.address: RunFolder(own.folder) for point, own in zip(wanted.points, draft.requests, strict=True)}
    for url in {url.rpartition("/")[0]: url for url in folders}.values():
        check_store(url)  # before anything is uploaded
    try:
        upload_runs(list(folders.values()), progress)
        yield
    except BaseException as error:
        try:
            revoke(draft.address)
            delete_runs({url: run_id(run) for url, run in folders.items()})
        except StateError as left:
            message = error.message if isinstance(error, HeadwayError) else str(error) or type(error).__name__
            raise _LeftInStore(f"{message}; {left.message}", hint="the next headway sweep deletes them") from error
        raise


def _publish(sweep: Sweep, draft: _Draft) -> None:
    """Commit a sweep: from now on its tasks train. Without a shared folder in the store first, and then here, by a
    rename, which hardly ever fails."""
    if not draft.address:
        write_json(draft.folder / RECORD, asdict(sweep))
        return
    write_json(draft.folder / READY, asdict(sweep))
    commit(draft.address, [point.address for point in sweep.points])
    (draft.folder / READY).replace(draft.folder / RECORD)


def _script(request: LaunchRequest, folder: Path, scripts: Path) -> str:
    """The script of one point. It waits for sweep.json: the creator of the sweep may have died before. A later sweep of
    the same name has other scripts."""
    record, here = shlex.quote(str(folder / RECORD)), shlex.quote(str(scripts))
    lines = [
        f"# {request.name}",
        f"for _ in $(seq {PATIENCE_S * 10}); do",
        f"  [ ! -e {record} ] && [ -d {here} ] || break",
        "  sleep 0.1",
        "done",
        f"[ -e {record} ] && [ -d {here} ] || {{ echo 'the sweep was never submitted: nothing to train'; exit 1; }}",
        f"cd -- {shlex.quote(str(request.folder))} || exit 1",
        *(f"export {name}={shlex.quote(value)}" for name, value in sorted(request.environment.items())),
        f"exec -- {shlex.join(request.command)}",
    ]
    return "\n".join(lines) + "\n"


def _check_names(wanted: SweepRequest, root: Path) -> None:
    """Raise RunError if a sweep or run of these names exists."""
    if is_sweep(root, wanted.name):
        raise RunError(
            f"sweep {wanted.name} already exists", hint=f"{command(root, 'sweep', wanted.name)} shows it", usage=True
        )
    if folder_of_sweep(root, wanted.name).exists():
        raise RunError(
            f"sweep {wanted.name} was not fully submitted, and its object store does not answer",
            hint="try again when it does, or choose another --name",
        )
    for name in (wanted.name, *(point.run for point in wanted.points)):
        if (root / name).exists():
            raise RunError(
                f"run {name} already exists", hint="choose another name for the sweep with --name", usage=True
            )


@contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Hold the lock of a file, and wait for it if necessary. Whoever holds it may remove the file."""
    locked = False
    while not locked:
        with umask_of(path.parent):
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            locked = _is_file_at(path, file)
            if locked:
                yield
        finally:
            os.close(file)


def _is_file_at(path: Path, file: int) -> bool:
    """Return whether an open file is still the one at a path."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


@contextmanager
def _sweeps_lock(root: Path) -> Iterator[None]:
    """Create sweeps one at a time, so that the creator of an unsubmitted one must be dead. A folder without sweeps is
    removed again."""
    folder = root / ".sweeps"
    create_private_folder(root)
    with ExitStack() as stack:
        try:
            _enter_lock(stack, folder)
        except OSError as error:
            raise RunError(f"cannot write into {folder}: {error.strerror}", hint="choose another --runs") from None
        try:
            yield
        finally:
            with suppress(OSError):  # another process may just create its lock there
                if [entry.name for entry in folder.iterdir()] == [LOCK]:
                    (folder / LOCK).unlink()
                    folder.rmdir()


def _enter_lock(stack: ExitStack, folder: Path) -> None:
    """Create the folder of all sweeps and hold its lock; the holder before may remove both."""
    while True:
        create_private_folder(folder)
        folder.mkdir(exist_ok=True)  # raises what prevents it
        with suppress(FileNotFoundError):
            stack.enter_context(exclusive_lock(folder / LOCK))
            return


def _remove_unsubmitted(root: Path) -> None:
    """Remove sweeps whose creator died before they were submitted, with their runs; none of those has trained."""
    for folder in (root / ".sweeps").iterdir():
        if not folder.is_dir() or (folder / RECORD).exists():
            continue
        try:
            making = from_json((folder / MAKING).read_bytes())
            names, token = [str(name) for name in making["runs"]], making["token"]
            address, stored = str(making.get("place", "")), dict(making.get("stored", {}))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            names, token, address, stored = [], "", "", {}
        if address and not _remove_from_stores(folder, address, stored):
            continue
        for run in (RunFolder(root / name) for name in names if _NAME.match(name)):
            belongs = _token(run) == token or not (run.path / "jobs.jsonl").exists()
            if belongs and not any(run.events.glob("*")):
                shutil.rmtree(run.path, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)


def _remove_from_stores(folder: Path, address: str, stored: Mapping[str, str]) -> bool:
    """Delete what an unsubmitted sweep has in stores. False if it turns out to be committed, since its creator died
    just after that, or if its store does not answer."""
    try:
        if is_committed(address):
            (folder / READY).replace(folder / RECORD)
            return False
        delete_runs(stored)
    except StateError:
        return False
    return True


def _token(run: RunFolder) -> str | None:
    try:
        return str(from_json((run.path / OF_RUN).read_bytes())["token"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


# -- submitted sweeps


def folder_of_sweep(root: Path, name: str) -> Path:
    """The folder of a sweep's records."""
    return root.absolute() / ".sweeps" / name


def is_sweep(root: Path, name: str) -> bool:
    """Whether a sweep of this name was submitted."""
    return bool(_NAME.fullmatch(name)) and (folder_of_sweep(root, name) / RECORD).exists()


def list_sweeps(root: Path) -> list[Sweep]:
    """All sweeps, newest first."""
    sweeps = [find_sweep(root, path.parent.name) for path in (root / ".sweeps").glob(f"*/{RECORD}")]
    return sorted(sweeps, key=lambda sweep: sweep.time, reverse=True)


def find_sweep(root: Path, ref: str) -> Sweep:
    """The sweep of this name or unique prefix, or the `last` one."""
    names = sorted(path.parent.name for path in (root / ".sweeps").glob(f"*/{RECORD}"))
    matches = [ref] if ref in names else [name for name in names if ref and name.startswith(ref)]
    if ref == "last" and names:
        return list_sweeps(root)[0]
    if len(matches) != 1:
        message = f"{len(matches)} sweeps begin with {ref!r}" if matches else f"no sweep {ref!r} in {root}"
        known = ", ".join((matches or names)[:8])
        raise UsageError(
            message, hint=f"there are: {known}" if known else "headway sweep RECIPE --grid KEY=A,B starts one"
        )
    path = folder_of_sweep(root, matches[0]) / RECORD
    try:
        return _SWEEP.validate_python(from_json(path.read_bytes()))
    except (OSError, ValueError, ValidationError) as error:
        raise RunError(f"{path} is not a sweep record: {error}", hint="restore the file") from None


def submitted_sweep_runs(root: Path, sweep: Sweep) -> dict[str, SubmittedRun | None]:
    """The newest jobs of a sweep's runs, by run; None if the folder is missing."""
    folders = [run for point in sweep.points if (run := RunFolder(root.absolute() / point.run)).path.is_dir()]
    by_name = {submitted.run.name: submitted for submitted in submitted_runs(root, folders)}
    return {point.run: by_name.get(point.run) for point in sweep.points}


def cancel_sweep(root: Path, sweep: Sweep) -> dict[str, SubmittedRun | None]:
    """Cancel all runs of a sweep that are not over: those of its array with one call, requeued ones one by one."""
    jobs = set[tuple[str, str]]()
    for run in submitted_sweep_runs(root, sweep).values():
        if run and run.status.state not in OVER:
            job = run.submission.job
            jobs.add((run.submission.engine, sweep.job if job.partition("_")[0] == sweep.job else job))
    for engine, job in sorted(jobs):
        reach_engine(engine, root).cancel(job)
    return submitted_sweep_runs(root, sweep)


def requeue_sweep(root: Path, sweep: Sweep, avoid: tuple[str, ...] = ()) -> dict[str, SubmittedRun | None]:
    """Restart all runs of a sweep that have ended without finishing, or that its engine does not know any more, each as
    its own job; release those that its engine holds back."""
    runs = submitted_sweep_runs(root, sweep).values()
    restartable = {*OVER, "unknown"} - {"finished"}
    unfinished = [run for run in runs if run and (run.status.state in restartable or run.status.remedy == "requeue")]
    if not unfinished:
        raise RunError(f"no run of sweep {sweep.name} failed or was cancelled", hint=command(root, "sweep", sweep.name))
    for run in unfinished:
        requeue(root, run.run, avoid)
    return submitted_sweep_runs(root, sweep)
