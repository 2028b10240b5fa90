"""Tasks: what to ask a model and how to score it. A data file is a task by itself, with its fields detected."""

import re
import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from headway.errors import DataError, UsageError, suggest, what_is_wrong
from headway.evals.rows import SUFFIXES, Row, data_suffix, read_rows_of

Kind = Literal["generate", "choice", "perplexity"]
Metric = Literal["exact_match", "math"]
MOST_STOPS = 16


class Task(BaseModel):
    """A task file: TOML with these keys. All but `data` have defaults that depend on the data's fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = ""
    """By default, the file's."""
    data: str
    """The data file, relative to the task file, or to --data for a shipped task."""
    kind: Kind | None = None
    """By default: choice if rows have choices, perplexity if they have a text and no question, else generate."""
    prompt: str | None = None
    """Template of a question, with {field} for the row's fields; {choices} is a list with letters."""
    answer: str | None = None
    """Template of the reference answer of a generation task."""
    shots: Annotated[int, Field(ge=0, le=1000)] = 0
    """Worked examples before each question."""
    shots_data: str | None = None
    """Where examples come from, from its first row on. By default, the data's first rows, which are not asked then."""
    prefix: str = ""
    """Text before everything; with chat, the system message."""
    delimiter: str = " "
    """Between a prompt and its answer."""
    separator: str = "\n\n"
    """Between examples."""
    chat: bool | None = None
    """Whether to use the model's chat template; by default, only for rows of messages."""
    metric: Metric | None = None
    """Of a generation task; by default, math if every answer is a number, has #### or \\boxed, else exact_match."""
    extract: str | None = None
    """Regular expression: its last match in an output is scored, or the first group of that match."""
    ignore_case: bool = False
    """Of exact_match."""
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(max_length=MOST_STOPS)] | None = None
    """Texts that end an output; by default a blank line, with chat none: the model ends its turn."""
    max_tokens: Annotated[int, Field(ge=1)] = 256
    """Tokens of an output."""
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    """By default 0 for one output per question, else the model's own, or 1."""

    @model_validator(mode="after")
    def _pattern_is_valid(self) -> Self:
        try:
            re.compile(self.extract or "")
        except re.error as error:
            raise ValueError(f"extract is no regular expression: {error}") from None
        return self


@dataclass(frozen=True)
class LoadedTask:
    """A task and its rows."""

    task: Task
    """With its kind resolved."""
    file: Path
    rows: list[Row]
    """The questions."""
    examples: list[Row]
    """Worked examples."""

    @property
    def kind(self) -> Kind:
        """Its kind."""
        assert self.task.kind is not None
        return self.task.kind


def shipped_tasks() -> list[str]:
    """Return the names of the tasks that come with Headway."""
    folder = resources.files("headway.evals") / "tasks"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_task(
    name: str, *, data: Path | None = None, changes: dict[str, Any] | None = None, limit: int | None = None
) -> LoadedTask:
    """Load a shipped task by name, a task file, or a data file; `data` is the folder of a shipped task's files."""
    path = Path(name)
    if data_suffix(path) is not None:
        values: dict[str, Any] = {"name": _stem(path), "data": str(path)}
        folders = [Path()] if path.is_absolute() or data is None or path.is_file() else [Path(), data]
    elif path.suffix == ".toml":
        values, folders = _read_toml(path), [path.parent, *([data] if data else [])]
        values.setdefault("name", path.stem)
    elif name in shipped_tasks():
        values = tomllib.loads((resources.files("headway.evals") / "tasks" / f"{name}.toml").read_text("utf-8"))
        folders = [] if data is None else [data, data / name]
    else:
        hint = suggest(
            name, shipped_tasks(), f"or a file: a task's .toml, or data that ends with {', '.join(SUFFIXES)}"
        )
        raise UsageError(f"unknown task {name!r}", hint=hint)
    task = _validated(name, values | (changes or {}))
    file = _find(task, task.data, folders)
    rows = read_rows_of(file)
    examples: list[Row] = []
    if task.shots and task.shots_data is not None:
        examples = read_rows_of(_find(task, task.shots_data, folders))[: task.shots]
    elif task.shots:
        examples, rows = rows[: task.shots], rows[task.shots :]
    if len(examples) < task.shots or not rows:
        raise DataError(f"task {task.name} has too few rows for {task.shots} examples", hint="ask for fewer --shots")
    kind = task.kind or detect_kind(rows[0])
    if kind == "perplexity" and task.shots:
        raise DataError(f"task {task.name} measures perplexity and takes no examples", hint="leave --shots out")
    rows = rows if limit is None else rows[:limit]
    return LoadedTask(task.model_copy(update={"kind": kind}), file.absolute(), rows, examples)


def detect_kind(row: Row) -> Kind:
    """Return the kind of task that a row's fields are for."""
    if "choices" in row.fields:
        return "choice"
    if "text" in row.fields and not set(QUESTION_FIELDS) & set(row.fields):
        return "perplexity"
    return "generate"


QUESTION_FIELDS = ("question", "prompt", "problem", "query", "instruction", "input", "messages")
ANSWER_FIELDS = ("answer", "answers", "solution", "target", "completion", "output", "reference", "answerKey", "label")
"""Fields that are looked for, in this order."""


def _stem(path: Path) -> str:
    return path.name[: path.name.lower().index(str(data_suffix(path)))] or path.name


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"task file {path} does not exist", hint="check the path") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}") from None


def _validated(name: str, values: dict[str, Any]) -> Task:
    try:
        return Task.model_validate(values)
    except ValidationError as error:
        mistake = error.errors()[0]
        key = str(mistake["loc"][0]) if mistake["loc"] else "task"
        if mistake["type"] == "extra_forbidden":
            raise DataError(
                f"{name}: unknown key {key!r}", hint=suggest(key, Task.model_fields, "see the guide")
            ) from None
        if mistake["type"] == "missing":
            raise DataError(f"{name}: no key {key!r}", hint='for example data = "test.jsonl"') from None
        raise DataError(f"{name}: {key}: {what_is_wrong(mistake)}") from None


def _find(task: Task, file: str, folders: list[Path]) -> Path:
    """Return a data file, which may be compressed, from the first folder that has it."""
    for folder in folders:
        path = folder / Path(file).expanduser()
        if path.is_file():
            return path
    if task.name in shipped_tasks():
        raise DataError(
            f"task {task.name} needs its data file {file}",
            hint="name the folder that has it with --data DIR; nothing is downloaded",
        )
    raise DataError(f"task {task.name}: file {folders[0] / file} does not exist", hint="check the path, or give --data")
