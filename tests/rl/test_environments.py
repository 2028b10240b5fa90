"""Environments in processes of their own: what comes back, and what a bad one costs."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.errors import RecipeError, WorkerError
from headway.recipe.rl import Rl
from headway.rl.check import check_rl
from headway.rl.environment_pool import EnvironmentPool, TurnResult
from headway.rl.environments import Reply, Turn
from headway.rl.rollout import AnswerScore
from headway.rl.scorer import Scorer, with_environment


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def own_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.fixture(scope="module")
def acts() -> Iterator[EnvironmentPool]:
    """One for all tests that leave its process alive."""
    sys.path.insert(0, str(Path(__file__).parent))
    pool = EnvironmentPool(section("Acts"))
    yield pool
    pool.close()
    sys.path.remove(str(Path(__file__).parent))


def section(name: str = "Acts", **settings: Any) -> Rl:
    return Rl(environment=f"own_environments:{name}", **{"reward_timeout_s": 600.0, "reward_workers": 1, **settings})


def turn(text: str, state: Any = None, **fields: Any) -> Turn:
    return Turn(text, 1, "a prompt", fields, state)


def results(pool: EnvironmentPool, *turns: Turn) -> list[TurnResult]:
    numbers = [pool.submit(one_turn) for one_turn in turns]
    done = dict[int, TurnResult]()
    while len(done) < len(numbers):
        done |= pool.poll(600)
    return [done[number] for number in numbers]


def test_replies_come_back_with_their_state_and_reward(acts: EnvironmentPool) -> None:
    (first,) = results(acts, turn("a", day="monday"))
    assert first.reply == Reply("a", [], state={"before": None, "fields": {"day": "monday"}}, reward=0.5)
    (second,) = results(acts, turn("b", state=first.reply.state))
    assert second.reply is not None
    assert second.reply.state["before"] == first.reply.state


def test_many_answers_are_replied_to_at_once(acts: EnvironmentPool) -> None:
    replies = [result.reply for result in results(acts, *(turn(f"t{number}") for number in range(50)))]
    assert [reply.text for reply in replies if reply is not None] == [f"t{number}" for number in range(50)]


def test_an_environment_runs_without_torch(acts: EnvironmentPool) -> None:
    (result,) = results(acts, turn("torch"))
    assert result.reply is not None
    assert result.reply.text == "False"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("flood", "the reply's text has 10,000,000 characters, more than 100,000"),
        ("state", "the reply's state has 3,000,000 characters as JSON, more than 100,000"),
        ("object", "the reply's state cannot be JSON: Object of type object is not JSON serializable"),
        ("none", "returned None (NoneType), which is no Reply; from headway.rl.environments import Reply"),
        ("empty", "the reply is empty, but not done; Reply(done=True) ends the answer"),
        ("both", "the reply has both a text and messages; use one of them"),
        ("messages", 'the reply\'s messages are [\'x\'] (list); {"role": "tool", "content": "4"}'),
        ("nan", "returned nan (float), which is not finite"),
    ],
)
def test_a_wrong_reply_is_named_and_others_go_on(acts: EnvironmentPool, text: str, message: str) -> None:
    bad, good = results(acts, turn(text), turn("fine"))
    assert bad == TurnResult(None, message)
    assert good.reply is not None


def test_a_traceback_begins_in_the_environment(acts: EnvironmentPool) -> None:
    (bad,) = results(acts, turn("raise"))
    assert bad.error is not None
    assert 'in reply\n    raise ValueError("no good")\nValueError: no good' in bad.error
    assert "scorer_process" not in bad.error


def test_what_it_prints_reaches_no_reply(acts: EnvironmentPool) -> None:
    before, _, after = results(acts, turn("pid"), turn("print"), turn("pid"))
    assert before == after


def test_a_process_that_hangs_or_dies_costs_its_own_turn_and_no_state() -> None:
    clock = Clock()
    pool = EnvironmentPool(section(reward_timeout_s=10), clock=clock)
    (first,) = results(pool, turn("a"))
    assert first.reply is not None
    waiting = {pool.submit(turn("hang")): "hang", pool.submit(turn("b", state=first.reply.state)): "b"}
    assert pool.poll() == {}
    clock.now += 11
    done = dict[int, TurnResult]()
    while len(done) < len(waiting):
        done |= pool.poll(600)
    hung, other = done.values()
    assert hung == TurnResult(None, "took longer than rl.reward_timeout_s = 10 and was stopped")
    assert other.reply is not None
    assert other.reply.state["before"] == first.reply.state
    dead, last = results(pool, turn("die"), turn("c"))
    assert dead.error == "its process ended with exit status 3"
    assert last.reply is not None
    pool.close()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Refuses", "own_environments:Refuses with environment_args failed: RuntimeError: no licence"),
        ("Silent", "own_environments:Silent, which has no method reply"),
        ("Calculater", "own_environments has no Calculater"),
    ],
)
def test_an_environment_that_cannot_be_used_stops_the_run(name: str, message: str) -> None:
    pool = EnvironmentPool(section(name))
    with pytest.raises(WorkerError, match=message) as raised:
        results(pool, turn("a"))
    assert raised.value.usage
    pool.close()


def test_a_missing_environment_is_found_before_the_run() -> None:
    check_rl(section("Calculator"))
    with pytest.raises(RecipeError, match=r"own_environments\.py has no Calculater"):
        check_rl(section("Calculater"))


def test_rewards_are_needed_without_an_environment() -> None:
    assert section().rewards == ()
    with pytest.raises(ValueError, match="rewards is empty"):
        Rl()


def test_what_the_environment_gives_is_one_more_term() -> None:
    given = AnswerScore(0.5, {"environment": 0.5}, "environment: Traceback\nValueError: no")
    scored = AnswerScore(2.0, {"math": 1.0}, "math: TypeError")
    joined = with_environment(scored, given)
    assert (joined.reward, joined.terms) == (2.5, {"math": 1.0, "environment": 0.5})
    assert joined.error == "environment: Traceback\nValueError: no\nmath: TypeError"
    assert with_environment(scored, None) is scored


def test_without_rewards_an_answer_scores_nothing_and_starts_no_process() -> None:
    from headway.rl.rewards import Answer

    scorer = Scorer(section())
    assert scorer.score([Answer("x", "", {}, 1, "stop")] * 3) == [AnswerScore(0.0, {})] * 3
    assert not scorer._pool.workers
