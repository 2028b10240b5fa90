"""Starts a sweep: creates its runs, submits them as one array, and commits it; nothing trains before that."""

import secrets
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic_core import from_json

from headway.cluster.engines.engine import LaunchRequest
from headway.cluster.engines.settings import reach_engine
from headway.cluster.engines.submissions import Submission, note_submission
from headway.cluster.submit.runs import provisional_run, request_for
from headway.cluster.submit.store_runs import (
    Progress,
    check_store,
    commit,
    delete_runs,
    revoke,
    sweep_address,
    upload_runs,
)
from headway.cluster.submit.sweep_request import SweepRequest
from headway.cluster.submit.sweeps import (
    FORMAT,
    MAKING,
    OF_RUN,
    READY,
    RECORD,
    Sweep,
    find_sweep,
    folder_of_sweep,
    is_sweep,
)
from headway.cluster.submit.unsubmitted_sweeps import remove_unsubmitted, sweeps_lock
from headway.errors import HeadwayError, RunError, StateError, UsageError
from headway.track import RunFolder, command, run_id, write_json
from headway.track.access import new_run_mode, umask_of

PATIENCE_S = 120
"""How long an array task that starts at once waits for sweep.json; longer than file systems cache its absence."""


def start_sweep(wanted: SweepRequest, root: Path, progress: Progress = lambda *_: None) -> tuple[Sweep, bool]:
    """Submit a sweep; return it, and whether it is new: an equal request is the existing sweep. A failure leaves
    nothing. `progress` is called as runs are uploaded to their stores."""
    with sweeps_lock(root):
        remove_unsubmitted(root)
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
    with sweeps_lock(root):
        remove_unsubmitted(root)
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
