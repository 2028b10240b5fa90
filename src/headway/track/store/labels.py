"""Labels of a run: tags, a note, and whether it is archived; a small file in its folder, so that no server is needed.

The file is replaced atomically. Of two writers at once the later one counts; none sees half of a file.
"""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

from pydantic_core import from_json, to_json

from headway.errors import RunError, UsageError
from headway.track.access import umask_of
from headway.track.run_folder import RunFolder

FORMAT = 1
TAG = re.compile(r"[^\s,'\"`]{1,40}")
NOTE_CHARACTERS = 2000


@dataclass(frozen=True)
class Labels:
    """What people say about a run."""

    tags: tuple[str, ...] = ()
    """In alphabetical order."""
    note: str = ""
    archived: bool = False
    """Left out of lists unless they ask for it."""


def read_labels(run: RunFolder) -> Labels:
    """Return a run's labels; a file that is missing or damaged counts as none."""
    try:
        content = from_json(run.labels_file.read_bytes())
    except (OSError, ValueError):
        return Labels()
    return parse_labels(content)


def parse_labels(content: object) -> Labels:
    """Return the labels that a document holds; whatever is of the wrong kind is left out."""
    if not isinstance(content, dict):
        return Labels()
    tags, note = content.get("tags"), content.get("note")
    named = (
        [tag for tag in tags if isinstance(tag, str) and TAG.fullmatch(tag)] if isinstance(tags, list | tuple) else []
    )
    return Labels(tuple(sorted(set(named))), note if isinstance(note, str) else "", content.get("archived") is True)


def write_labels(run: RunFolder, labels: Labels) -> None:
    """Replace a run's labels; raise RunError if its folder cannot be written."""
    partial = run.labels_file.with_name(f".{run.labels_file.name}.partial")
    try:
        with umask_of(run.path):
            partial.write_bytes(to_json({"format": FORMAT, **asdict(labels)}, indent=2) + b"\n")
        partial.replace(run.labels_file)
    except OSError as error:
        raise RunError(
            f"cannot write the labels of run {run.name}: {error.strerror}", hint=f"check that {run.path} is writable"
        ) from error


def change_tags(labels: Labels, add: Iterable[str] = (), remove: Iterable[str] = ()) -> Labels:
    """Return labels with some tags more and some fewer; raise UsageError for a tag that cannot be one."""
    add, remove = list(add), set(remove)
    for tag in add:
        if not _is_tag(tag):
            raise UsageError(f"invalid tag {tag!r}", hint="a tag has 1 to 40 characters, no spaces, commas or quotes")
    return replace(labels, tags=tuple(sorted({*labels.tags, *add} - remove)))


def change_note(labels: Labels, note: str) -> Labels:
    """Return labels with another note; raise UsageError if it is too long."""
    if len(note) > NOTE_CHARACTERS:
        raise UsageError(f"the note has {len(note):,} characters, more than {NOTE_CHARACTERS:,}")
    return replace(labels, note=_printable(note).strip())


def _is_tag(text: str) -> bool:
    return TAG.fullmatch(text) is not None and text.isprintable()


def _printable(text: str) -> str:
    """Return a text without what would control a terminal."""
    return "".join(character if character.isprintable() else " " for character in text)
