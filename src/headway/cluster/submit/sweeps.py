"""Sweeps: many runs of one recipe, a point of a grid each, as one job of an engine.

runs/.sweeps/<name>/
  making.json         which runs it will have: written first, for whoever finds it half made
  points-<token>/     a script a point, which an array's copies find by their index
  jobs/               what they print
  sweep.json          which job, which runs with which settings: written last, and nothing trains before it is there

A sweep without sweep.json was never submitted: its maker died. The next sweep takes it away, with its runs.

Where machines see no common folder, runs go by their object stores (store_runs.py), there are no scripts, and the list of
runs in the store says that a sweep is whole. What will be in sweep.json is in ready.json before that.
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
from headway.cluster.engines.settings import engine_settings, open_engine
from headway.cluster.engines.submissions import Submission, note_submission
from headway.cluster.submit.grid import GridAxis, point_names, points, short_keys
from headway.cluster.submit.runs import SubmittedRun, provisional_run, request_for, requeue, standings
from headway.cluster.submit.store_runs import (
    Progress,
    ask,
    commit,
    is_committed,
    place_of_sweep,
    put_runs,
    revoke,
    take_away,
)
from headway.errors import HeadwayError, RecipeError, RunError, StateError, UsageError
from headway.hardware import Cluster, default_cluster, devices, known_chip, parse_on
from headway.recipe import Recipe, load_recipe
from headway.track import RunFolder, run_id, write_json

__all__ = [
    "Sweep",
    "SweepRequest",
    "SweepRun",
    "cancel_sweep",
    "describe_sweep",
    "find_sweep",
    "folder_of_sweep",
    "is_sweep",
    "list_sweeps",
    "request_sweep",
    "requeue_sweep",
    "start_sweep",
    "sweep_standings",
]

FORMAT = 1
RECORD, READY, MAKING, OF_RUN = "sweep.json", "ready.json", "making.json", "sweep.json"
PATIENCE_S = 120
"""How long a copy that starts at once waits for the sweep to be whole; longer than file systems keep it from seeing."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,47}")


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep."""

    run: str
    settings: dict[str, str]
    """By key, as they were written."""
    address: str = ""
    """In its object store, where machines see no common folder."""


@dataclass(frozen=True)
class Sweep:
    """A sweep that was submitted."""

    name: str
    engine: str
    job: str
    on: str
    points: tuple[SweepRun, ...]
    keys: dict[str, str]
    """What each key of the grid is called in tables."""
    identity: str
    """Of all that was asked for: the same again is the same sweep."""
    time: float = 0.0
    """Unix seconds."""
    format: int = FORMAT


@dataclass(frozen=True)
class SweepRequest:
    """A sweep that somebody asks for: everything that can be known before anything is made."""

    name: str
    points: tuple[SweepRun, ...]
    recipes: tuple[Recipe, ...]
    keys: dict[str, str]
    cluster: Cluster
    engine: str
    at_once: int | None = None

    @property
    def apart(self) -> bool:
        """Whether machines see no common folder."""
        return any(point.address for point in self.points)

    @property
    def identity(self) -> str:
        """The same for the same recipes on the same devices."""
        told = [self.engine, self.cluster.name, str(self.at_once), *(one.model_dump_json() for one in self.recipes)]
        told += ["apart"] if self.apart else []
        return hashlib.sha256("\n".join(told).encode()).hexdigest()[:32]


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
    """What is asked for; whatever is wrong with any of its points is told here, before anything is made. Where machines
    see no `shared` folder, each run must have an object store."""
    recipes = tuple(_recipe(file, settings, point) for point in points(axes))
    seen = dict[str, dict[str, str]]()
    for recipe, point in zip(recipes, points(axes), strict=True):
        before = seen.setdefault(recipe.model_dump_json(), point)
        if before is not point:
            raise UsageError(f"{_words(before)} and {_words(point)} are the same run", hint="leave one of them out")
    name = name or f"{recipes[0].name}-{secrets.token_hex(2)}"
    if not _NAME.fullmatch(name) or name == "last":
        raise UsageError(
            f"{name!r} cannot name a sweep",
            hint="at most 48 letters, digits, dots, dashes and underscores, a letter or digit first; not `last`",
        )
    shared = shared and engine_settings(engine).shared
    named = tuple(
        SweepRun(run, point, "" if shared else need_store(recipe, run))
        for run, point, recipe in zip(point_names(name, axes), points(axes), recipes, strict=True)
    )
    return SweepRequest(name, named, recipes, short_keys(axes), on or _here(recipes[0], engine), engine, at_once)


def _here(recipe: Recipe, engine: str) -> Cluster:
    """One device of this machine, for its own queue; others are asked for by name."""
    if engine != "local":
        raise UsageError(f"--engine {engine}, and nothing says on what", hint="--on CHIPxPERNODE: h100x8, or cpux4")
    found = devices(recipe.train.device)
    return parse_on("cpux1") if found.kind == "cpu" else default_cluster(known_chip(found.name), 1)


def _recipe(file: Path, settings: Sequence[str], point: Mapping[str, str]) -> Recipe:
    try:
        return load_recipe(file, [*settings, *(f"{key}={value}" for key, value in point.items())])
    except RecipeError as error:
        load_recipe(file, settings)  # what is wrong without the grid is told as such
        message, hint = error.message.replace("--set", "--grid", 1), error.hint
        if "this is no list" in message:
            key = next(key for key in point if key in message)
            hint = f"a list has brackets: --grid '{key}=[1,2],[3,4]'"
        raise RecipeError(message, hint=hint) from None


def _words(point: Mapping[str, str]) -> str:
    return " ".join(f"{key}={value}" for key, value in point.items())


# -- submitting


def start_sweep(wanted: SweepRequest, root: Path, told: Progress = lambda *_: None) -> tuple[Sweep, bool]:
    """The sweep, and whether it is new: the same asked for again is the one that is there. Whatever goes wrong before
    an engine has it leaves nothing. `told` hears how many runs are in their stores, where they go by them."""
    with _only_one(root):
        _take_away_half_made(root)
        if is_sweep(root, wanted.name):
            there = find_sweep(root, wanted.name)
            if there.identity != wanted.identity:
                raise RunError(
                    f"there is a sweep {there.name} already, of other settings",
                    hint=f"choose another --name; headway sweep {there.name} shows it",
                )
            return there, False
        with _made(wanted, root) as made, _in_stores(wanted, made, told):
            engine = open_engine(wanted.engine, root)
            job = engine.launch(made.request)
            try:
                sweep = Sweep(
                    wanted.name, wanted.engine, job, wanted.cluster.name, wanted.points, wanted.keys, wanted.identity,
                    time.time(),
                )  # fmt: skip
                for index, own in enumerate(made.requests):
                    note_submission(own.folder, Submission(sweep.engine, f"{job}_{index}", sweep.on, own))
                _make_known(sweep, made)
            except BaseException:
                with suppress(HeadwayError):
                    engine.cancel(job)
                raise
        return sweep, True


def describe_sweep(wanted: SweepRequest, root: Path) -> str:
    """What would be sent; the runs are made, checked and taken back."""
    with _only_one(root):
        _take_away_half_made(root)
        with _made(wanted, root, keep=False) as made:
            return open_engine(wanted.engine, root).describe(made.request)


@dataclass(frozen=True)
class _Made:
    """The runs of a sweep, none of which trains yet."""

    folder: Path
    request: LaunchRequest
    """All of them as one array."""
    requests: list[LaunchRequest]
    """Each by itself."""
    place: str = ""
    """Where copies find their runs in a store, where they do."""


@contextmanager
def _made(wanted: SweepRequest, root: Path, keep: bool = True) -> Iterator[_Made]:
    """The runs of a sweep, and what an engine is asked for. They all go away again if something fails."""
    folder, token = folder_of_sweep(root, wanted.name), secrets.token_hex(4)
    place = place_of_sweep(wanted.recipes[0], wanted.name, token) if wanted.apart else ""
    _check_free(wanted, root)
    with ExitStack() as made:
        made.push(lambda kind, error, _: None if keep and not kind else _remove(folder, error))
        folder.mkdir(parents=True)
        making: dict[str, object] = {"format": FORMAT, "token": token, "runs": [point.run for point in wanted.points]}
        write_json(folder / MAKING, making)
        requests, stored = list[LaunchRequest](), dict[str, str]()
        for point, recipe in zip(wanted.points, wanted.recipes, strict=True):
            attempt = made.enter_context(provisional_run(recipe, root, wanted.cluster, point.run, keep=keep))
            facts = {"format": FORMAT, "sweep": wanted.name, "token": token, "settings": point.settings}
            write_json(attempt.run / OF_RUN, facts)
            shared = not wanted.apart
            requests.append(request_for(attempt, wanted.cluster, wanted.engine, dry=not keep, shared=shared))
            stored |= {point.address: run_id(attempt.folder)} if wanted.apart else {}
        if wanted.apart:
            write_json(folder / MAKING, making | {"place": place, "stored": stored})
            command = _from_place(wanted, requests, place)
        else:
            command = _from_scripts(folder, folder / f"points-{token}", requests)
        whole = replace(requests[0], name=wanted.name, command=command, folder=folder)
        yield _Made(folder, replace(whole, array=len(requests), at_once=wanted.at_once), requests, place)


def _remove(folder: Path, error: BaseException | None) -> None:
    """Take a sweep's folder away. Where something of it is left in a store, that much stays known to the next sweep, by
    a name that no sweep has."""
    if not isinstance(error, _Left):
        shutil.rmtree(folder, ignore_errors=True)
        return
    write_json(folder / MAKING, from_json((folder / MAKING).read_bytes()) | {"runs": []})
    folder.rename(folder.with_name(f".{folder.name}-{secrets.token_hex(4)}"))


def _from_scripts(folder: Path, scripts: Path, requests: Sequence[LaunchRequest]) -> tuple[str, ...]:
    """What each copy runs, where all see the sweep's folder: a script of its own. It is known by the copy's index only,
    and by a word of bash's: any engine and any container has one."""
    scripts.mkdir()
    for index, own in enumerate(requests):
        (scripts / f"{index}.sh").write_text(_script(own, folder, scripts))
    return "bash", "-c", 'exec bash -- "$0/$HEADWAY_ARRAY_INDEX.sh"', str(scripts)


def _from_place(wanted: SweepRequest, requests: Sequence[LaunchRequest], place: str) -> tuple[str, ...]:
    """What each copy runs, where none sees it: the same agent, which finds its run in the store by the copy's index."""
    commands = [
        tuple(place if word == point.address else word for word in own.command)
        for point, own in zip(wanted.points, requests, strict=True)
    ]
    first = requests[0]
    for own, command in zip(requests, commands, strict=True):
        if (command, own.environment, own.site) != (commands[0], first.environment, first.site):
            raise UsageError(
                f"{first.name} and {own.name} are not started in the same way, and their machines see no common folder",
                hint="without `snapshot`, and in a container with the same data, they are; headway submit takes one",
            )
    return commands[0]


class _Left(StateError):
    """A sweep was not submitted, and some of it is left in a store."""


@contextmanager
def _in_stores(wanted: SweepRequest, made: _Made, told: Progress) -> Iterator[None]:
    """Have the runs of a sweep in their stores, if that is how they go; they are taken away if something fails."""
    if not wanted.apart:
        yield
        return
    folders = {point.address: RunFolder(own.folder) for point, own in zip(wanted.points, made.requests, strict=True)}
    for url in {url.rpartition("/")[0]: url for url in folders}.values():
        ask(url)  # what can be known before anything is there
    try:
        put_runs(list(folders.values()), told)
        yield
    except BaseException as error:
        try:
            revoke(made.place)
            take_away({url: run_id(run) for url, run in folders.items()})
        except StateError as left:
            message = error.message if isinstance(error, HeadwayError) else str(error) or type(error).__name__
            raise _Left(f"{message}; {left.message}", hint="the next headway sweep takes them away") from error
        raise


def _make_known(sweep: Sweep, made: _Made) -> None:
    """Say that a sweep is whole: from now on its copies train. Where they ask a store it is said there, and only then
    here, by a word that hardly fails."""
    if not made.place:
        write_json(made.folder / RECORD, asdict(sweep))
        return
    write_json(made.folder / READY, asdict(sweep))
    commit(made.place, [point.address for point in sweep.points])
    (made.folder / READY).replace(made.folder / RECORD)


def _script(own: LaunchRequest, folder: Path, scripts: Path) -> str:
    """One point: nothing is trained for a sweep that nobody knows of, for its maker may have died before the end. One
    that was made since in its place has other scripts."""
    record, here = shlex.quote(str(folder / RECORD)), shlex.quote(str(scripts))
    lines = [
        f"# {own.name}",
        f"for _ in $(seq {PATIENCE_S * 10}); do",
        f"  [ ! -e {record} ] && [ -d {here} ] || break",
        "  sleep 0.1",
        "done",
        f"[ -e {record} ] && [ -d {here} ] || {{ echo 'never submitted whole: nothing is trained'; exit 1; }}",
        f"cd -- {shlex.quote(str(own.folder))} || exit 1",
        *(f"export {name}={shlex.quote(value)}" for name, value in sorted(own.environment.items())),
        f"exec -- {shlex.join(own.command)}",
    ]
    return "\n".join(lines) + "\n"


def _check_free(wanted: SweepRequest, root: Path) -> None:
    """Nothing of these names may be there."""
    if is_sweep(root, wanted.name):
        raise RunError(f"there is a sweep {wanted.name} already", hint=f"headway sweep {wanted.name} shows it")
    if folder_of_sweep(root, wanted.name).exists():
        raise RunError(
            f"a sweep {wanted.name} was left half made, and its object store does not answer",
            hint="the same again when it does, or another --name",
        )
    for name in (wanted.name, *(point.run for point in wanted.points)):
        if (root / name).exists():
            raise RunError(f"there is a run {name} already", hint="choose another --name for the sweep")


@contextmanager
def _only_one(root: Path) -> Iterator[None]:
    """Sweeps of a folder are made one after the other, so that what is half made has no maker any more."""
    place = root / ".sweeps"
    try:
        place.mkdir(parents=True, exist_ok=True)
        file = os.open(place / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise RunError(f"cannot write into {place}: {error.strerror}", hint="name another folder with --runs") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _take_away_half_made(root: Path) -> None:
    """Sweeps whose maker died before an engine had them, with their runs; none of those has trained."""
    for folder in (root / ".sweeps").iterdir():
        if not folder.is_dir() or (folder / RECORD).exists():
            continue
        try:
            making = from_json((folder / MAKING).read_bytes())
            names, token = [str(name) for name in making["runs"]], making["token"]
            place, stored = str(making.get("place", "")), dict(making.get("stored", {}))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            names, token, place, stored = [], "", "", {}
        if place and not _out_of_stores(folder, place, stored):
            continue
        for run in (RunFolder(root / name) for name in names if _NAME.match(name)):
            ours = _token(run) == token or not (run.path / "jobs.jsonl").exists()
            if ours and not any(run.events.glob("*")):
                shutil.rmtree(run.path, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)


def _out_of_stores(folder: Path, place: str, stored: Mapping[str, str]) -> bool:
    """Take away what a sweep that is half made has in stores. False for one that is whole, as its maker could not say
    any more, and for one whose store does not answer."""
    try:
        if is_committed(place):
            (folder / READY).replace(folder / RECORD)
            return False
        take_away(stored)
    except StateError:
        return False
    return True


def _token(run: RunFolder) -> str | None:
    try:
        return str(from_json((run.path / OF_RUN).read_bytes())["token"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


# -- those that there are


def folder_of_sweep(root: Path, name: str) -> Path:
    """Where all that is known of a sweep lies."""
    return root.absolute() / ".sweeps" / name


def is_sweep(root: Path, name: str) -> bool:
    """Whether a sweep of this name was submitted."""
    return bool(_NAME.fullmatch(name)) and (folder_of_sweep(root, name) / RECORD).exists()


def list_sweeps(root: Path) -> list[Sweep]:
    """All sweeps, the newest first."""
    found = [find_sweep(root, path.parent.name) for path in (root / ".sweeps").glob(f"*/{RECORD}")]
    return sorted(found, key=lambda one: one.time, reverse=True)


def find_sweep(root: Path, ref: str) -> Sweep:
    """The sweep of this name, of this unique prefix, or the `last` one."""
    names = sorted(path.parent.name for path in (root / ".sweeps").glob(f"*/{RECORD}"))
    matches = [ref] if ref in names else [name for name in names if ref and name.startswith(ref)]
    if ref == "last" and names:
        return list_sweeps(root)[0]
    if len(matches) != 1:
        told = f"{len(matches)} sweeps begin with {ref!r}" if matches else f"there is no sweep {ref!r} in {root}"
        there = ", ".join((matches or names)[:8])
        raise UsageError(told, hint=f"there are: {there}" if there else "headway sweep RECIPE --grid KEY=A,B makes one")
    path = folder_of_sweep(root, matches[0]) / RECORD
    try:
        return _SWEEP.validate_python(from_json(path.read_bytes()))
    except (OSError, ValueError, ValidationError) as error:
        raise RunError(f"{path} is no record of a sweep: {error}", hint="put back what was there") from None


def sweep_standings(root: Path, sweep: Sweep) -> dict[str, SubmittedRun | None]:
    """How the jobs of its runs stand, by run; None for one whose folder is gone."""
    there = [run for point in sweep.points if (run := RunFolder(root.absolute() / point.run)).path.is_dir()]
    told = {one.run.name: one for one in standings(root, there)}
    return {point.run: told.get(point.run) for point in sweep.points}


def cancel_sweep(root: Path, sweep: Sweep) -> dict[str, SubmittedRun | None]:
    """Have all runs of a sweep end that are not over: those of its own job by one word, others by one each."""
    live = [one for one in sweep_standings(root, sweep).values() if one and one.status.state not in OVER]
    own = [one for one in live if one.submission.job.partition("_")[0] == sweep.job]
    for engine, job in sorted(
        {(one.submission.engine, sweep.job if one in own else one.submission.job) for one in live}
    ):
        open_engine(engine, root).cancel(job)
    return sweep_standings(root, sweep)


def requeue_sweep(root: Path, sweep: Sweep, avoid: tuple[str, ...] = ()) -> dict[str, SubmittedRun | None]:
    """Have all runs of a sweep started again that are over and have not finished, each by a job of its own."""
    over = [one for one in sweep_standings(root, sweep).values() if one and one.status.state in OVER]
    again = [one for one in over if one.status.state != "finished"]
    if not again:
        raise RunError(f"no run of sweep {sweep.name} has failed or was cancelled", hint=f"headway sweep {sweep.name}")
    for one in again:
        requeue(root, one.run, avoid)
    return sweep_standings(root, sweep)
