"""Tasks from files: fields that are detected, examples, templates, and rows that are refused by name."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from headway.errors import DataError, UsageError
from headway.evals import LoadedTask, load_task, make_questions, shipped_tasks
from headway.evals.questions import fill, metric_of
from headway.evals.session import EvalOptions, OpenTask


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def task_file(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def load(tmp_path: Path, *rows: dict[str, Any], **changes: Any) -> LoadedTask:
    return load_task(write(tmp_path / "rows.jsonl", *rows), changes=changes)


def test_kinds_are_detected_by_fields(tmp_path: Path) -> None:
    assert load(tmp_path, {"question": "1+1?", "answer": 2}).kind == "generate"
    assert load(tmp_path, {"messages": [{"role": "user", "content": "hi"}], "answer": "x"}).kind == "generate"
    assert load(tmp_path, {"question": "?", "choices": ["a", "b"], "answer": 0}).kind == "choice"
    assert load(tmp_path, {"text": "words"}).kind == "perplexity"
    assert load(tmp_path, {"text": "words", "prompt": "p", "answer": "a"}).kind == "generate"


@pytest.mark.parametrize(
    ("row", "gold"),
    [
        ({"choices": ["x", "y", "z"], "answer": 2}, 2),
        ({"choices": ["x", "y", "z"], "answer": "B"}, 1),
        ({"choices": ["x", "y", "z"], "label": "2"}, 2),
        ({"choices": ["x", "y", "z"], "answer": "z"}, 2),
        ({"choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answerKey": "2"}, 1),  # ARC
        ({"choices": ["10", "2"], "answer": "2"}, 1),  # no third choice, so it is the text
    ],
)
def test_right_choice_is_an_index_a_letter_a_label_or_the_text(tmp_path: Path, row: dict[str, Any], gold: int) -> None:
    (question,) = make_questions(load(tmp_path, {"question": "?"} | row))
    assert question.gold == gold


def test_examples_come_before_each_question(tmp_path: Path) -> None:
    rows = [{"question": f"q{n}", "answer": f"a{n}"} for n in range(4)]
    changes = {"shots": 2, "prompt": "Q: {question}\nA:", "prefix": "Answer.\n"}
    first, second = make_questions(load(tmp_path, *rows, **changes))
    assert first.prompt == "Answer.\nQ: q0\nA: a0\n\nQ: q1\nA: a1\n\nQ: q2\nA:"
    assert (second.prompt[-8:], second.references) == ("Q: q3\nA:", ("a3",))
    (question, _) = make_questions(load(tmp_path, *rows, chat=True, **changes))
    assert [message["role"] for message in question.messages] == ["system", *["user", "assistant"] * 2, "user"]
    assert question.messages[-1]["content"] == "Q: q2\nA:"


def test_choices_are_listed_where_the_template_says(tmp_path: Path) -> None:
    row = {"question": "Which?", "choices": ["red", "blue"], "answer": "B"}
    loaded = load(tmp_path, row, row | {"question": "And?"}, shots=1, prompt="{question}\n{choices}\nAnswer:")
    (question,) = make_questions(loaded)
    assert question.prompt == "Which?\nA. red\nB. blue\nAnswer: blue\n\nAnd?\nA. red\nB. blue\nAnswer:"


def test_templates_reach_nothing_but_fields() -> None:
    assert fill("{{a}} {a} {a.b} {a[0]} {0}", str.upper) == "{a} A {a.b} {a[0]} {0}"
    assert fill("{a}", lambda _: "{b}") == "{b}"


def test_last_assistant_message_is_the_reference(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    (question,) = make_questions(load(tmp_path, {"messages": messages}))
    assert question.messages == (messages[0],)
    assert question.references == ("4",)


def test_metric_follows_the_references(tmp_path: Path) -> None:
    def metric(*answers: Any) -> str:
        loaded = load(tmp_path, *({"question": "?", "answer": answer} for answer in answers))
        return metric_of(loaded.task, make_questions(loaded))

    assert metric("18", 3.5, "so\n#### 1,200", "\\boxed{x}") == "math"
    assert metric("18", "Paris") == "exact_match"
    assert metric(["Paris", "paris"]) == "exact_match"


def test_files_may_be_compressed_parquet_or_text(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [{"question": "?", "choices": ["a", "b"], "answer": 1}] * 3
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    loaded = [load_task(str(tmp_path / name), limit=2) for name in ("a.jsonl.gz", "a.parquet")]
    assert [entry.task.name for entry in loaded] == ["a", "a"]
    prompts = [[(q.id, q.prompt, q.choices, q.gold) for q in make_questions(entry)] for entry in loaded]
    assert prompts[0] == prompts[1]
    assert len(prompts[0]) == 2
    (tmp_path / "b.txt").write_text("one document\n\nof text")
    (question,) = make_questions(load_task(str(tmp_path / "b.txt")))
    assert question.prompt == "one document\n\nof text"


def test_a_task_file_names_data_beside_it(tmp_path: Path) -> None:
    write(tmp_path / "d.jsonl", {"q": "x", "a": "7"})
    name = task_file(tmp_path / "t.toml", 'data = "d.jsonl"\nprompt = "{q}?"\nanswer = "{a}"\nextract = "[0-9]+"\n')
    opened = OpenTask.of(load_task(name), EvalOptions())
    assert (opened.task.name, opened.metric, opened.temperature) == ("t", "math", 0.0)
    assert opened.questions[0].prompt == "x?"
    assert opened.asked()["stop"] == ["\n\n"]


def test_gsm8k_reads_local_files_only(tmp_path: Path) -> None:
    assert "gsm8k" in shipped_tasks()
    rows = [{"question": f"q{n}?", "answer": f"it is {n}\n#### {n}"} for n in range(6)]
    with pytest.raises(DataError, match=r"gsm8k needs its data file test\.jsonl") as refused:
        load_task("gsm8k")
    assert "--data DIR; nothing is downloaded" in str(refused.value.hint)
    (tmp_path / "gsm8k").mkdir()
    for name in ("train", "test"):
        write(tmp_path / "gsm8k" / f"{name}.jsonl", *rows)
    for folder in (tmp_path, tmp_path / "gsm8k"):
        opened = OpenTask.of(load_task("gsm8k", data=folder), EvalOptions())
        assert len(opened.questions) == 6
        assert opened.questions[5].prompt.startswith("Question: q0?\nAnswer: it is 0\n#### 0\n\nQuestion: q1?")
        assert opened.questions[5].prompt.endswith("#### 4\n\nQuestion: q5?\nAnswer:")
        assert opened.score("so\n#### 5", opened.questions[5].references)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"question": "?", "answer": "a"}, {"question": "?"}], "line 2: no field 'answer'; it has question"),
        ([{"query": "?", "answer": "a"}, {"querry": "?", "answer": "a"}], "line 2: no field 'question'"),
        ([{"question": "?", "choices": ["a", "b"], "answer": 2}], "line 1: answer 2 is none of the 2 choices"),
        ([{"question": "?", "choices": ["a", "b"], "answer": -1}], "line 1: answer -1 is none of the 2 choices"),
        ([{"question": "?", "choices": ["B", "A"], "answer": "A"}], "line 1: answer 'A' could be several of the 2"),
        ([{"question": "?", "choices": ["a"], "answer": 0}], "line 1: choices is no list of two or more texts"),
        ([{"question": "?", "choices": ["a", ""], "answer": 0}], "line 1: choice 2 is empty"),
        ([{"question": ["?"], "answer": "a"}], "line 1: field 'question' is list, not a text"),
        ([{"question": "?", "answer": []}], "line 1: answer is empty"),
        ([{"messages": "hi", "answer": "a"}], "line 1: messages is no list of messages with a role"),
        ([{"text": "a"}, {"text": ""}], "line 2: text is empty"),
        ([{"text": "a"}, {"txt": "b"}], "line 2: no field 'text'; it has txt"),
    ],
)
def test_a_wrong_row_is_named_with_its_file(tmp_path: Path, rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(DataError, match=re.escape(f"{tmp_path / 'rows.jsonl'} {message}")):
        make_questions(load(tmp_path, *rows))


def test_wrong_files_are_named(tmp_path: Path) -> None:
    data = write(tmp_path / "d.jsonl", {"question": "?", "answer": "a"})
    (tmp_path / "bad.jsonl").write_text('{"question": 1}\n[1]\n')
    (tmp_path / "worse.jsonl").write_text('{"question": 1}\n{"a"\n')
    (tmp_path / "half.jsonl").write_text('{"question": "\\ud800", "answer": "a"}\n')
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "cut.parquet").write_bytes(b"PAR1")
    for name, error, message in (
        ("gsm8", UsageError, "unknown task 'gsm8'"),
        (str(tmp_path / "no.toml"), UsageError, "task file .*no.toml does not exist"),
        (str(tmp_path / "no.jsonl"), DataError, "no.jsonl does not exist"),
        (str(tmp_path / "bad.jsonl"), DataError, "bad.jsonl line 2: a JSON list, not an object"),
        (str(tmp_path / "worse.jsonl"), DataError, "worse.jsonl line 2: not JSON"),
        (str(tmp_path / "half.jsonl"), DataError, "half.jsonl line 1: holds half a surrogate pair"),
        (str(tmp_path / "empty.jsonl"), DataError, "empty.jsonl has no rows"),
        (str(tmp_path / "cut.parquet"), DataError, "cut.parquet is not a complete Parquet file"),
        (task_file(tmp_path / "a.toml", 'data = "d.jsonl"\nshot = 3'), DataError, "unknown key 'shot'"),
        (task_file(tmp_path / "b.toml", "shots = 3"), DataError, "no key 'data'"),
        (task_file(tmp_path / "c.toml", 'data = "e.jsonl"'), DataError, "task c: file .*e.jsonl does not exist"),
        (task_file(tmp_path / "d.toml", 'data = "d.jsonl"\nextract = "("'), DataError, "extract is no regular expr"),
        (task_file(tmp_path / "e.toml", "data = "), DataError, "cannot read .*e.toml"),
    ):
        with pytest.raises(error, match=message):
            load_task(name)
    with pytest.raises(DataError, match="too few rows for 1 examples"):
        load_task(data, changes={"shots": 1})
    with pytest.raises(UsageError) as refused:
        load_task("gsm8")
    assert "did you mean gsm8k?" in str(refused.value.hint)
