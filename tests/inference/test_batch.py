"""`headway generate`: answers of a file of prompts, resumed after an interruption."""

import fcntl
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.data.tokenizer import train_tokenizer
from headway.errors import DataError
from headway.inference import LLM, LoadedModel, SamplingParams
from headway.inference.batch import BatchRequest, run_batch
from headway.models import empty_decoder, init_weights
from headway.recipe import Model

MODEL = Model(vocab_size=320, layers=2, dim=32, heads=4, kv_heads=2, hidden=48, init_std=0.3)
LINES = [{"prompt": "def"}, {"prompt": [5, 6], "params": {"max_tokens": 2}}, {"prompt": "x", "params": {"n": 2}}]


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    decoder = empty_decoder(MODEL)
    init_weights(decoder, seed=0)
    tokenizer = train_tokenizer(["def headway(steps):\n    return steps"] * 3, vocab_size=290)
    model = LoadedModel("tiny", decoder.eval(), torch.device("cpu"), 290, 100, tokenizer)
    monkeypatch.setattr(BatchRequest, "load", lambda _: model)
    return model


def request(folder: Path, lines: list[Any]) -> BatchRequest:
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    params = {"max_tokens": 8, "seed": 3}
    return BatchRequest(
        inputs=folder / "in.jsonl", output=folder / "out.jsonl", params=params, options={"cache_tokens": 900}
    )


def answers(folder: Path) -> dict[int, list[str]]:
    lines = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert len(lines) == len({line["index"] for line in lines})
    return {line["index"]: [output["text"] for output in line["outputs"]] for line in lines}


def test_answers_are_the_model_s_and_an_interrupted_file_is_completed(
    loaded: LoadedModel, tmp_path: Path, capsys
) -> None:
    run_batch(request(tmp_path, LINES))
    expected = {
        index: [
            output.text
            for output in LLM(loaded)
            .generate([line["prompt"]], SamplingParams(**{"max_tokens": 8, "seed": 3, **line.get("params", {})}))[0]
            .outputs
        ]
        for index, line in enumerate(LINES)
    }
    assert answers(tmp_path) == expected
    whole = (tmp_path / "out.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "out.jsonl").write_bytes(whole[1] + whole[0][:9])  # killed while it wrote
    capsys.readouterr()
    run_batch(request(tmp_path, LINES))
    assert answers(tmp_path) == expected
    assert json.loads(capsys.readouterr().out.splitlines()[0]) == {"total": 3, "done": 1}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"prompt": "x"}, {"promt": "x"}], r"in.jsonl:2: unknown key 'promt'"),
        ([{"prompt": "x"}, {"prompt": 1.5}], r"in.jsonl:2: prompt: this is neither text nor token ids"),
        ([{"prompt": "x"}, 3], r"in.jsonl:2: this is no JSON object"),
        ([{"messages": {"role": "user"}}], r"in.jsonl:1: messages: this is no list of messages"),
        ([{"prompt": "x"}, {"prompt": [-1]}], r"in.jsonl:2: token id -1 is not in the vocabulary of 290"),
        (
            [{"prompt": "x"}, {"prompt": [5] * 100}],
            r"in.jsonl:2: the prompt has 100 tokens, but the model takes 100 in",
        ),
        ([{"prompt": [5] * 93}], r"in.jsonl:1: the prompt has 93 tokens and max_tokens is 8, but the model takes 100"),
        ([{}], r"in.jsonl:1 needs either a prompt or messages"),
        ([{"prompt": "x", "params": {"temperature": -1}}], r"in.jsonl:1: params: temperature: "),
        ([{"prompt": "x", "params": {"temprature": 1}}], r"in.jsonl:1: params: unknown parameter 'temprature'"),
        ([{"messages": [{"role": "user", "content": "x"}]}], r"in.jsonl:1: tiny has no chat template"),
    ],
)
def test_wrong_lines_are_named(loaded: LoadedModel, tmp_path: Path, lines: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        run_batch(request(tmp_path, lines))
    assert not (tmp_path / "out.jsonl").exists()


def test_a_file_with_other_content_is_not_appended_to(loaded: LoadedModel, tmp_path: Path) -> None:
    for content in ("notes\n", '{"index": 7}\n'):
        (tmp_path / "out.jsonl").write_text(content)
        with pytest.raises(DataError, match=r"other content|to other prompts"):
            run_batch(request(tmp_path, LINES))
        assert (tmp_path / "out.jsonl").read_text() == content


@pytest.mark.parametrize(
    "change",
    [
        {"params": {"max_tokens": 8, "seed": 4}},
        {"params": {"max_tokens": 7, "seed": 3}},
        {"dtype": "bfloat16"},
        "prompt",
    ],
    ids=["seed", "length", "dtype", "prompt"],
)
def test_answers_to_something_else_are_not_taken_over(
    loaded: LoadedModel, tmp_path: Path, change: dict[str, Any] | str
) -> None:
    run_batch(request(tmp_path, LINES))
    before = (tmp_path / "out.jsonl").read_bytes()
    other = (
        request(tmp_path, [LINES[0], LINES[1], {"prompt": "y"}])
        if isinstance(change, str)
        else request(tmp_path, LINES).model_copy(update=change)
    )
    with pytest.raises(DataError, match="has answers of another model, or to other prompts or sampling parameters"):
        run_batch(other)
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_another_model_s_answers_are_not_taken_over_and_more_prompts_are_added(
    loaded: LoadedModel, tmp_path: Path, capsys
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_text("1")
    first = request(tmp_path, LINES[:1]).model_copy(update={"folder": folder})
    run_batch(first)
    capsys.readouterr()
    more = request(tmp_path, LINES).model_copy(update={"folder": folder})
    run_batch(more)
    assert json.loads(capsys.readouterr().out.splitlines()[0]) == {"total": 3, "done": 1}
    os.utime(folder / "model.safetensors", ns=(1, 1))  # other weights in the same place
    with pytest.raises(DataError, match="answers of another model"):
        run_batch(more)
    with pytest.raises(DataError, match="answers of another model"):
        run_batch(more.model_copy(update={"folder": tmp_path}))


def test_a_file_that_another_process_writes_is_refused(loaded: LoadedModel, tmp_path: Path) -> None:
    """For example one whose command was killed and that has not noticed yet."""
    with (tmp_path / "out.jsonl").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(DataError, match=r"another headway generate writes to .*out\.jsonl"):
            run_batch(request(tmp_path, LINES))
    run_batch(request(tmp_path, LINES))
    assert len(answers(tmp_path)) == 3


@pytest.mark.parametrize(
    ("text", "message"), [("", "in.jsonl is empty"), ('{"prompt": "x"}\n\n', "in.jsonl:2: the line is empty")]
)
def test_empty_inputs_are_named_and_leave_no_file(loaded: LoadedModel, tmp_path: Path, text: str, message: str) -> None:
    asked = request(tmp_path, [])
    asked.inputs.write_text(text)
    with pytest.raises(DataError, match=message):
        run_batch(asked)
    assert not asked.output.exists()


def test_answers_to_token_ids_have_token_ids_also_without_a_tokenizer(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [{"prompt": [5, 6]}]
    (expected,) = LLM(loaded).generate([[5, 6]], SamplingParams(max_tokens=8, seed=3))
    monkeypatch.setattr(BatchRequest, "load", lambda _: replace(loaded, tokenizer=None))
    run_batch(request(tmp_path, lines))
    (answer,) = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert answer["outputs"][0]["token_ids"] == expected.outputs[0].token_ids
    (tmp_path / "out.jsonl").unlink()
    with pytest.raises(DataError, match=r"in\.jsonl:2: tiny has no tokenizer"):
        run_batch(request(tmp_path, [*lines, {"prompt": "x"}]))


def test_a_default_length_is_cut_to_the_context(loaded: LoadedModel, tmp_path: Path) -> None:
    plain = request(tmp_path, [{"prompt": [5] * 93}]).model_copy(update={"params": {"seed": 3}})
    run_batch(plain)
    (line,) = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert line["outputs"][0]["tokens"] == 7
