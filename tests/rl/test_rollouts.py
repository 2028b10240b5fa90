"""Rollouts: files that survive a kill, packing without loss, and groups that count what they should."""

import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.data.loader import MASKED
from headway.errors import RunError, WorkerError
from headway.recipe.policy import PolicyGradient
from headway.recipe.rl import Rl
from headway.rl.groups import advantages_of, chosen, failed_for_all, failure_note, groups_of, metrics_of, shares
from headway.rl.packing import best_fit, pack_answers, per_answer, per_token, token_divergences
from headway.rl.rollout import AnswerScore, Rollout
from headway.rl.rollout_files import BatchHeader, RolloutBatch, RolloutFiles, from_lines, to_lines
from headway.track import RunFolder

HEADER = BatchHeader(step=3, version=2, chain="c0ffee", cursor=8)


def rl(**settings) -> Rl:
    return Rl(rewards=["math"], **settings)


def rollout(sample: int, answer: int, reward: float = 0.0, *, prompt=(1, 2), ids=(3, 4), error=None, **more) -> Rollout:
    logprobs = tuple(np.float32(-0.1 * (i + 1)).item() for i in range(len(ids)))
    score = AnswerScore(reward, {"math": reward}, error)
    fields = {"finish": "stop", "version": 2, "text": "x", "score": score, "written": ((0, len(ids)),)} | more
    return Rollout(
        prompt=7, sample=sample, answer=answer, prompt_ids=prompt, token_ids=ids, logprobs=logprobs, **fields
    )


def random_rollouts(seed: int, count: int, seq: int) -> list[Rollout]:
    numbers = random.Random(seed)
    made = []
    for sample in range(count):
        length = numbers.randint(1, seq - 1)
        prompt = tuple(numbers.randint(1, 99) for _ in range(numbers.randint(1, length)))
        ids = tuple(numbers.randint(1, 99) for _ in range(length - len(prompt) + 2))
        middle = numbers.randint(0, len(ids))
        made.append(
            rollout(sample, 0, numbers.random(), prompt=prompt, ids=ids, written=((0, middle), (middle, len(ids))))
        )
    return made


# -- files


def test_what_suspect_weights_sampled_is_discarded_and_nothing_else(tmp_path: Path) -> None:
    files = RolloutFiles(RunFolder(tmp_path))
    headers = [BatchHeader(step, version, "c0ffee", 0) for step, version in ((1, 0), (3, 2), (5, 2), (7, 4), (9, 6))]
    for header in headers[:4]:
        files.finish(RolloutBatch(header, 12, (rollout(0, 0),)))
        files.store_scores(header, 0, {"proximal": np.zeros((1, 2), dtype=np.float32)})
    with files.open_part(headers[4], "1") as part:
        part.add(rollout(0, 0))
    files.discard(3)
    assert files.steps() == [1, 3, 5]
    assert files.read_scores(headers[2], 0, ["proximal"], (1, 2)) is not None
    assert files.unfinished() == {}
    files.discard(0)
    assert [*(tmp_path / "rollouts").iterdir()] == []


def test_equal_scores_are_equal_files(tmp_path: Path) -> None:
    files, columns = RolloutFiles(RunFolder(tmp_path)), {"proximal": np.ones((1, 3), np.float32)}
    columns["reference"] = 2 * columns["proximal"]
    (tmp_path / "rollouts").mkdir()
    for share in range(20):
        files.store_scores(HEADER, share, columns)
    assert len({path.read_bytes() for path in (tmp_path / "rollouts").glob("*.safetensors")}) == 1
    stored = files.read_scores(HEADER, 19, [*columns], (1, 3))
    assert stored is not None
    assert all(np.array_equal(stored[name], values) for name, values in columns.items())


def test_a_finished_batch_is_read_as_it_was_written(tmp_path: Path) -> None:
    files = RolloutFiles(RunFolder(tmp_path))
    batch = RolloutBatch(HEADER, 12, tuple(random_rollouts(0, 5, 20)))
    files.finish(batch)
    assert files.read(3) == batch
    assert files.read(4) is None
    assert files.steps() == [3]


def test_a_finished_batch_has_its_own_rollouts_not_those_that_were_appended_in_their_place(tmp_path: Path) -> None:
    """Lines that were appended are written again only for the same rollouts: others may have come since."""
    files, plain = (RolloutFiles(RunFolder(tmp_path / name)) for name in ("appended", "plain"))
    for name in ("appended", "plain"):
        (tmp_path / name).mkdir()
    appended = random_rollouts(0, 5, 20)
    with files.open_part(HEADER, "0") as part:
        for one in appended:
            part.add(one)
    changed = dataclasses.replace(appended[2], score=AnswerScore(0.5, {"math": 0.5}))
    batch = RolloutBatch(HEADER, 12, (*appended[:2], changed, *appended[3:], rollout(5, 0)))
    files.finish(batch)
    plain.finish(batch)
    assert files.read(3) == batch
    assert files.path(3).read_bytes() == plain.path(3).read_bytes()


def test_what_was_scored_before_a_kill_is_found_again_whatever_the_last_line(tmp_path: Path) -> None:
    """The file is cut at every byte: only whole rollouts are read, and appending goes on after them."""
    files = RolloutFiles(RunFolder(tmp_path))
    first, second, third = (rollout(sample, 0, 1.0) for sample in range(3))
    with files.open_part(HEADER, "0") as part:
        part.add(first)
        part.add(second)
    [path] = (tmp_path / "rollouts").iterdir()
    whole = path.read_bytes()
    ends = [number + 1 for number, byte in enumerate(whole) if byte == ord("\n")]
    for cut in [*range(0, len(whole), 7), *ends, *(end - 1 for end in ends)]:
        path.write_bytes(whole[:cut])
        kept = [one for end, one in zip(ends[1:], (first, second), strict=True) if cut >= end]
        assert list(files.read_parts(HEADER).values()) == (kept if cut >= ends[0] else [])
        with files.open_part(HEADER, "0") as part:
            part.add(third)
        assert files.read_parts(HEADER)[2, 0] == third
        assert len(files.read_parts(HEADER)) == len(kept) + 1


@pytest.mark.parametrize("change", [{"chain": "other"}, {"version": 1}, {"cursor": 9}])
def test_rollouts_of_other_weights_or_another_place_are_not_taken(tmp_path: Path, change: dict) -> None:
    files = RolloutFiles(RunFolder(tmp_path))
    with files.open_part(HEADER, "0") as part:
        part.add(rollout(0, 0))
    other = dataclasses.replace(HEADER, **change)
    assert files.read_parts(other) == {}
    with files.open_part(other, "0") as part:
        part.add(rollout(1, 0))
    assert list(files.read_parts(other)) == [(1, 0)]
    assert files.read_parts(HEADER) == {}


def test_a_batch_without_its_end_is_no_batch(tmp_path: Path) -> None:
    files = RolloutFiles(RunFolder(tmp_path))
    files.finish(RolloutBatch(HEADER, 12, (rollout(0, 0),)))
    lines = files.path(3).read_text().splitlines(keepends=True)
    files.path(3).write_text("".join(lines[:-1]))
    assert files.read(3) is None
    files.path(3).write_text("{not json}\n")
    with pytest.raises(RunError, match="damaged"):
        files.read(3)


def test_scores_are_those_of_their_batch(tmp_path: Path) -> None:
    files = RolloutFiles(RunFolder(tmp_path))
    files.finish(RolloutBatch(HEADER, 12, ()))
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    files.store_scores(HEADER, 0, {"proximal": values})
    assert np.array_equal(files.read_scores(HEADER, 0, {"proximal"}, (2, 3))["proximal"], values)
    assert files.read_scores(HEADER, 0, {"proximal"}, (3, 3)) is None
    assert files.read_scores(HEADER, 0, {"reference_logprobs"}, (2, 3)) is None
    assert files.read_scores(HEADER, 1, {"proximal"}, (2, 3)) is None
    assert files.read_scores(dataclasses.replace(HEADER, chain="x"), 0, {"proximal"}, (2, 3)) is None
    assert files.read_scores(HEADER, 1, set(), (2, 3)) == {}


def test_pruning_keeps_what_a_checkpoint_may_need(tmp_path: Path) -> None:
    files = RolloutFiles(RunFolder(tmp_path))
    for step in range(1, 9):
        files.finish(RolloutBatch(dataclasses.replace(HEADER, step=step), 12, ()))
    files.prune(2, needed_from=6)
    assert files.steps() == [4, 5, 6, 7, 8]


@given(st.integers(0, 1000))
def test_rollouts_travel_as_lines(seed: int) -> None:
    rollouts = random_rollouts(seed, 4, 12)
    assert from_lines(to_lines(rollouts)) == rollouts


# -- packing


@given(st.lists(st.integers(1, 30), max_size=40))
def test_every_answer_is_in_one_row_that_has_room(lengths: list[int]) -> None:
    rows = best_fit(lengths, 30)
    assert sorted(member for row in rows for member in row) == list(range(len(lengths)))
    assert all(sum(lengths[member] for member in row) <= 30 for row in rows)
    # No two rows of a best fit are both at most half full.
    assert sum(sum(lengths[member] for member in row) <= 15 for row in rows) <= 1


@given(st.integers(0, 1000), st.integers(1, 3))
def test_packed_rows_hold_each_answer_once_and_train_on_what_the_model_wrote(seed: int, multiple: int) -> None:
    seq = 24
    rollouts = random_rollouts(seed, 6, seq)
    packed = pack_answers(rollouts, seq, multiple)
    batch = packed.batch
    assert len(batch.inputs) % multiple == 0
    assert batch.trained == sum(len(one.token_ids) for one in rollouts)
    for one, (row, span) in zip(rollouts, packed.spans, strict=True):
        ids, first = [*one.prompt_ids, *one.token_ids], span.start - len(one.prompt_ids) + 1
        assert batch.labels[row, span].tolist() == list(one.token_ids)
        here = slice(first, first + len(ids) - 1)
        assert batch.inputs[row, here].tolist() == ids[:-1]
        expected = [MASKED] * (len(one.prompt_ids) - 1) + list(one.token_ids)
        assert batch.labels[row, here].tolist() == expected
        assert batch.columns["behaviour"][row, here].tolist()[len(one.prompt_ids) - 1 :] == list(one.logprobs)
        [number] = set(batch.documents[row, here].tolist())
        assert batch.columns["answer"][row, number] == rollouts.index(one)
        assert (batch.documents[row] == number).sum() == len(ids) - 1


def test_tokens_that_the_model_did_not_write_are_not_trained_on() -> None:
    one = rollout(0, 0, prompt=(9,), ids=(1, 2, 3, 4, 5), written=((0, 2), (4, 5)))
    batch = pack_answers([one], 8, 1).batch
    assert batch.labels[0, :5].tolist() == [1, 2, MASKED, MASKED, 5]
    assert batch.trained == 3


def test_no_answer_at_all_is_a_row_of_padding() -> None:
    batch = pack_answers([], 8, 2).batch
    assert batch.inputs.shape == (2, 8)
    assert batch.trained == 0


def test_columns_by_answer_are_zero_for_padding() -> None:
    rollouts = random_rollouts(1, 5, 10)
    answers = pack_answers(rollouts, 10, 4).batch.columns["answer"]
    column = per_answer(np.arange(1, 6, dtype=np.float32), answers)
    assert np.array_equal(column, np.where(answers >= 0, answers + 1, 0))


@pytest.mark.parametrize(("kind", "of"), [("k1", lambda d: d), ("k2", lambda d: d * d / 2)])
def test_divergences_are_those_of_each_token(kind: str, of) -> None:
    rollouts = random_rollouts(2, 5, 12)
    packed = pack_answers(rollouts, 12, 1)
    numbers = np.random.default_rng(0)
    own, reference = numbers.normal(size=(2, *packed.batch.inputs.shape)).astype(np.float32)
    values = token_divergences(packed, own, reference, kind)
    for one, span, of_tokens in zip(rollouts, packed.spans, values, strict=True):
        gaps = (own - reference).astype(np.float64)[span]
        assert len(gaps) == len(one.token_ids)
        np.testing.assert_allclose(of_tokens, of(gaps), rtol=1e-5, atol=1e-6)


def test_columns_by_token_are_zero_where_the_model_wrote_nothing() -> None:
    rollouts = [rollout(0, 0, prompt=(9, 9), ids=(1, 2, 3), written=((0, 1), (2, 3))), rollout(0, 1, ids=(4, 5))]
    packed = pack_answers(rollouts, 16, 1)
    column = per_token([np.array([1.0, np.nan, 3.0]), np.array([4.0, 5.0])], packed)
    assert [column[span].tolist() for span in packed.spans] == [[1, 0, 3], [4, 5]]
    assert column.sum() == 13


# -- groups


def test_groups_are_by_sample_in_order() -> None:
    rollouts = [rollout(sample, answer, sample + answer) for answer in (1, 0) for sample in (5, 3)]
    groups = groups_of(rollouts, rl())
    assert [[one.sample for one in group.rollouts] for group in groups] == [[3, 3], [5, 5]]
    assert [group.rewards.tolist() for group in groups] == [[3, 4], [5, 6]]


@pytest.mark.parametrize(
    ("policy", "rewards", "present"),
    [("zero", [1.0, 0.0, 0.5], [True] * 3), ("leave-out", [1.0, 0.0, 0.5], [True, False, True])],
)
def test_a_failed_reward_counts_as_the_recipe_says(policy: str, rewards: list[float], present: list[bool]) -> None:
    answers = [rollout(0, 0, 1.0), rollout(0, 1, 0.0, error="Traceback\nValueError: no"), rollout(0, 2, 0.5)]
    [group] = groups_of(answers, rl(if_reward_fails=policy))
    assert group.rewards.tolist() == rewards
    assert group.present.tolist() == present
    metrics = metrics_of([group], rl(if_reward_fails=policy), 2)
    assert metrics["failed"] == pytest.approx(1 / 3)
    assert metrics["reward"] == pytest.approx(1.5 / sum(present))


def test_a_failed_reward_stops_the_run_with_its_reason() -> None:
    with pytest.raises(WorkerError, match="ValueError: no"):
        groups_of([rollout(0, 0, error="Traceback\n  in x\nValueError: no")], rl(if_reward_fails="stop"))


def test_dynamic_sampling_takes_the_first_groups_that_vary() -> None:
    rewards = [(1, 1), (0, 1), (0, 0), (1, 0), (0, 1)]
    rollouts = [rollout(sample, answer, r) for sample, pair in enumerate(rewards) for answer, r in enumerate(pair)]
    dynamic = rl(dynamic_sampling=True)
    groups = chosen(groups_of(rollouts, dynamic), dynamic, 2)
    assert [group.rollouts[0].sample for group in groups] == [1, 3]
    assert len(chosen(groups_of(rollouts, rl()), rl(), 2)) == 5


@given(st.integers(0, 20), st.integers(1, 5))
def test_a_batch_is_divided_among_its_steps_without_loss(groups: int, steps: int) -> None:
    parts = shares(list(range(groups)), steps)
    assert [one for part in parts for one in part] == list(range(groups))
    assert len(parts) == steps
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_what_is_taken_off_rewards_changes_advantages() -> None:
    groups = groups_of([rollout(sample, answer, 1.0) for sample in range(2) for answer in range(2)], rl())
    policy = PolicyGradient(kind="dr-grpo")
    assert not any(of_tokens.any() for group in advantages_of(groups, policy) for of_tokens in group)
    lengths = [len(each.token_ids) for group in groups for each in group.rollouts]
    costs = [np.full(n, cost / n) for n, cost in zip(lengths, [0.0, 0.2, 0.4, 0.0], strict=True)]
    values = [of_tokens for group in advantages_of(groups, policy, costs) for of_tokens in group]
    for of_tokens, n, expected in zip(values, lengths, [0.1, -0.1, -0.2, 0.2], strict=True):
        np.testing.assert_allclose(of_tokens, np.full(n, expected))


def test_in_a_batch_the_divergence_of_a_token_is_taken_off_the_tokens_before_it() -> None:
    rollouts = [rollout(0, 0, 1.0, ids=(1, 2, 3), written=((0, 1), (2, 3))), rollout(0, 1, 0.0, ids=(4, 5))]
    groups = groups_of(rollouts, rl())
    [values] = advantages_of(groups, PolicyGradient(kind="reinforce++"), [np.array([0.1, 0, 0.3]), np.array([0.2, 0])])
    at = {(0, 0): 0.6, (0, 2): 0.7, (1, 0): -0.2, (1, 1): 0.0}
    mean, deviation = np.mean([*at.values()]), np.std([*at.values()], ddof=1)
    for (answer, token), reward in at.items():
        assert values[answer][token] == pytest.approx((reward - mean) / deviation, rel=1e-5)
    assert values[0][1] == 0, "of a token that the model did not write"
    assert advantages_of([], PolicyGradient(kind="reinforce++")) == []


def test_metrics_are_means_over_answers_and_groups() -> None:
    answers = [
        rollout(0, 0, 1.0),
        rollout(0, 1, 0.0, ids=(3,), finish="length"),
        rollout(1, 0, 0.0),
        rollout(1, 1, 0.0),
    ]
    metrics = metrics_of(groups_of(answers, rl(samples=2)), rl(samples=2), trained_at=4)
    assert metrics["reward"] == metrics["reward/math"] == 0.25
    assert metrics["pass@2"] == 0.5
    assert metrics["zero_variance"] == 0.5
    assert metrics["truncated"] == 0.25
    assert metrics["length"] == 7 / 4
    assert metrics["staleness"] == 2
    assert metrics["sampled_entropy"] == pytest.approx((3 * (0.1 + 0.2) + 0.1) / 7)


def test_failed_rewards_are_told_with_their_number_and_the_first_reason() -> None:
    whole = [rollout(0, 0), rollout(0, 1)]
    assert failure_note(groups_of(whole, rl()), rl()) is None
    failed = [*whole, rollout(1, 0, error="math: Traceback\n  File\nKeyError: 'a'"), rollout(1, 1, error="other")]
    leave_out = rl(if_reward_fails="leave-out")
    reason = "the reward of 2 of 4 answers failed, and {}: KeyError: 'a'"
    assert failure_note(groups_of(failed, rl()), rl()) == reason.format("it counts as 0")
    assert failure_note(groups_of(failed, leave_out), leave_out) == reason.format("they are left out")


@pytest.mark.parametrize("policy", ["zero", "leave-out"])
def test_a_reward_that_failed_for_every_answer_is_named_with_its_own_reason(policy: str) -> None:
    section = Rl(rewards=["math", "regex"], if_reward_fails=policy)
    errors = ["math: Traceback\n  File\nKeyError: 'a'\nregex: a", "math: its process ended", "regex: c\nmath: b"]
    failed = [rollout(0, answer, error=error) for answer, error in enumerate(errors)]
    said = "math failed for all 3 answers of the first batch: KeyError: 'a'"
    assert failed_for_all(groups_of(failed, section), section) == said
    first = [rollout(0, 0, error="regex: c\nmath: Traceback\nb")]
    assert failed_for_all(groups_of(first, section), section) == "math failed for all 1 answer of the first batch: b"


@pytest.mark.parametrize("errors", [[None, "math: a"], ["math: a", "regex: a"], []])
def test_rewards_of_which_each_gave_some_value_have_not_failed(errors: list[str | None]) -> None:
    section = Rl(rewards=["math", "regex"])
    groups = groups_of([rollout(0, answer, error=error) for answer, error in enumerate(errors)], section)
    assert failed_for_all(groups, section) is None
