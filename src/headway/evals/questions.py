"""A row to a question: its prompt, and the answer or choices to score."""

import hashlib
import json
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from headway.errors import DataError
from headway.evals.rows import Row
from headway.evals.scoring import math_value
from headway.evals.task import ANSWER_FIELDS, QUESTION_FIELDS, LoadedTask, Metric, Task

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Question:
    """A row as it is asked."""

    index: int
    """From 0, in the order of the data."""
    where: str
    id: str
    """A hash of the row: the same question has the same in any file."""
    prompt: str = ""
    """All before the answer; for perplexity, the text itself."""
    messages: tuple[Message, ...] = ()
    """The same as a conversation; empty for a task without chat."""
    references: tuple[str, ...] = ()
    """Right answers of a generation task."""
    choices: tuple[str, ...] = ()
    gold: int | None = None
    """Index of the right choice."""


def make_questions(loaded: LoadedTask) -> list[Question]:
    """Return the questions of a task; raise DataError with the row that is wrong."""
    task = loaded.task
    examples = [_parts(task, loaded.kind, row) for row in loaded.examples]
    questions = []
    for index, row in enumerate(loaded.rows):
        if loaded.kind == "perplexity":
            text = _string(row, _field(row, ("text",), "text"))
            if not text:
                raise DataError(f"{row.where}: text is empty", hint="remove the row")
            questions.append(Question(index, row.where, row_id(row), text))
            continue
        parts = _parts(task, loaded.kind, row)
        chat = bool(parts.messages) if task.chat is None else task.chat
        if parts.messages and not chat:
            raise DataError(
                f"{row.where}: messages need a chat template", hint="leave --no-chat out, or chat in the task"
            )
        questions.append(
            Question(
                index,
                row.where,
                row_id(row),
                _text_prompt(task, examples, parts) if not chat else "",
                _chat_prompt(task, examples, parts) if chat else (),
                parts.references,
                parts.choices,
                parts.gold,
            )
        )
    return questions


def metric_of(task: Task, questions: Sequence[Question]) -> Metric:
    """Return the metric of a generation task: by its references, unless it names one."""
    if task.metric is not None:
        return task.metric
    texts = [text for question in questions for text in question.references]
    is_math = all("####" in text or "\\boxed{" in text or isinstance(math_value(text), Fraction) for text in texts)
    return "math" if is_math else "exact_match"


def row_id(row: Row) -> str:
    """Return a hash of a row's fields."""
    content = json.dumps(row.fields, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def fill(template: str, value_of: Callable[[str], str]) -> str:
    """Replace {name} in a template; {{ and }} are braces. Nothing of a value is looked up or executed."""

    def replace(match: re.Match[str]) -> str:
        return {"{{": "{", "}}": "}"}.get(match[0]) or value_of(match[1])

    return re.sub(r"\{\{|\}\}|\{([A-Za-z_]\w*)\}", replace, template)


# -- parts of a row


@dataclass(frozen=True)
class _Parts:
    prompt: str
    messages: tuple[Message, ...]
    answer: str
    """As an example gives it."""
    references: tuple[str, ...]
    choices: tuple[str, ...]
    gold: int | None


def _parts(task: Task, kind: str, row: Row) -> _Parts:
    choices, labels = _choices(row) if kind == "choice" else ((), ())
    messages, completion = _messages(row)
    prompt = "" if messages and task.prompt is None else _prompt(task, row, choices)
    if task.prompt is not None:
        messages = ()
    if kind == "choice":
        gold = _gold(row, choices, labels)
        return _Parts(prompt, messages, choices[gold], (), choices, gold)
    references = _references(task, row, completion)
    return _Parts(prompt, messages, references[0], references, (), None)


def _text_prompt(task: Task, examples: Sequence[_Parts], parts: _Parts) -> str:
    shown = [example.prompt + task.delimiter + example.answer + task.separator for example in examples]
    return task.prefix + "".join(shown) + parts.prompt


def _chat_prompt(task: Task, examples: Sequence[_Parts], parts: _Parts) -> tuple[Message, ...]:
    messages: list[Message] = [{"role": "system", "content": task.prefix}] if task.prefix else []
    for example in examples:
        messages += example.messages or ({"role": "user", "content": example.prompt},)
        messages.append({"role": "assistant", "content": example.answer})
    messages += parts.messages or ({"role": "user", "content": parts.prompt},)
    return tuple(messages)


def _prompt(task: Task, row: Row, choices: Sequence[str]) -> str:
    if task.prompt is None:
        name = _field(row, tuple(name for name in QUESTION_FIELDS if name != "messages"), "question")
        return _string(row, name)

    def value_of(name: str) -> str:
        if name == "choices":
            return "\n".join(f"{letter}. {text}" for letter, text in zip(string.ascii_uppercase, choices, strict=False))
        return _string(row, _field(row, (name,), name))

    return fill(task.prompt, value_of)


def _references(task: Task, row: Row, completion: str | None) -> tuple[str, ...]:
    if task.answer is not None:
        return (fill(task.answer, lambda name: _string(row, _field(row, (name,), name))),)
    if completion is not None and not set(ANSWER_FIELDS) & set(row.fields):
        return (completion,)
    name = _field(row, ANSWER_FIELDS, "answer")
    value = row.fields[name]
    if isinstance(value, list):
        if not value:
            raise DataError(f"{row.where}: {name} is empty")
        return tuple(_string(row, name, entry) for entry in value)
    return (_string(row, name),)


def _messages(row: Row) -> tuple[tuple[Message, ...], str | None]:
    """Return the conversation before the last assistant message, and that message's content."""
    messages = row.fields.get("messages")
    if messages is None:
        return (), None
    if not (
        isinstance(messages, list)
        and messages
        and all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages)
    ):
        raise DataError(f"{row.where}: messages is no list of messages with a role", hint='[{"role": "user", ...}]')
    if messages[-1]["role"] != "assistant":
        return tuple(messages), None
    content = messages[-1].get("content")
    return tuple(messages[:-1]), content if isinstance(content, str) else None


def _choices(row: Row) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the choices, and their labels where the data has some."""
    value: Any = row.fields.get("choices")
    labels: Sequence[Any] = ()
    if isinstance(value, dict):
        value, labels = value.get("text"), value.get("label") or ()
    if not isinstance(value, list) or len(value) < 2 or not all(isinstance(text, str) for text in value):
        raise DataError(f"{row.where}: choices is no list of two or more texts")
    if not all(value):
        raise DataError(f"{row.where}: choice {value.index('') + 1} is empty")
    return tuple(value), tuple(map(str, labels))


def _gold(row: Row, choices: Sequence[str], labels: Sequence[str]) -> int:
    """Return the index of the right choice, given as an index from 0, a label, a letter or the choice itself."""
    name = _field(row, ANSWER_FIELDS, "answer")
    value = row.fields[name]
    places: set[int] = set()
    if isinstance(value, int) and not isinstance(value, bool):
        places = {value}
    elif isinstance(value, str) and value.strip() in labels:
        places = {labels.index(value.strip())}
    elif isinstance(value, str):
        text = value.strip()
        if len(text) == 1 and text in string.ascii_letters:
            places.add(string.ascii_uppercase.index(text.upper()))
        elif text.isascii() and text.isdigit():
            places.add(int(text))
        if choices.count(value) == 1:
            places.add(choices.index(value))
        places = {place for place in places if 0 <= place < len(choices)}
    if len(places) != 1 or not 0 <= min(places) < len(choices):
        what = "could be several" if len(places) > 1 else "is none"
        raise DataError(
            f"{row.where}: {name} {value!r} {what} of the {len(choices)} choices",
            hint="give an index from 0, or a letter from A",
        )
    return places.pop()


def _field(row: Row, names: Sequence[str], what: str) -> str:
    """Return the first of the names that a row has."""
    for name in names:
        if row.fields.get(name) is not None:
            return name
    shown = ", ".join(sorted(map(str, row.fields))) or "none"
    raise DataError(
        f"{row.where}: no field {what!r}; it has {shown}", hint="name fields in a task file: prompt, answer"
    )


_MISSING = object()


def _string(row: Row, name: str, value: Any = _MISSING) -> str:
    value = row.fields[name] if value is _MISSING else value
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(f"{row.where}: field {name!r} is {type(value).__name__}, not a text")
    return str(value)
