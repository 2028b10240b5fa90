"""Callbacks of the user's own: what they are told, that they can stop a run, and that they change no bit."""

import json
from pathlib import Path

import pytest

from headway.track import compare_runs


def test_callbacks_are_told_all_and_change_nothing(lab, recipe, tmp_path) -> None:
    settings = {"train.steps": 6, "eval.every_steps": 2, "data.holdout": 0.2, "eval.windows": 4}
    plain = lab.train(recipe(settings), workers=2)
    diary = tmp_path / "diary.jsonl"
    named = {"class": "own_callbacks:Diary", "args": {"file": str(diary), "stop_at": 3}}
    lived = lab.train(recipe(settings | {"callbacks": [named]}), workers=2)
    assert lived.outcome.state == "stopped", lived.outcome
    again = lab.resume(lived.run)
    assert again.outcome.state == "finished", again.outcome
    assert compare_runs(again.run, plain.run).equal

    told = [json.loads(line) for line in diary.read_text().splitlines()]
    kinds = [(kind, step) for kind, step, _ in told]
    # The request to stop travels with the loss of the step after the one that it answers.
    first = [("begin", 0), ("step", 1), ("step", 2), ("evaluated", 2), ("step", 3), ("step", 4), ("evaluated", 4)]
    second = [("begin", 4), ("step", 5), ("step", 6), ("evaluated", 6), ("end", 6)]
    assert kinds == [*first, ("end", 4), *second]
    losses = {event["step"]: event["loss"] for event in plain.events("step")}
    assert {step: metrics["loss"] for kind, step, metrics in told if kind == "step"} == losses
    scores = {event["step"]: event["loss"] for event in plain.events("eval")}
    assert {step: metrics["loss"] for kind, step, metrics in told if kind == "evaluated"} == scores


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_callbacks:Broken", "callback own_callbacks:Broken failed in step: KeyError: 'accuracy'"),
        ("own_callbacks:Silent", "own_callbacks:Silent is no callback"),
        ("own_callbacks:Dairy", "callbacks.class names own_callbacks:Dairy, but own_callbacks has no Dairy"),
    ],
)
def test_what_is_wrong_with_a_callback_is_named(name: str, message: str, lab, recipe) -> None:
    lived = lab.train(recipe({"train.steps": 3, "callbacks": [{"class": name}]}))
    assert lived.outcome.state == "failed"
    assert message in lived.outcome.reason


def test_recipes_keep_callbacks(recipe, tmp_path: Path) -> None:
    named = {"class": "own_callbacks:Diary", "args": {"file": "x"}}
    assert recipe({"callbacks": [named]}).model_dump()["callbacks"] == (named,)
