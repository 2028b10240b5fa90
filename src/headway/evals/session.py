"""An evaluation in progress: questions out, answers in, scored rows and summaries."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from headway import __version__
from headway.errors import UsageError
from headway.evals.questions import Question, make_questions, metric_of
from headway.evals.results import (
    ScoredRow,
    cut_outputs,
    metrics_of,
    score_choices,
    score_outputs,
    score_text,
)
from headway.evals.rows import file_sha256
from headway.evals.scoring import scorer
from headway.evals.task import LoadedTask, Task, load_task
from headway.state.model_identity import fingerprint_of, model_identity
from headway.track.evaluations import Evaluation


@dataclass(frozen=True)
class EvalOptions:
    """How tasks are run, beside what they say themselves."""

    samples: int = 1
    limit: int | None = None
    top_p: float | None = None
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"


@dataclass
class OpenTask:
    """A task with its questions, and the rows that have been scored."""

    task: Task
    file: Path
    sha256: str
    questions: list[Question]
    metric: str | None
    """Of a generation task."""
    score: Callable[[str, Sequence[str]], bool]
    temperature: float | None
    """None for the model's own."""
    samples: int
    rows: dict[int, ScoredRow] = field(default_factory=dict)
    """By the question's index."""

    @classmethod
    def of(cls, loaded: LoadedTask, options: EvalOptions) -> "OpenTask":
        """Make the questions of a task."""
        task, questions = loaded.task, make_questions(loaded)
        generates = loaded.kind == "generate"
        metric = metric_of(task, questions) if generates else None
        greedy = task.temperature is None and options.samples == 1
        return cls(
            task,
            loaded.file,
            file_sha256(loaded.file),
            questions,
            metric,
            scorer(metric or "exact_match", extract=task.extract, ignore_case=task.ignore_case),
            0.0 if greedy else task.temperature,
            options.samples if generates else 1,
        )

    def asked(self) -> dict[str, Any]:
        """Return the questions that are left, for the process with the model."""
        stop = self.task.stop
        if stop is None:
            stop = () if any(question.messages for question in self.questions) else ("\n\n",)
        return {
            "name": self.task.name,
            "kind": self.task.kind,
            "delimiter": self.task.delimiter,
            "stop": list(stop),
            "max_tokens": self.task.max_tokens,
            "temperature": self.temperature,
            "questions": [
                {
                    "number": question.index,
                    "where": question.where,
                    "prompt": question.prompt,
                    "messages": [dict(message) for message in question.messages],
                    "choices": list(question.choices),
                }
                for question in self.questions
                if question.index not in self.rows
            ],
        }

    def scored(self, question: Question, answer: Mapping[str, Any]) -> ScoredRow:
        """Score what the model answered."""
        if self.metric is not None:
            return score_outputs(question, answer["outputs"], self.metric, self.score)
        if question.choices:
            return score_choices(question, answer["logprobs"])
        return score_text(question, answer["logprob"], answer["tokens"])


def open_tasks(
    names: Sequence[str], options: EvalOptions, *, data: Path | None = None, changes: dict[str, Any] | None = None
) -> list[OpenTask]:
    """Load tasks and make their questions; `data` is the folder of named tasks, `changes` replace their settings."""
    loaded = [load_task(name, data=data, changes=changes, limit=options.limit) for name in names]
    titles = [entry.task.name for entry in loaded]
    if len(set(titles)) < len(titles):
        twice = next(title for title in titles if titles.count(title) > 1)
        raise UsageError(f"two tasks are called {twice!r}", hint="name each once, or set name in a task file")
    tasks = [OpenTask.of(task, options) for task in loaded]
    greedy = next((task.task.name for task in tasks if task.samples > 1 and task.temperature == 0), None)
    if greedy is not None:
        raise UsageError(f"all outputs of {greedy} are equal at temperature 0", hint="leave --samples out")
    return tasks


def variant_of(options: EvalOptions, changes: Mapping[str, Any]) -> str:
    """Return what was changed from a task's own settings, in a few words."""
    values = {**changes, **{key: value for key, value in asdict(options).items() if key != "device"}}
    defaults = asdict(EvalOptions())
    words = []
    for key in sorted(values):
        if key == "chat":
            words.append("chat" if values[key] else "no-chat")
        elif key not in defaults or values[key] != defaults[key]:
            words.append(f"{key}={values[key]}")
    return ",".join(words)


class EvalSession:
    """Tasks on one model."""

    def __init__(
        self,
        source: Mapping[str, str],
        model: str,
        tasks: Sequence[OpenTask],
        options: EvalOptions,
        changes: Mapping[str, Any] | None = None,
    ) -> None:
        """`changes` are settings of tasks that were given for this evaluation."""
        self._variant = variant_of(options, changes or {})
        self.source, self.model, self.tasks, self.options = source, model, list(tasks), options
        self.facts: dict[str, Any] = {}
        """Device and precision, once the model is loaded."""
        self._started, self._seconds = time.time(), 0.0
        identity = model_identity(source)
        how = {key: value for key, value in asdict(options).items() if key not in ("limit", "device")}
        self.fingerprints = [
            fingerprint_of(model=identity, sha256=task.sha256, task=task.task.model_dump(), options=how)
            for task in self.tasks
        ]
        """Of the rows of each task: rows with the same are interchangeable."""

    @property
    def total(self) -> int:
        """Questions of all tasks."""
        return sum(len(task.questions) for task in self.tasks)

    @property
    def left(self) -> int:
        """Questions without an answer."""
        return self.total - sum(len(task.rows) for task in self.tasks)

    def request(self) -> dict[str, Any]:
        """Return the request to the process with the model."""
        options = {key: value for key, value in asdict(self.options).items() if key != "limit"}
        return {**self.source, **options, "tasks": [task.asked() for task in self.tasks]}

    def take(self, message: Mapping[str, Any]) -> bytes | None:
        """Take a message of that process; return the line of the row that it completes."""
        if "ready" in message:
            self.facts = dict(message["ready"])
            return None
        number = int(message["task"])
        task = self.tasks[number]
        question = task.questions[int(message["question"])]
        head = {
            "task": task.task.name,
            "index": question.index,
            "id": question.id,
            "evaluation": self.fingerprints[number],
            "model": self.model,
            "prompt": message["prompt"],
        }
        row = head | task.scored(question, message)
        task.rows[question.index] = row
        return to_json(row, inf_nan_mode="null") + b"\n"

    def keep(self, row: ScoredRow) -> None:
        """Take over a row of an earlier evaluation with the same fingerprint; one beyond the limit is ignored."""
        task = self.tasks[self.fingerprints.index(row["evaluation"])]
        if row["index"] < len(task.questions):
            task.rows[row["index"]] = row

    def finish(self, started: float, ended: float) -> None:
        """Note how long it took."""
        self._started, self._seconds = started, ended - started

    def notes(self) -> list[str]:
        """Return what may surprise: tasks that do not use the chat template that the model has."""
        if not self.facts.get("chat_template"):
            return []
        plain = [
            task.task.name
            for task in self.tasks
            if task.task.chat is None
            and task.task.kind != "perplexity"
            and not any(question.messages for question in task.questions)
        ]
        return [
            f"{name}: the model's chat template is not used; --chat uses it, --no-chat drops this note"
            for name in plain
        ]

    def rows(self) -> list[list[ScoredRow]]:
        """Return the rows of each task, in the order of the questions."""
        return [[row for _, row in sorted(task.rows.items())] for task in self.tasks]

    def evaluations(self) -> list[Evaluation]:
        """Return the summary of each task."""
        return [
            self._evaluation(task, fingerprint, rows)
            for task, fingerprint, rows in zip(self.tasks, self.fingerprints, self.rows(), strict=True)
        ]

    def _evaluation(self, task: OpenTask, fingerprint: str, rows: list[ScoredRow]) -> Evaluation:
        kind = str(task.task.kind)
        ref, _, step = self.model.rpartition("@")
        settings = task.task.model_dump(exclude_none=True) | asdict(self.options) | self.facts
        settings |= {"metric": task.metric, "temperature": task.temperature}
        return Evaluation(
            task=task.task.name,
            kind=kind,
            model=self.model,
            step=int(step) if "run" in self.source and ref else None,
            file=str(task.file),
            sha256=task.sha256,
            fingerprint=fingerprint_of(rows=fingerprint, questions=len(rows)),
            version=__version__,
            settings=settings,
            variant=self._variant,
            questions=len(rows),
            samples=task.samples,
            cut=cut_outputs(rows),
            metrics=metrics_of(kind, rows, task.samples),
            started=self._started,
            seconds=self._seconds,
        )
