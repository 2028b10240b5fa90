"""Whole runs whose storage fails: the folder vanishes, or its disk is full. They end as an undisturbed one does."""

import pytest

from conftest import Lived, assert_same, when
from headway.state import list_checkpoints, verify_checkpoint

SETTINGS = {"train.steps": 10, "checkpoint.every_steps": 2, "checkpoint.memory_every_steps": 1}


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory, make_lab, recipe) -> Lived:
    """A run that nothing happened to."""
    lived = make_lab(tmp_path_factory.mktemp("unharmed")).train(recipe(SETTINGS))
    assert lived.outcome.state == "finished", lived.outcome
    return lived


@pytest.mark.slow
@pytest.mark.parametrize("bare", [False, True])
def test_run_whose_folder_vanishes_ends_with_the_same_bits(tmp_path, lab, recipe, unharmed, bare):
    """It is renamed in the middle and back when the run waits for it; with and without a bare mount point there."""
    path, away, left = tmp_path / "runs" / "a", tmp_path / "away", []

    def vanish():
        path.rename(away)
        if bare:
            path.mkdir()

    def come_back():
        left.extend(path.iterdir() if bare else path.parent.iterdir())
        if bare:
            path.rmdir()
        away.rename(path)

    def waits():
        record = away / "events" / "0001-agent.jsonl"
        return away.exists() and '"kind":"retry"' in record.read_text()

    record = path / "events" / "0001-rank-0.jsonl"
    when(lambda: record.exists() and '"step":3,' in record.read_text(), vanish, lambda: when(waits, come_back))
    lived = lab.train(recipe(SETTINGS), name="a")
    assert_same(lived, unharmed)
    assert left == []
    texts = [event["text"] for event in lived.events("storage", "agent")]
    assert "in the place of the run's" in texts[0] if bare else "is gone" in texts[0]
    assert "is back after" in texts[-1]
    assert "another agent" not in " ".join(texts)
    assert verify_checkpoint(list_checkpoints(lived.run.checkpoints)[-1].path).step == 10
