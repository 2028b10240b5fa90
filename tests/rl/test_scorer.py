"""Scoring in processes of its own: what a bad reward costs, and what it does not."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from eventually import eventually
from headway.errors import HeadwayError, WorkerError
from headway.recipe.rl import Rl
from headway.rl.groups import after_failure
from headway.rl.rewards import Answer
from headway.rl.rewards.value import checked
from headway.rl.rollout import AnswerScore
from headway.rl.scorer import Scorer, combine
from headway.rl.scorer_pipe import wait_for_pipes
from headway.rl.scorer_process import LimitedText, score
from headway.track.process_state import process_state

SCORES = """
import sys
from headway.recipe.rl import Rl
from headway.rl.rewards import Answer
from headway.rl.scorer import Scorer
scorer = Scorer(Rl(rewards="own_rewards:act", reward_timeout_s=3600, reward_workers=1))
scorer.submit(Answer("pid", "", {}, 1, "stop"))
print(int(scorer.wait()[0].reward), flush=True)
scorer.submit(Answer("hang", "", {}, 1, "stop"))
sys.stdin.read()
"""


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def own_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.fixture(scope="module")
def scorer() -> Iterator[Scorer]:
    """One for all tests that leave its processes alive: each start costs CPU time."""
    sys.path.insert(0, str(Path(__file__).parent))
    with Scorer(section("own_rewards:act", {"name": "own_rewards:length", "weight": 0.5})) as shared:
        yield shared
    sys.path.remove(str(Path(__file__).parent))


def section(*rewards: Any, **settings: Any) -> Rl:
    return Rl(rewards=rewards, **{"reward_timeout_s": 600.0, "reward_workers": 1, **settings})


def answer(text: str, **fields: Any) -> Answer:
    return Answer(text, "a prompt", fields, 3, "stop")


def test_scores_are_weighted_sums_in_the_order_of_answers(scorer: Scorer) -> None:
    places = []
    scores = scorer.score([answer("x" * length) for length in range(20)], lambda place, _score: places.append(place))
    assert [score.reward for score in scores] == [1 + length / 2 for length in range(20)]
    assert scores[3].terms == {"own_rewards:act": 1.0, "own_rewards:length": 3.0}
    assert sorted(places) == list(range(20))
    assert all(score.error is None for score in scores)


def test_answers_are_scored_while_others_are_still_generated(scorer: Scorer) -> None:
    first = scorer.submit(answer("a"))
    assert first in eventually(scorer.poll)
    numbers = [scorer.submit(answer("b" * length)) for length in range(5)]
    assert numbers == list(range(first + 1, first + 6))
    scores = scorer.wait()
    assert list(scores) == numbers
    assert scorer.pending == 0
    assert scorer.wait() == {}


def test_a_poll_waits_only_for_a_score_that_is_to_come(scorer: Scorer) -> None:
    assert scorer.poll(1e6) == {}
    number = scorer.submit(answer("first"))
    while not (scores := scorer.poll(1e6)):
        pass
    assert list(scores) == [number]
    number = scorer.submit(answer("second"))

    def arrived() -> bool:
        scorer._pool.advance(0)
        return not scorer.pending

    assert eventually(arrived)
    assert list(scorer.poll(1e6)) == [number]
    assert scorer.poll(1e6) == {}


def test_a_reward_that_raises_is_worth_nothing_and_its_traceback_is_kept(scorer: Scorer) -> None:
    good, bad, left = scorer.score([answer("ok"), answer("raise"), answer("exit")])
    assert good.error is None
    assert bad.terms == {"own_rewards:act": 0.0, "own_rewards:length": 5.0}
    assert bad.reward == 2.5
    assert bad.error is not None
    assert 'in act\n    raise ValueError("no good")\nValueError: no good' in bad.error
    assert "scorer_process" not in bad.error
    assert left.error is not None
    assert left.error.endswith("SystemExit: 0")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nan", "own_rewards:act: returned nan (float), which is not finite"),
        ("text", "own_rewards:act: returned '1.0' (str), which is no number"),
    ],
)
def test_a_value_that_is_no_finite_number_is_named(scorer: Scorer, text: str, message: str) -> None:
    (bad,) = scorer.score([answer(text)])
    assert bad.error == message
    assert bad.terms["own_rewards:act"] == 0.0


def test_printing_reaches_neither_the_scores_nor_the_log_without_limit(scorer: Scorer) -> None:
    assert [score.error for score in scorer.score([answer("print"), answer("ok"), answer("print")])] == [None] * 3


def test_rewards_run_without_torch(scorer: Scorer) -> None:
    (imported,) = scorer.score([answer("path")])
    assert imported.terms["own_rewards:act"] == 0.0


def test_fields_arrive_as_json_has_them(scorer: Scorer) -> None:
    """Also large ones, which do not fit into a pipe at once, and half a surrogate pair from a cut token."""
    large = Answer("\ud83d" * 10, "p" * 500_000, {"day": Path("x"), "many": ["y"] * 200_000}, 1, "length")
    assert [score.terms["own_rewards:length"] for score in scorer.score([large, answer("abc"), large])] == [10, 3, 10]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("die", "own_rewards:act: its process ended with exit status 3"),
        pytest.param("crash", "own_rewards:act: its process was killed by SIGSEGV", marks=pytest.mark.slow),
    ],
)
def test_a_reward_that_ends_its_process_costs_its_term_of_one_answer(text: str, message: str) -> None:
    with Scorer(section("own_rewards:act", "own_rewards:length")) as scorer:
        scores = scorer.score([answer("ok"), answer(text), answer("ok"), answer("fine")])
    assert [score.error for score in scores] == [None, message, None, None]
    assert scores[1].terms == {"own_rewards:act": 0.0, "own_rewards:length": float(len(text))}
    assert [score.reward for score in scores] == [3.0, float(len(text)), 3.0, 5.0]


def test_a_reward_that_hangs_is_stopped_with_what_it_started(tmp_path: Path) -> None:
    clock = Clock()
    with Scorer(section("own_rewards:act", reward_timeout_s=10), clock=clock) as scorer:
        file = tmp_path / "child"
        scorer.submit(answer("child", file=str(file)))
        scorer.submit(answer("ok"))
        child = int(eventually(lambda: scorer.poll() or (file.exists() and file.read_text())))
        clock.now += 10.5
        hung, fine = scorer.wait().values()
        eventually(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)
    assert hung == AnswerScore(
        0.0, {"own_rewards:act": 0.0}, "own_rewards:act: took longer than rl.reward_timeout_s = 10 and was stopped"
    )
    assert fine == AnswerScore(1.0, {"own_rewards:act": 1.0})


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_answer_whose_process_was_killed_or_stopped_is_scored_once_more(tmp_path: Path, number: int) -> None:
    """What happened to the process says nothing of the answer; the others that it held were not begun."""
    clock, file = Clock(), tmp_path / "pid"
    with Scorer(section("own_rewards:length", "own_rewards:act", reward_timeout_s=10), clock=clock) as scorer:
        for text in ("hang-once", "ok", "ok"):
            scorer.submit(answer(text, file=str(file)))
        pid = int(eventually(lambda: scorer.poll() or (file.exists() and file.read_text())))
        os.kill(pid, number)
        if number == signal.SIGSTOP:
            eventually(lambda: process_state(pid) == "T")
            clock.now += 10.5
        scores = scorer.wait()
    assert [score.error for score in scores.values()] == [None] * 3
    assert [score.reward for score in scores.values()] == [10.0, 3.0, 3.0]


def test_an_answer_whose_process_is_killed_every_time_has_no_score() -> None:
    """As one has whose reward takes so much memory that the kernel kills it."""
    killed = set[int]()
    with Scorer(section("own_rewards:act")) as scorer:
        scorer.submit(answer("hang"))

        def kill_and_poll() -> dict[int, AnswerScore]:
            for pid in set(scorer.busy()) - killed:
                killed.add(pid)
                os.kill(pid, signal.SIGKILL)
            return scorer.poll()

        (score,) = eventually(kill_and_poll).values()
    assert len(killed) == 2
    assert score.error == "own_rewards:act: its process was killed by SIGKILL"


def test_a_score_that_arrived_counts_however_late_it_is_read() -> None:
    clock = Clock()
    with Scorer(section("own_rewards:act"), clock=clock) as scorer:
        scorer.score([answer("ok")])
        scorer.submit(answer("ok"))
        if scorer.pending:  # submit() itself reads what is there
            wait_for_pipes([scorer._pool.workers[0].pipe], 300)
        clock.now = 1e6
        assert [score.error for score in scorer.wait().values()] == [None]


def test_a_reward_that_cannot_be_loaded_stops_the_run() -> None:
    with Scorer(section("own_rewards:lenght")) as scorer, pytest.raises(WorkerError, match="has no lenght") as raised:
        scorer.score([answer("ok")])
    assert raised.value.hint is not None
    assert "length" in raised.value.hint
    assert raised.value.usage


def test_no_process_starts_before_the_first_answer_and_none_outlives_close() -> None:
    scorer = Scorer(section("own_rewards:act", reward_workers=2))
    assert not scorer._pool.workers
    scorer.submit(answer("hang"))
    (pid,) = [worker.pipe.pid for worker in scorer._pool.workers]
    scorer.close()
    assert not psutil.pid_exists(pid)
    scorer.close()


def test_a_process_dies_with_a_killed_parent_even_while_a_reward_hangs() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", SCORES],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
    )
    assert parent.stdout is not None
    process = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate()
    eventually(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)


def test_ctrl_c_reaches_no_scorer_process(scorer: Scorer) -> None:
    (before,) = scorer.score([answer("pid")])
    os.kill(int(before.terms["own_rewards:act"]), signal.SIGINT)
    (after,) = scorer.score([answer("pid")])
    assert before == after


def test_values_are_checked() -> None:
    assert checked(True) == 1.0
    assert checked(3) == 3.0

    class Unprintable:
        def __repr__(self) -> str:
            raise ValueError

    for value, words in [
        (None, "None"), (10**5000, "not finite"), (2e9, "at most 1e\\+09"), (float("-inf"), "-inf"),
        (Unprintable(), "a value \\(Unprintable"), ("x" * 1000, "xx\\.\\.\\."), (1j, "no number"),
    ]:  # fmt: skip
        with pytest.raises(HeadwayError, match=words):
            checked(value)


@pytest.mark.parametrize("scalar", [torch.tensor(0.5, requires_grad=True), np.array(0.5), np.float32(0.5)])
def test_scalars_of_array_libraries_are_numbers(scalar: Any) -> None:
    assert checked(scalar) == 0.5


@pytest.mark.parametrize("value", [torch.tensor([0.5]), np.array("0.5"), torch.tensor(1j), torch.Tensor])
def test_other_values_of_array_libraries_are_no_numbers(value: Any) -> None:
    with pytest.raises(HeadwayError, match="which is no number"):
        checked(value)


def test_long_tracebacks_are_shortened() -> None:
    def fails(answer: Answer) -> float:
        raise ValueError("x" * 100_000 + "the end")

    (message,) = score([(fails, {})], [0], answer(""))
    assert len(message["error"]) < 9000
    assert message["error"].endswith("the end")


def test_limited_text_passes_on_the_beginning(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("w") as file:
        stream = LimitedText(file, most=10)
        for _ in range(5):
            print("1234567", file=stream)
    assert path.read_text() == "1234567\n12\n[what rewards print from here on is dropped]\n"


def test_policies_of_failed_rewards() -> None:
    whole, failed = AnswerScore(1.0, {"a": 1.0}), AnswerScore(0.0, {"a": 0.0}, "a: Traceback\n  File\nValueError: no")
    for policy in ("zero", "leave-out", "stop"):
        assert after_failure(whole, policy, "answer 1") is whole
    assert after_failure(failed, "zero", "answer 1") is failed
    assert after_failure(failed, "leave-out", "answer 1") is None
    with pytest.raises(WorkerError, match="the reward of answer 1 of prompt 7 failed: ValueError: no"):
        after_failure(failed, "stop", "answer 1 of prompt 7")


def test_weights_may_be_negative() -> None:
    rl = section("math", {"name": "own:length", "weight": -0.25})
    assert combine(rl, {"math": 1.0, "own:length": 2.0}) == AnswerScore(0.5, {"math": 1.0, "own:length": 2.0})
    assert replace(combine(rl, {"math": 0.0, "own:length": 0.0}), error="x").error == "x"
