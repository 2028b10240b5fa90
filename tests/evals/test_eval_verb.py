"""`headway eval` with a model that is played by the test: tables, files, runs, comparisons, interruption."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from headway import __version__
from headway.cli import eval as verb
from headway.cli.main import app
from headway.evals.rows import file_sha256
from headway.track import Recorder, create_run, read_evaluations, read_metric, record_path, write_json

Answers = Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]


class Stage:
    """Folders of two models and a run, task files, and what the model answers."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.asked = root, []
        self.dies_after: int | None = None
        self.has_template = False
        for name in ("good", "bad"):
            (root / name).mkdir()
            (root / name / "config.json").write_text("{}")
        sums = [{"question": f"{n}+{n}?", "answer": f"#### {2 * n}"} for n in range(40)]
        pairs = [{"question": f"q{n}", "choices": ["yes", "maybe not"], "answer": n % 2} for n in range(40)]
        texts = [{"text": f"text number {n}"} for n in range(12)]
        for name, rows in (("sums", sums), ("pairs", pairs), ("texts", texts)):
            (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        monkeypatch.chdir(root)
        monkeypatch.setenv("COLUMNS", "80")
        monkeypatch.setattr(verb, "model_process", self.process)

    @contextmanager
    def process(self, module: str, name: str, request: dict[str, Any]) -> Iterator[SimpleNamespace]:
        assert module == "headway.inference.evaluate"
        self.asked.append(request)
        yield SimpleNamespace(messages=lambda: self.messages(request))

    def messages(self, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        good = "bad" not in str(request.get("folder"))
        yield {"ready": {"device": "cpu", "dtype": "float32", "chat_template": self.has_template}}
        for number, task in enumerate(request["tasks"]):
            for question in reversed(task["questions"]):  # in any order
                if self.dies_after == 0:
                    raise KeyboardInterrupt
                self.dies_after = None if self.dies_after is None else self.dies_after - 1
                n = question["number"]
                answer: dict[str, Any] = {"prompt": question["prompt"]}
                if task["kind"] == "generate":
                    right = lambda i, n=n: (n % 4 > 0 if good else n % 4 > 2) and i % 2 == 0  # noqa: E731
                    answer["outputs"] = [
                        {"text": f"so {2 * n if right(i) else -1}", "finish": "stop", "tokens": 3}
                        for i in range(request["samples"])
                    ]
                elif task["kind"] == "choice":
                    answer["logprobs"] = [-3.0, -6.0]
                else:
                    answer |= {"logprob": -len(question["prompt"]) * (1.0 if good else 1.1), "tokens": 4}
                yield {"task": number, "question": n, **answer}

    def eval(self, words: str, status: int = 0) -> str:
        result = CliRunner().invoke(app, ["eval", *words.split()], catch_exceptions=True)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            result.exit_code = getattr(result.exception, "exit_status", 1)
            return f"{result.exception}"
        assert result.exit_code == status, result.output
        assert "--json" in words or all(
            len(line) <= 80 or " " not in line.strip() for line in result.output.splitlines()
        ), result.output
        return result.output


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(tmp_path, monkeypatch)


def test_table_has_a_row_per_metric_with_its_interval(stage: Stage) -> None:
    text = stage.eval("good --tasks sums.jsonl,pairs.jsonl,texts.jsonl")
    rows = {tuple(line.split()[:2]): line.split()[2:] for line in text.splitlines() if line.startswith("  ")}
    assert rows["sums", "math"] == ["75.0", "%", "59.8", "to", "85.8", "%", "40"]  # Wilson of 30 in 40
    assert rows["pairs", "acc"] == ["50.0", "%", "35.2", "to", "64.8", "%", "40"]
    assert rows["pairs", "acc_norm"][0] == "50.0"  # -3/3 against -6/9: the longer one is likelier per character
    assert rows["texts", "byte_perplexity"] == ["2.718", "2.72", "to", "2.72", "12"]
    assert rows["texts", "bits_per_byte"][0] == "1.443"
    assert text.startswith("good: float32 on cpu, 92 questions in ")


def test_samples_give_a_mean_and_pass_at_k(stage: Stage) -> None:
    document = json.loads(stage.eval("good --tasks sums.jsonl --samples 4 --json"))
    (task,) = document["tasks"]
    metrics = {metric["name"]: metric["value"] for metric in task["metrics"]}
    # 30 questions have 2 right outputs of 4: 5 of 6 pairs have one.
    assert metrics == pytest.approx({"math": 0.375, "pass@2": 30 / 40 * 5 / 6, "pass@4": 0.75})
    assert stage.asked[0]["tasks"][0]["temperature"] is None  # the model's own
    stage.eval("good --tasks sums.jsonl")
    assert stage.asked[1]["tasks"][0]["temperature"] == 0


def test_out_has_every_row_and_an_interrupted_one_is_completed(stage: Stage) -> None:
    stage.dies_after = 25
    result = CliRunner().invoke(app, ["eval", "good", "--tasks", "sums.jsonl", "--out", "o.jsonl"])
    assert result.exit_code == 130
    lines = (stage.root / "o.jsonl").read_text().splitlines()
    assert len(lines) == 25
    (stage.root / "o.jsonl").write_text("\n".join(lines) + '\n{"task": "su')  # killed while it wrote
    stage.dies_after = None
    text = stage.eval("good --tasks sums.jsonl --out o.jsonl")
    assert "75.0 %" in text
    assert len(stage.asked[1]["tasks"][0]["questions"]) == 15
    rows = [json.loads(line) for line in (stage.root / "o.jsonl").read_text().splitlines()]
    assert sorted(row["index"] for row in rows) == list(range(40))
    row = next(row for row in rows if row["index"] == 7)
    assert row["prompt"] == "7+7?"
    assert row["references"] == ["#### 14"]
    assert row["outputs"] == [{"text": "so 14", "finish": "stop", "tokens": 3, "score": 1}]
    stage.eval("good --tasks sums.jsonl --out o.jsonl")
    assert len(stage.asked) == 2  # nothing was left to run


def test_a_chat_template_that_is_not_used_is_noted(stage: Stage) -> None:
    note = "sums: the model's chat template is not used"
    assert note not in stage.eval("good --tasks sums.jsonl")
    stage.has_template = True
    assert note in stage.eval("good --tasks sums.jsonl,texts.jsonl")
    notes = json.loads(stage.eval("good --tasks sums.jsonl,texts.jsonl --json"))["notes"]
    assert [note.partition(":")[0] for note in notes] == ["sums"]
    for words in ("--chat", "--no-chat"):
        assert json.loads(stage.eval(f"good --tasks sums.jsonl --json {words}"))["notes"] == []


def test_out_of_another_evaluation_is_not_touched(stage: Stage) -> None:
    stage.eval("good --tasks sums.jsonl --out o.jsonl")
    before = (stage.root / "o.jsonl").read_bytes()
    for words in ("bad --tasks sums.jsonl", "good --tasks pairs.jsonl", "good --tasks sums.jsonl --shots 1"):
        assert "another model, task or setting" in stage.eval(f"{words} --out o.jsonl")
    (stage.root / "notes.jsonl").write_text("notes\n")
    assert "is no file of results" in stage.eval("good --tasks sums.jsonl --out notes.jsonl")
    assert (stage.root / "o.jsonl").read_bytes() == before


def make_run(stage: Stage, recipe: Callable[..., Any], *steps: int) -> Any:
    run = create_run(stage.root / "runs", "demo", "demo")
    write_json(run.recipe_file, recipe().model_dump(mode="json"))
    with Recorder(record_path(run.events, 1, "rank-0"), attempt=1, process="rank-0") as recorder:
        recorder.event("step", step=1, loss=2.0, data=1, compute=1)
    for step in steps:
        (run.checkpoints / f"step-{step:08d}").mkdir()
    return run


def test_results_are_recorded_in_the_run(
    stage: Stage, recipe: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(stage, recipe)
    source = {"run": str(run.path), "checkpoint": str(run.checkpoints)}
    for step in (10, 20):
        monkeypatch.setattr(verb, "model_of", lambda *_, step=step: (source, f"demo@{step}"))
        text = stage.eval("demo --tasks sums.jsonl")
    assert f"recorded: {run.evals}" in " ".join(text.split())
    assert text.endswith("next: headway metrics demo --key sums/math\n")
    first, second = read_evaluations(run)
    assert (first.step, second.step, first.task, first.kind) == (10, 20, "sums", "generate")
    assert first.sha256 == file_sha256(stage.root / "sums.jsonl")
    assert first.version == __version__
    assert [path.suffix for path in sorted(run.evals.iterdir())] == [".json", ".jsonl"] * 2
    stage.eval("demo --tasks sums.jsonl")  # again: in its place
    assert len(read_evaluations(run)) == 2
    stage.eval("demo --tasks sums.jsonl --limit 5")
    assert len(read_evaluations(run)) == 3
    steps, values = read_metric(run, "sums/math")
    assert (steps.tolist(), values.tolist()) == ([10, 20], [0.75, 0.75])
    steps, values = read_metric(run, "sums[limit=5]/math")  # other settings have a key of their own
    assert (steps.tolist(), values.tolist()) == ([20], [0.6])
    report = CliRunner().invoke(app, ["report", "demo"]).output
    assert re.search(
        r"evaluations:\n +step task +metric .*\n +20 sums +math +75.0 %.*\n +20 sums\[limit=5\] +math +60.0 %", report
    )
    document = json.loads(CliRunner().invoke(app, ["report", "demo", "--json"]).output)
    assert [entry["step"] for entry in document["evaluations"]] == [10, 20, 20]


def test_damaged_summaries_are_left_out(stage: Stage, recipe: Callable[..., Any]) -> None:
    run = make_run(stage, recipe)
    run.evals.mkdir()
    (run.evals / "x.json").write_text('{"task": ')
    assert read_evaluations(run) == []


def test_comparison_says_whether_a_difference_is_significant(stage: Stage) -> None:
    text = " ".join(stage.eval("--compare good bad --tasks sums.jsonl,pairs.jsonl,texts.jsonl").split())
    # 20 questions only good has right, none only bad: p = 2 / 2^20.
    assert "sums math: good is better than bad, significant at 5 % (75.0 % against 25.0 %; p<0.0001, McNemar's" in text
    assert "pairs acc: good and bad do not differ significantly at 5 % (50.0 % and 50.0 %; p=1, McNemar's" in text
    assert "texts bits_per_byte: good is better than bad, significant at 5 %" in text


def test_files_and_recorded_runs_are_compared_without_a_model(
    stage: Stage, recipe: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.eval("good --tasks sums.jsonl --out good.jsonl --samples 2")
    stage.eval("bad --tasks sums.jsonl --out bad.jsonl")
    run = make_run(stage, recipe)
    source = {"run": str(run.path), "checkpoint": str(run.checkpoints)}
    with monkeypatch.context() as patch:
        patch.setattr(verb, "model_of", lambda *_: (source, "demo@10"))
        stage.eval("demo --tasks sums.jsonl")
    count = len(stage.asked)
    document = json.loads(stage.eval("--compare good.jsonl bad.jsonl --json"))
    (comparison,) = document["comparisons"]
    assert (comparison["first"], comparison["second"]) == (0.375, 0.25)
    assert comparison["test"]["method"] == "exact paired sign-flip test"
    text = " ".join(stage.eval("--compare bad.jsonl demo").split())
    assert "demo@10 is better than bad.jsonl, significant at 5 %" in text
    assert "difference +50 points" in text
    assert "evaluated steps: 10" in str(stage_hint(stage, "--compare bad.jsonl demo@7"))
    assert len(stage.asked) == count


def stage_hint(stage: Stage, words: str) -> str:
    result = CliRunner().invoke(app, ["eval", *words.split()])
    return str(getattr(result.exception, "hint", result.output))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("good --tasks sums.jsonl,sums.jsonl", "two tasks are called 'sums'"),
        ("good --tasks sums.jsonl --samples 4 --temperature 0", "all outputs of sums are equal at temperature 0"),
        ("good --tasks sums.jsonl --top-p 0", "--top-p 0 leaves nothing to sample from"),
        ("--compare good none --tasks sums.jsonl", "no runs in runs"),
        ("good --tasks sums.jsonl --out no/o.jsonl", "cannot write no/o.jsonl"),
        ("good --tasks sums.jsonl --out good", "cannot write good"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_a_model_is_loaded(stage: Stage, words: str, message: str) -> None:
    assert message in stage.eval(words)
    assert stage.asked == []


def test_models_of_one_name_are_called_as_they_were_typed(stage: Stage) -> None:
    for parent in ("a", "b/bad"):
        (stage.root / parent / "model").mkdir(parents=True)
        (stage.root / parent / "model" / "config.json").write_text("{}")
    text = " ".join(stage.eval("--compare a/model b/bad/model --tasks sums.jsonl").split())
    assert "a/model is better than b/bad/model, significant" in text
