"""Tasks that are evaluated during training: the scores of the checkpoint, on any mesh, and no other bits."""

import json
from pathlib import Path
from typing import Any

import pytest

from headway.errors import RecipeError
from headway.evals.session import EvalOptions, EvalSession, open_tasks
from headway.inference.evaluate import EvaluateRequest, evaluate
from headway.models import empty_decoder, init_weights, write_folder
from headway.recipe import Model
from headway.state import find_checkpoint
from headway.track import RunFolder, latest_evaluations, read_evaluation_rows


@pytest.fixture
def tasks(tmp_path: Path) -> list[str]:
    """One task of each kind."""
    texts = [line for line in Path(json.__file__).read_text().splitlines() if len(line) > 20][:7]
    rows = {
        "texts": [{"text": text} for text in texts],
        "choices": [{"question": text, "choices": ["import json", "the"], "answer": 0} for text in texts[:5]],
        "outputs": [{"question": text, "answer": "x"} for text in texts[:3]],
    }
    files = []
    for name, entries in rows.items():
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        files.append(str(file))
    short = tmp_path / "outputs.toml"
    short.write_text('data = "outputs.jsonl"\nmax_tokens = 6\n')
    return [files[0], files[1], str(short)]


def rows_in_training(run: RunFolder, step: int) -> dict[str, list[dict[str, Any]]]:
    return {entry.task: read_evaluation_rows(run, entry) for entry in latest_evaluations(run) if entry.step == step}


def rows_of_checkpoint(run: RunFolder, step: int, tasks: list[str]) -> dict[str, list[dict[str, Any]]]:
    """What `headway eval RUN@STEP` computes."""
    source = {"run": str(run.path), "checkpoint": str(find_checkpoint(run.checkpoints, step))}
    options = EvalOptions(device="cpu")
    session = EvalSession(source, f"{run.name}@{step}", open_tasks(tasks, options), options)
    evaluate(EvaluateRequest.model_validate(session.request()), session.take)
    names = [task.task.name for task in session.tasks]
    return dict(zip(names, session.rows(), strict=True))


def assert_same_answers(rows: dict[str, list[dict[str, Any]]], others: dict[str, list[dict[str, Any]]]) -> None:
    assert rows.keys() == others.keys() == {"texts", "choices", "outputs"}
    for name, answers in rows.items():
        assert len(answers) == len(others[name])
        for row, other in zip(answers, others[name], strict=True):
            assert row["prompt"] == other["prompt"]
            assert row.get("outputs") == other.get("outputs")
            for key in ("logprob", "logprobs"):
                assert row.get(key, 0.0) == pytest.approx(other.get(key, 0.0), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{}, {"shard": 2}, {"replicate": 2}, {"tensor": 2}, {"pipeline": 2}], ids=str)
def test_scores_are_those_of_the_checkpoint(mesh, lab, recipe, tasks) -> None:
    # A run takes as many tokens as its sequences have; the longest question with a choice has 80.
    settings = {"train.steps": 4, "checkpoint.every_steps": 2, "data.seq": 96}
    settings |= {f"parallel.{key}": size for key, size in mesh.items()}
    workers = 2 if mesh else 1
    plain = lab.train(recipe(settings), workers=workers)
    lived = lab.train(recipe(settings | {"eval.tasks": tasks, "eval.tasks_every_steps": 2}), workers=workers)
    assert lived.outcome.state == "finished", lived.outcome
    assert (lived.chain, lived.digest) == (plain.chain, plain.digest)
    for step in (2, 4):
        assert_same_answers(rows_in_training(lived.run, step), rows_of_checkpoint(lived.run, step, tasks))


@pytest.mark.slow
@pytest.mark.parametrize("quantize", [{}, {"lora.quantize": "nf4"}], ids=["lora", "nf4"])
def test_adapters_are_evaluated_with_their_base(quantize, lab, recipe, tasks, tmp_path) -> None:
    model = Model(layers=2, dim=64, heads=2, kv_heads=1, vocab_size=320)
    decoder = empty_decoder(model)
    init_weights(decoder, 3)
    write_folder(tmp_path / "base", model, decoder.state_dict())
    settings = {"model.dim": 64, "model.init": str(tmp_path / "base"), "lora.rank": 4, "train.steps": 4} | quantize
    lived = lab.train(recipe(settings | {"eval.tasks": tasks}), workers=2)
    assert lived.outcome.state == "finished", lived.outcome
    rows, stored = rows_in_training(lived.run, 4), rows_of_checkpoint(lived.run, 4, tasks)
    if not quantize:
        assert_same_answers(rows, stored)
    else:  # the checkpoint is merged into the base as it was before it was quantized
        for row, other in zip(rows["texts"], stored["texts"], strict=True):
            assert row["logprob"] != other["logprob"]
            assert row["logprob"] == pytest.approx(other["logprob"], rel=0.02)


def test_a_task_that_is_missing_is_refused_before_anything_starts(lab, recipe, tmp_path) -> None:
    with pytest.raises(RecipeError, match=r"eval.tasks: task none: file .*none.jsonl does not exist"):
        lab.train(recipe({"eval.tasks": [str(tmp_path / "none.jsonl")]}))
    assert not lab.root.exists()


def test_a_task_that_cannot_be_answered_is_reported_and_training_goes_on(lab, recipe, tmp_path) -> None:
    file = tmp_path / "long.jsonl"
    file.write_text(json.dumps({"question": "word " * 20_000, "answer": "x"}) + "\n")
    lived = lab.train(recipe({"train.steps": 2, "eval.tasks": [str(file)]}))
    assert lived.outcome.state == "finished", lived.outcome
    assert "no evaluation of the tasks" in lived.events("log")[-1]["message"]
    assert not latest_evaluations(lived.run)
