"""Names of models: `prod` is RUN@STEP, with notes and what it was before; accepted wherever a model is.

They are in one file beside the runs, `.registry.json`, written atomically under a lock and as private as new runs. A
checkpoint that has a name is not removed by `checkpoint.keep_last`: its folder has a file `.named` meanwhile.
"""

import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import to_json

from headway.errors import RunError, UsageError, suggest
from headway.track.access import new_run_mode
from headway.track.run_folder import RunFolder, command, create_private_folder, run_id
from headway.track.runs import parse_ref

FILE, LOCK = ".registry.json", ".registry.lock"
NAMED = ".named"
"""A checkpoint's file that keeps it from being removed."""
MOST_HISTORY, MOST_NOTES, LONGEST_NOTE = 100, 100, 2000

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
T = TypeVar("T")


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Note(_Entry):
    """A remark."""

    at: float
    text: str


class Tagged(_Entry):
    """What a name stood for since a time."""

    run: str
    run_id: str
    step: int
    digest: str
    at: float


class RegisteredModel(_Entry):
    """A name, what it stands for now, what it stood for before, and notes."""

    run: str
    run_id: str
    """Of the run's folder: another run that takes the name later is not meant."""
    step: int
    digest: str
    """Of the checkpoint's state."""
    at: float
    notes: tuple[Note, ...] = ()
    before: tuple[Tagged, ...] = ()
    """Newest first."""


class _Registry(_Entry):
    format: Literal[1] = 1
    names: dict[str, RegisteredModel] = {}


def read_registry(root: Path) -> dict[str, RegisteredModel]:
    """Return all names beside the runs in a folder; raise RunError for a damaged file."""
    path = root / FILE
    try:
        return _Registry.model_validate_json(path.read_bytes()).names
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}") from None
    except ValidationError:
        raise RunError(f"{path} is damaged", hint="restore it, or remove it and tag the models again") from None


def names_of(run: RunFolder) -> list[tuple[str, int]]:
    """Return the names that stand for checkpoints of a run now, each with its step."""
    identity = run_id(run)
    return [(name, entry.step) for name, entry in read_registry(run.path.parent).items() if entry.run_id == identity]


def tag(
    root: Path, name: str, run: RunFolder, step: int, digest: str, *, now: Callable[[], float] = time.time
) -> RegisteredModel:
    """Give a checkpoint a name, taking it from the one that had it; its notes stay."""
    check_name(name)
    if (root / name / "events").is_dir():
        raise UsageError(f"{name} is a run, so no model can be named so", hint="choose another name")
    identity = run_id(run)

    def change(names: dict[str, RegisteredModel]) -> RegisteredModel:
        old = names.get(name)
        if old is not None and (old.run_id, old.step, old.digest) == (identity, step, digest):
            return old
        before = () if old is None else (_past(old), *old.before)
        names[name] = RegisteredModel(
            run=run.name, run_id=identity, step=step, digest=digest, at=now(),
            notes=() if old is None else old.notes, before=before[:MOST_HISTORY],
        )  # fmt: skip
        return names[name]

    return _changed(root, change)


def add_note(root: Path, name: str, text: str, *, now: Callable[[], float] = time.time) -> RegisteredModel:
    """Add a note to a name."""
    if not text.strip() or len(text) > LONGEST_NOTE:
        raise UsageError(f"a note has 1 to {LONGEST_NOTE:,} characters, this one {len(text):,}")

    def change(names: dict[str, RegisteredModel]) -> RegisteredModel:
        old = _known(root, names, name)
        notes = (*old.notes, Note(at=now(), text=text))[-MOST_NOTES:]
        names[name] = old.model_copy(update={"notes": notes})
        return names[name]

    return _changed(root, change)


def remove_name(root: Path, name: str) -> RegisteredModel:
    """Remove a name; the checkpoint stays until its run removes it."""
    return _changed(root, lambda names: (_known(root, names, name), names.pop(name))[1])


def resolve_name(root: Path, ref: str) -> tuple[str, int] | None:
    """Return the run and step of a name; None for what is no name, or a run's too."""
    if not _NAME.fullmatch(ref.partition("@")[0]) or not (root / FILE).is_file():
        return None
    name, at, step = ref.partition("@")
    entry = read_registry(root).get(name)
    if entry is None or (root / name / "events").is_dir():
        return None
    if at:
        raise UsageError(
            f"{name} is {entry.run}@{entry.step}, so that @{step} says nothing", hint=f"use {name}, or {entry.run}@STEP"
        )
    run = RunFolder(root / entry.run)
    if not run.events.is_dir() or run_id(run) != entry.run_id:
        what = "is gone" if not run.events.is_dir() else "is another run now"
        raise RunError(
            f"{name} is {entry.run}@{entry.step}, but that run {what}",
            hint=f"{command(root, 'model', 'remove', name)}, or tag another with `headway model tag`",
            usage=True,
        )
    return entry.run, entry.step


def is_gone(root: Path, entry: RegisteredModel) -> bool:
    """Whether the checkpoint of a name, or its run, is no longer there."""
    run = RunFolder(root / entry.run)
    saved = run.checkpoints / f"step-{entry.step:08d}" / "manifest.json"
    return not saved.is_file() or run_id(run) != entry.run_id


def split_ref(root: Path, text: str) -> tuple[str, int | None]:
    """Return the run and the step of RUN, RUN@STEP or the name of a model; RUN alone has no step."""
    return resolve_name(root, text) or parse_ref(text)


def check_name(name: str) -> None:
    """Raise UsageError for a name that no model can have."""
    if not _NAME.fullmatch(name) or name in ("last", "base"):
        raise UsageError(
            f"invalid model name {name!r}",
            hint="up to 64 letters, digits, dots, dashes and underscores; not `last` or `base`",
        )


def _known(root: Path, names: dict[str, RegisteredModel], name: str) -> RegisteredModel:
    if name not in names:
        lists = command(root, "model", "ls")
        hint = suggest(name, names, f"{lists} lists all") if names else "headway model tag RUN@STEP NAME makes one"
        raise UsageError(f"no model is named {name!r}", hint=hint)
    return names[name]


def _past(entry: RegisteredModel) -> Tagged:
    return Tagged(run=entry.run, run_id=entry.run_id, step=entry.step, digest=entry.digest, at=entry.at)


def _changed(root: Path, change: Callable[[dict[str, RegisteredModel]], T]) -> T:
    """Change the names under the lock, and write them atomically."""
    create_private_folder(root)
    with _locked(root):
        names = read_registry(root)
        held = _held(names)
        result = change(names)
        partial = root / f"{FILE}.partial"
        with suppress(FileNotFoundError):
            partial.unlink()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(partial, flags, new_run_mode() & 0o666), "wb") as file:
            file.write(to_json(_Registry(names=names), indent=1) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(root / FILE)
        _mark(root, held, _held(names))
    return result


def _held(names: dict[str, RegisteredModel]) -> set[tuple[str, int]]:
    return {(entry.run, entry.step) for entry in names.values()}


def _mark(root: Path, before: set[tuple[str, int]], after: set[tuple[str, int]]) -> None:
    """Keep checkpoints that have a name now, and no longer those that have none."""
    with suppress(OSError):  # of a run that was removed
        for run, step in after - before:
            (root / run / "checkpoints" / f"step-{step:08d}" / NAMED).touch()
        for run, step in before - after:
            (root / run / "checkpoints" / f"step-{step:08d}" / NAMED).unlink(missing_ok=True)


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    try:
        file = os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise RunError(f"cannot lock the registry in {root}: {error.strerror}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def as_document(name: str, entry: RegisteredModel) -> dict[str, Any]:
    """Return a name as JSON."""
    return {"name": name, "model": f"{entry.run}@{entry.step}", **entry.model_dump()}
