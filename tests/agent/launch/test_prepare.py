"""What is decided and told before a run's first process."""

from pathlib import Path
from typing import Any

import pytest

from headway.agent import new_run, resume_run
from headway.agent.launch.prepare import idle_settings, nodes_before
from headway.errors import UsageError
from headway.hardware import Devices
from headway.track import Recorder, RunFolder, record_path

GPUS = Devices("cuda", 8, "NVIDIA H200")


def test_a_setting_that_does_nothing_here_is_told_of(recipe, tmp_path: Path) -> None:
    asked = recipe({"train.cuda_graphs": True})
    first = new_run(asked, tmp_path, workers=1)
    told = "train.cuda_graphs has no effect on CPUs: it is for one worker on a GPU"
    assert first.notes == [told]
    assert resume_run(first.folder, []).notes == [told]
    assert resume_run(first.folder, ["train.cuda_graphs=false"]).notes == []
    assert new_run(recipe(), tmp_path, workers=1).notes == []
    assert "with 2 workers" in idle_settings(asked, GPUS, 2)[0]
    assert idle_settings(asked, GPUS, 1) == []


def begun(run: RunFolder, number: int, workers: int, **more: Any) -> None:
    """The record of an attempt that has begun."""
    with Recorder(record_path(run.events, number, "agent"), attempt=number, process="agent") as recorder:
        recorder.event("attempt", workers=workers, device="cpu", from_step=0, recipe_changes={}, source=None, **more)


def test_a_run_goes_on_with_the_nodes_that_it_emulated(recipe, tmp_path: Path) -> None:
    run = new_run(recipe(), tmp_path, workers=2, nodes=2, spares=1).folder
    assert nodes_before(run) is None
    begun(run, 1, 2, nodes=2, spares=1, emulated=True)

    def places(**options: Any) -> tuple[int, int, int]:
        attempt = resume_run(run, [], **options)
        return attempt.workers, attempt.nodes, attempt.spares

    as_before = {"nodes": None, "spares": None}
    assert places(**as_before) == (2, 2, 1)
    assert places(nodes=1, spares=None) == (2, 1, 1)
    assert places(nodes=None, spares=0) == (2, 2, 0)
    assert places(**as_before, workers=1) == (1, 1, 1)
    with pytest.raises(UsageError, match="--nodes 3, and 2 workers"):
        places(nodes=3, spares=None)
    assert places() == (2, 1, 0)  # whoever has machines of its own
    assert nodes_before(run) == 2


def test_machines_of_their_own_are_not_emulated(recipe, tmp_path: Path) -> None:
    run = new_run(recipe(), tmp_path, workers=2).folder
    begun(run, 1, 2, nodes=2, spares=0, emulated=False)
    again = resume_run(run, [], nodes=None, spares=None)
    assert (again.workers, again.nodes, again.spares) == (2, 1, 0)
    assert nodes_before(run) == 2
    begun(run, 2, 2)
    assert nodes_before(run) == 1
