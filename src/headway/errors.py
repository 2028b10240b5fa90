"""Everything that a user can do wrong, or that the world can do to a run, in one tree.

HeadwayError             exit status 1, except as said
|-- UsageError           the command line asks for something that does not exist (exit status 2)
|   |-- Forbidden        a user of the service may not do or see this (2)
|   `-- UnknownNode      a machine reports as a node that the cluster does not have (2)
|-- RecipeError          a recipe's key or value is wrong (2)
|-- DataError            a source, tokenizer, dataset or data version is not what was asked for (2)
|   |-- WrongDataVersion it has another version than the recipe's (2)
|   `-- DamagedData      its bytes are not those that were written, or cannot be read or written (1)
|-- StateError           a checkpoint is missing, of another model, or cannot be written
|   |-- DamagedState     its bytes are not those that were written: the one before it may be whole
|   `-- FolderGone       the folder it belongs into is not there now, and may come back
|-- RunError             a run folder is missing, in use, or in the wrong state
|-- ModelError           a model cannot be read, built or converted (2)
|-- RequestError         a request to a model asks for what it cannot do (2)
|-- WorkerError          a worker of a run failed
`-- EngineError          what starts processes on machines is not there, or refuses
    `-- EngineUnreachable    it does not answer: nothing is known of its jobs

Each carries a sentence for people and, where there is one, a hint that says what to do. Exit status 2 means that the
command or the recipe must change, 1 that it was understood and failed. A StateError or RunError is either: one that
another command would not meet, such as a name that is taken, is raised with `usage=True`. Mistakes of our own are
`assert`s and travel as they are.
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

INTERRUPTED = 130
"""Exit status after Ctrl-C."""
FEW = 8
"""Names that a hint lists; of more it gives the nearest."""


class HeadwayError(Exception):
    """Something a person can act on: one sentence, and a hint."""

    exit_status = 1
    facts: Mapping[str, Any] = {}
    """What the record says of it beside the sentence."""

    def __init__(self, message: str, hint: str | None = None, *, usage: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if usage:
            self.exit_status = UsageError.exit_status

    @property
    def usage(self) -> bool:
        """Whether the command or the recipe must change."""
        return self.exit_status == UsageError.exit_status


class UsageError(HeadwayError):
    """The command line asks for something that does not exist."""

    exit_status = 2


class UnknownNode(UsageError):
    """A machine reports as a node that the cluster does not have."""


class Forbidden(UsageError):
    """The user of a service, or its token, may not do or see this. The service notes it in its audit log."""


class RecipeError(HeadwayError):
    """A recipe's key or value is wrong."""

    exit_status = 2


class DataError(HeadwayError):
    """A source, tokenizer, dataset or data version is not what was asked for."""

    exit_status = 2


class DamagedData(DataError):
    """A file's bytes are not those that were written, or cannot be read or written."""

    exit_status = 1


class WrongDataVersion(DataError):
    """A dataset has another version than the recipe's."""


class StateError(HeadwayError):
    """A checkpoint is missing, of another model, or cannot be written."""


class DamagedState(StateError):
    """A checkpoint's bytes are not those that were written."""


class FolderGone(StateError):
    """The run's folder is not where it was; nothing may be created in its place."""


class RunError(HeadwayError):
    """A run folder is missing, in use, or in the wrong state."""


class ModelError(HeadwayError):
    """A model cannot be read, built or converted."""

    exit_status = 2


class RequestError(HeadwayError):
    """A request to a model asks for what it cannot do."""

    exit_status = 2


class WorkerError(HeadwayError):
    """A worker of a run failed."""


class EngineError(HeadwayError):
    """What starts processes on machines is not there, or refuses."""


class EngineUnreachable(EngineError):
    """An engine does not answer, so that nothing is known of its jobs."""


USAGE_TYPES = {kind.__name__ for kind in (UsageError, RecipeError, DataError, ModelError)}
"""Types of recorded errors that mean a mistake in the command or the recipe."""

_WANTED = {
    **dict.fromkeys(("tuple_type", "list_type"), "this is no list"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "this is no table"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "this is no whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "this is no number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "this is neither true nor false"),
    "string_type": "this is no text",
}
"""What is wrong with a value of the wrong kind, by pydantic's name for the mistake."""


def suggest(word: str, names: Iterable[str], lists_all: str) -> str:
    """Return a hint for an unknown name: the nearest ones, at most three, and what lists all."""
    names = list(dict.fromkeys(names))
    by_lower = {name.lower(): name for name in names}
    near = difflib.get_close_matches(word.strip().lower(), by_lower, n=3, cutoff=0.6)
    if near:
        return f"did you mean {' or '.join(by_lower[name] for name in near)}?  ({lists_all})"
    return f"one of {', '.join(names)}" if len(names) <= FEW else lists_all


def what_is_wrong(mistake: Mapping[str, Any]) -> str:
    """One of pydantic's mistakes in plain words, to stand after the key and the value."""
    if mistake["type"] == "value_error":
        return str(mistake["msg"]).removeprefix("Value error, ")
    message = str(mistake["msg"])
    return _WANTED.get(mistake["type"]) or message[0].lower() + message[1:]


def plural(number: int, noun: str) -> str:
    """Return `1 file` or `2 files`, for a message."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
