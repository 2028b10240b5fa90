"""`headway rl` on rollouts that were written by hand, without a model."""

import io
import json
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from chat_models import byte_tokenizer
from headway.cli import rl
from headway.cli.main import main
from headway.cli.rl_view import step_ranges, token_in_context
from headway.recipe import Recipe
from headway.rl.rollout import AnswerScore, Rollout
from headway.rl.rollout_files import BatchHeader, RolloutBatch, RolloutFiles, to_lines
from headway.track import START, RunFolder, create_run, write_json

TRACEBACK = (
    'Traceback (most recent call last):\n  File "own.py", line 3, in exact\n'
    f"    return exact({'a' * 60})\n           ~~~~~{'^' * 62}\n"
    'KeyError: "target"\n'
)
REWARDS = [{"name": "regex", "weight": 1.0, "args": {"pattern": "[0-9]+"}}, {"name": "json", "weight": 0.5}]


class Done(NamedTuple):
    """What a command printed, and its exit status."""

    returncode: int
    stdout: str
    stderr: str


def headway(*words: object) -> Done:
    out, err, status = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["headway", *map(str, words)])
        try:
            main()
        except SystemExit as ended:
            status = int(ended.code or 0)
    return Done(status, out.getvalue(), err.getvalue())


def rollout(sample: int, answer: int, reward: float, error: str | None = None, length: int = 5) -> Rollout:
    tokenizer = byte_tokenizer()
    text = f"{sample}{answer}" * 40 if length > 5 else f"answer {answer} to {sample}"
    return Rollout(
        prompt=100 + sample, sample=sample, answer=answer, prompt_ids=tuple(tokenizer.encode(f"ask {sample}").tolist()),
        token_ids=tuple(range(30, 30 + length)), logprobs=(-0.5,) * length, written=((0, length),),
        finish="length" if length > 5 else "stop", version=0, text=text,
        score=AnswerScore(reward, {"regex": reward, "json": 0.0}, error),
    )  # fmt: skip


GROUPS = [
    rollout(0, 0, 1.0), rollout(0, 1, 0.0), rollout(0, 2, 0.0, length=9), rollout(0, 3, 1.0),
    *(rollout(1, answer, 1.0) for answer in range(4)),
    *(rollout(2, answer, 0.0) for answer in range(3)), rollout(2, 3, 0.0, TRACEBACK),
]  # fmt: skip


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunFolder]:
    """Makes a run with a batch of rollouts for each of some steps: four answers to three prompts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEADWAY_RUNS", raising=False)

    def make(steps: tuple[int, ...] = (1, 2), kind: str = "grpo", **rl: Any) -> RunFolder:
        run = create_run(Path("runs"), "policy", "policy")
        recipe = {
            "name": "policy",
            "objective": {"kind": kind},
            "data": {"path": "prompts", "seq": 64},
            "train": {"steps": 8, "batch": 3},
            "rl": {"samples": 4, "max_tokens": 9, "rewards": REWARDS, **rl},
        }
        if kind == "pretrain":
            del recipe["rl"]
        write_json(run.recipe_file, Recipe.model_validate(recipe).model_dump())
        run.tokenizer_file.write_bytes(byte_tokenizer().to_bytes())
        for step in steps:
            header = BatchHeader(step, step - 1, START if step == 1 else f"{step:032x}", 3 * (step - 1))
            RolloutFiles(run).finish(RolloutBatch(header, 3 * step, tuple(GROUPS)))
        return run

    return make


def test_samples_show_the_last_batch_with_rewards_and_advantages(make_run, monkeypatch) -> None:
    make_run()
    monkeypatch.setenv("COLUMNS", "80")
    done = headway("rl", "samples", "policy")
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert max(map(len, lines)) <= 80
    assert lines[:3] == [
        "batch of step 2: 3 groups, 12 answers, sampled with the weights of step 1",
        "reward 0.5 (regex 0.5, json 0), pass@4 0.6667",
        "length 5.333 (5 to 9), truncated 8%, zero variance in 2 groups, 1 failed",
    ]
    assert "group 0, sample 0, prompt 100, step 2" in lines
    assert "prompt  ask 0" in lines
    assert " +0.87  answer 0: reward 1 (regex 1, json 0), stop, 5 tokens" in lines
    assert " -0.87  answer 1: reward 0 (regex 0, json 0), stop, 5 tokens" in lines
    assert "     0  answer 0: reward 1 (regex 1, json 0), stop, 5 tokens" in lines
    assert "failed  Traceback (most recent call last):" in lines
    code = lines.index(f"            return exact({'a' * 55}")
    assert lines[code + 1 : code + 3] == ["        aaaaa)", '        KeyError: "target"'], "and no carets"
    assert '        KeyError: "target"' in lines


def test_samples_as_json_have_everything(make_run) -> None:
    make_run()
    document = json.loads(headway("rl", "samples", "policy", "--step", 1, "--json").stdout)
    assert (document["step"], document["version"], document["finished"]) == (1, 0, True)
    assert (document["groups_total"], document["answers_total"], document["failed_total"]) == (3, 12, 1)
    assert document["metrics"]["reward/regex"] == 0.5
    answers = [answer for group in document["groups"] for answer in group["answers"]]
    assert [answer["reward"] for answer in answers] == [r.score.reward for r in GROUPS if r.score]
    assert [answer["logprobs"] for answer in answers] == [list(r.logprobs) for r in GROUPS]
    assert [answer["token_ids"] for answer in answers] == [list(r.token_ids) for r in GROUPS]
    assert answers[-1]["error"] == TRACEBACK
    assert document["groups"][1]["prompt_text"] == "ask 1"


def test_failed_shows_only_answers_whose_reward_failed(make_run) -> None:
    make_run()
    done = headway("rl", "samples", "policy", "--failed")
    assert "group 2" in done.stdout
    assert "group 0" not in done.stdout
    assert "answer 3:" in done.stdout
    assert "answer 2:" not in done.stdout
    groups = json.loads(headway("rl", "samples", "policy", "--failed", "--json").stdout)["groups"]
    assert [[answer["answer"] for answer in group["answers"]] for group in groups] == [[3]]


def test_group_and_limit_choose_what_is_shown(make_run) -> None:
    make_run()
    whole = headway("rl", "samples", "policy", "--limit", 1).stdout
    assert "group 0" in whole
    assert "2 more groups" in whole
    alone = headway("rl", "samples", "policy", "--group", 1).stdout
    assert "group 1" in alone
    assert "group 0" not in alone
    done = headway("rl", "samples", "policy", "--group", 3)
    assert done.returncode == 2
    assert "the batch has no group 3" in done.stderr
    assert "0 to 2" in done.stderr


def test_left_out_groups_and_answers_are_marked(make_run) -> None:
    make_run(dynamic_sampling=True, mask_truncated=True)
    done = headway("rl", "samples", "policy")
    assert "group 0, sample 0, prompt 100, step 2" in done.stdout
    assert "group 1, sample 1, prompt 101, left out" in done.stdout
    marked = [line for line in done.stdout.splitlines() if line.endswith("not in the loss")]
    assert [line.split(":")[0] for line in marked] == [" -0.87  answer 2"]


def test_a_batch_of_several_steps_is_found_by_each_of_them(make_run) -> None:
    make_run((1, 4), updates=3)
    for step in (4, 5, 6):
        document = json.loads(headway("rl", "samples", "policy", "--step", step, "--json").stdout)
        assert document["step"] == 4
    assert [group["step"] for group in document["groups"]] == [4, 5, 6]
    done = headway("rl", "samples", "policy", "--step", 7)
    assert done.returncode == 2
    assert "no rollouts of step 7" in done.stderr
    assert "it has those of steps 1 to 6" in done.stderr


def test_an_unfinished_batch_shows_the_reward_that_stopped_the_run(make_run) -> None:
    run = make_run((1,), if_reward_fails="stop")
    with RolloutFiles(run).open_part(BatchHeader(2, 1, "c" * 32, 3), "0") as part:
        for each in GROUPS[-4:]:
            part.add(each)
    done = headway("rl", "samples", "policy", "--failed")
    assert "batch of step 2, unfinished: 1 group, 4 answers" in done.stdout
    assert "group 0, sample 2, prompt 102, batch not finished" in done.stdout
    assert 'KeyError: "target"' in done.stdout
    assert "batch of step 1:" in headway("rl", "samples", "policy", "--step", 1).stdout


@pytest.mark.parametrize("verb", ["samples", "mismatch", "replay"])
def test_runs_without_rollouts_are_named(verb: str, make_run) -> None:
    make_run(())
    done = headway("rl", verb, "policy", "--step", 1)
    assert done.returncode == 2
    assert "run policy has no rollouts yet" in done.stderr


def test_runs_of_other_objectives_are_refused(make_run) -> None:
    make_run((), kind="pretrain")
    done = headway("rl", "samples", "policy")
    assert done.returncode == 2
    assert "run policy has objective pretrain: it sampled no answers" in done.stderr


@pytest.mark.parametrize("verb", ["mismatch", "replay"])
def test_steps_without_weights_say_which_have_them(verb: str, make_run) -> None:
    make_run((1, 2, 3))
    done = headway("rl", verb, "policy", "--step", 3)
    assert done.returncode == 2
    assert "no checkpoint of step 2, whose weights sampled the rollouts of step 3" in done.stderr
    assert "there are rollouts and their weights for step 1;" in done.stderr
    assert "checkpoint.every_steps" in done.stderr


@pytest.mark.parametrize("verb", ["mismatch", "replay"])
def test_the_last_batch_whose_weights_are_kept_is_the_default(verb: str, make_run, monkeypatch) -> None:
    run, asked = make_run((1, 2, 3)), list[dict[str, Any]]()

    def answer(folder: RunFolder, request: dict[str, Any]) -> list[dict[str, Any]]:
        asked.append(request)
        rows = [json.loads(line) for line in to_lines(GROUPS).splitlines()]
        of_trainer = [{key: row[key] for key in ("sample", "answer", "logprobs")} for row in rows]
        return [{"ready": {}}, *(of_trainer if verb == "mismatch" else ({"rollout": row} for row in rows))]

    monkeypatch.setattr(rl, "_messages", answer)
    monkeypatch.setattr(rl, "_drawn", lambda *_: [])
    done = headway("rl", verb, "policy", "--json")
    assert done.returncode == 0, done.stderr
    assert (json.loads(done.stdout)["step"], asked[0]["step"], asked[0]["version"]) == (1, 1, 0)

    RolloutFiles(run).path(1).unlink()  # no weights are left: the last batch says so
    done = headway("rl", verb, "policy")
    assert done.returncode == 2
    assert "no checkpoint of step 2, whose weights sampled the rollouts of step 3" in done.stderr


def test_replay_without_the_prompts_says_where_they_were(make_run) -> None:
    make_run()
    done = headway("rl", "replay", "policy", "--step", 1)
    assert done.returncode == 2
    assert "the prompts of run policy are needed to sample answers again" in done.stderr
    assert "prompts" in done.stderr


def test_steps_are_written_as_ranges() -> None:
    assert step_ranges([4], 1) == "step 4"
    assert step_ranges([1, 2, 3, 7], 1) == "steps 1 to 3, 7"
    assert step_ranges([1, 5], 4) == "steps 1 to 8"
    assert step_ranges([5], 4) == "steps 5 to 8"


def test_a_token_stands_between_its_neighbours() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("2+3=5, 4+4=8").tolist()
    answer = replace(GROUPS[0], prompt_ids=tuple(ids[:4]), token_ids=tuple(ids[4:]))
    assert token_in_context(answer, 0, tokenizer) == "2+3=[5], 4+4=..."
    assert token_in_context(answer, 6, tokenizer) == "...5, 4+4[=]8"
