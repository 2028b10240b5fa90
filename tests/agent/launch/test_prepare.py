"""What is decided and reported before a run's first process starts."""

from pathlib import Path
from typing import Any

import pytest

from headway.agent import new_run, resume_run
from headway.agent.launch.prepare import check_unfinished, idle_settings, new_positions, nodes_before
from headway.errors import RunError, StateError, UsageError
from headway.hardware import Devices
from headway.recipe import Recipe
from headway.state.object_store import ObjectStore
from headway.track import Recorder, RunFolder, read_recipe, record_path

GPUS = Devices("cuda", 8, "NVIDIA H200")


def test_setting_without_effect_is_noted(recipe, tmp_path: Path) -> None:
    graphs = recipe({"train.cuda_graphs": True})
    first = new_run(graphs, tmp_path, workers=1)
    note = "train.cuda_graphs has no effect on CPUs: it needs one worker on a GPU"
    assert first.notes == [note]
    assert resume_run(first.folder, []).notes == [note]
    assert resume_run(first.folder, ["train.cuda_graphs=false"]).notes == []
    assert new_run(recipe(), tmp_path, workers=1).notes == []
    assert "with 2 workers" in idle_settings(graphs, GPUS, 2)[0]
    assert idle_settings(graphs, GPUS, 1) == []


def test_sequences_beyond_the_positions_of_the_first_weights_are_noted(recipe, tmp_path: Path) -> None:
    """Positions are those of the folder's config.json, or of the run's own sequences."""
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text('{"max_position_embeddings": 128}')
    first = recipe()

    def started(seq: int) -> Recipe:
        changes = {"model": first.model.model_copy(update={"init": str(folder)})}
        return first.model_copy(update={**changes, "data": first.data.model_copy(update={"seq": seq})})

    assert new_positions(started(128)) == new_positions(first) == []
    assert new_positions(started(256)) == ["data.seq is 256, but base takes 128 tokens: later positions are new to it"]


@pytest.mark.parametrize("usage", [True, False], ids=["missing bucket", "store that is down"])
def test_run_does_not_start_with_a_bucket_that_is_missing(recipe, tmp_path: Path, monkeypatch, usage: bool) -> None:
    def fail(_store: ObjectStore, _prefix: str = "") -> None:
        raise StateError("it could not be listed", usage=usage)

    monkeypatch.setattr(ObjectStore, "list", fail)
    stored = recipe({"checkpoint.store": {"url": f"file://{tmp_path}/store"}})
    if usage:
        with pytest.raises(StateError):
            new_run(stored, tmp_path / "runs", workers=1)
        assert not (tmp_path / "runs").exists()
    else:
        started = new_run(stored, tmp_path / "runs", workers=1)
        assert started.notes == ["nothing can be uploaded yet: it could not be listed"]


@pytest.mark.parametrize(("stated", "saved"), [({}, False), ({"inference.exact": True}, True)])
def test_a_run_knows_whether_it_is_exact(recipe, tmp_path: Path, stated: dict[str, Any], saved: bool) -> None:
    run = new_run(recipe(stated), tmp_path, workers=1).folder
    assert read_recipe(run).inference.exact is saved


def test_fewer_steps_than_are_done_are_refused_with_both_numbers(recipe, tmp_path: Path) -> None:
    run = new_run(recipe(), tmp_path, workers=1).folder
    with pytest.raises(RunError, match=r"is at step 67 already, and train\.steps is 40"):
        check_unfinished(run, 67, 40)
    check_unfinished(run, 39, 40)


def record_start(run: RunFolder, number: int, workers: int, **more: Any) -> None:
    """Record the start of an attempt."""
    with Recorder(record_path(run.events, number, "agent"), attempt=number, process="agent") as recorder:
        recorder.event("attempt", workers=workers, device="cpu", from_step=0, recipe_changes={}, source=None, **more)


def test_resume_emulates_the_same_nodes(recipe, tmp_path: Path) -> None:
    run = new_run(recipe(), tmp_path, workers=2, nodes=2, spares=1).folder
    assert nodes_before(run) is None
    record_start(run, 1, 2, nodes=2, spares=1, emulated=True)

    def resumed(**options: Any) -> tuple[int, int, int]:
        attempt = resume_run(run, [], **options)
        return attempt.workers, attempt.nodes, attempt.spares

    as_before = {"nodes": None, "spares": None}
    assert resumed(**as_before) == (2, 2, 1)
    assert resumed(nodes=1, spares=None) == (2, 1, 1)
    assert resumed(nodes=None, spares=0) == (2, 2, 0)
    assert resumed(**as_before, workers=1) == (1, 1, 1)
    with pytest.raises(UsageError, match="--nodes 3, but only 2 workers"):
        resumed(nodes=3, spares=None)
    assert resumed() == (2, 1, 0)  # on real machines
    assert nodes_before(run) == 2


def test_resume_does_not_emulate_real_nodes(recipe, tmp_path: Path) -> None:
    run = new_run(recipe(), tmp_path, workers=2).folder
    record_start(run, 1, 2, nodes=2, spares=0, emulated=False)
    again = resume_run(run, [], nodes=None, spares=None)
    assert (again.workers, again.nodes, again.spares) == (2, 1, 0)
    assert nodes_before(run) == 2
    record_start(run, 2, 2)
    assert nodes_before(run) == 1
