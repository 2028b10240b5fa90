"""Batches of rollouts that checkpoints in a store need: which they are, and runs that resume with them elsewhere."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import Lab
from headway.agent.remote.store_mirror import fetch_run
from headway.agent.remote.store_rollouts import needed_batches, prune_rollouts, upload_rollouts
from headway.errors import StateError
from headway.recipe import FaultPlan
from headway.rl.rollout_files import RolloutFiles
from headway.state.object_store import open_store
from headway.track import compare_runs
from train.small_policy import policy_recipe, prompts_dataset


def recipe_of(updates: int, staleness: int, steps: int = 12) -> dict[str, Any]:
    return {"rl": {"updates": updates, "staleness": staleness}, "train": {"steps": steps}}


@given(st.integers(0, 12), st.integers(1, 4), st.integers(0, 3))
def test_a_checkpoint_needs_what_was_sampled_before_it_and_is_learnt_from_after(step, updates, staleness):
    """The batch of step f is sampled right before step f - staleness x updates, or before the first."""
    ahead, expected = staleness * updates, []
    for first in range(1, 13, updates):
        sampled_before = max(first - ahead, 1)
        if sampled_before <= step < first + updates - 1:
            expected.append(first)
    assert list(needed_batches(step, recipe_of(updates, staleness))) == expected


def test_other_objectives_need_none(tmp_path):
    assert not needed_batches(5, {"rl": None, "train": {"steps": 9}})
    assert not needed_batches(5, {"train": {"steps": 9}})


def write_batches(run: Path, *steps: int) -> None:
    (run / "rollouts").mkdir(parents=True, exist_ok=True)
    for step in steps:
        (run / "rollouts" / f"batch-{step:08d}.jsonl").write_text(f"batch {step}\n")
        (run / "rollouts" / f"batch-{step:08d}.0.safetensors").write_bytes(b"scores")


def names(store: Any) -> set[str]:
    return {item.key.removeprefix("rollouts/") for item in store.list("rollouts")}


def test_only_what_is_needed_is_put_and_kept(tmp_path):
    (tmp_path / "store").mkdir()
    store, run, known = open_store((tmp_path / "store").as_uri()), tmp_path / "run", {}
    write_batches(run, 1, 3, 5, 7)
    (run / "rollouts" / "batch-00000003.rank-0.part.jsonl").write_text("unfinished")
    upload_rollouts(store, run, recipe_of(2, 1), 3, known)
    needed = {f"batch-0000000{step}.{end}" for step in (3, 5) for end in ("jsonl", "0.safetensors")}
    assert names(store) == needed
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "store" / "rollouts").iterdir()}
    upload_rollouts(store, run, recipe_of(2, 1), 3, known)
    assert {path: path.stat().st_mtime_ns for path in before} == before, "files that do not change are put once"
    prune_rollouts(store, recipe_of(2, 1), known)
    assert names(store) == set(), "there is no checkpoint"
    upload_rollouts(store, run, recipe_of(2, 1), 3, known)
    assert names(store) == needed


def test_a_checkpoint_whose_rollouts_are_gone_is_not_uploaded(tmp_path):
    (tmp_path / "store").mkdir()
    write_batches(tmp_path / "run", 1, 3)
    with pytest.raises(StateError, match=r"step 3 .* needs the rollouts that begin with step 5, and .*batch-00000005"):
        upload_rollouts(open_store((tmp_path / "store").as_uri()), tmp_path / "run", recipe_of(2, 1), 3, {})


@pytest.mark.slow
def test_a_policy_resumes_on_a_bare_machine_in_the_middle_of_a_stale_batch(
    lab: Lab, make_lab: Any, tmp_path: Path
) -> None:
    """Two updates per batch, staleness 1, checkpoints after each step: lost after step 5, the first of a batch."""
    data = prompts_dataset(tmp_path / "data")
    (tmp_path / "store").mkdir()
    url = (tmp_path / "store").as_uri()
    reward = {"name": "regex", "args": {"pattern": "[a-m]", "search": True}}
    sections = {"rl": {"updates": 2, "staleness": 1, "rewards": [reward]}, "train": {"steps": 8}}
    alone = lab.train(policy_recipe(data, **sections, checkpoint={"every_steps": 1}), name="alone")
    assert alone.outcome.state == "finished", alone.outcome
    rules = {"url": url, "every_steps": 1, "keep_last": 1}
    stored = policy_recipe(data, **sections, checkpoint={"every_steps": 1, "store": rules})
    lost = lab.train(stored, faults=FaultPlan().kill(6), name="lost")
    assert lost.outcome.state == "failed"
    store = open_store(f"{url}/lost")
    assert {int(name[6:14]) for name in names(store)} == {5, 7}
    shutil.rmtree(lost.run.path)
    elsewhere = make_lab(tmp_path / "elsewhere")
    run = fetch_run(f"{url}/lost", elsewhere.root)
    assert not (run.path / "rollouts").stat().st_mode & 0o077
    result = elsewhere.resume(run)
    assert result.outcome.state == "finished", result.outcome
    assert [event["from_step"] for event in result.events("attempt", "agent")] == [0, 5]
    assert (result.chain, result.digest) == (alone.chain, alone.digest)
    assert compare_runs(result.run, alone.run).equal
    for step in (5, 7):
        assert RolloutFiles(result.run).read(step) == RolloutFiles(alone.run).read(step)
    assert any(event["grad_norm"] > 0 for event in result.events("step") if event["step"] > 5)
    assert names(store) == set(), "the last step needs none"
