"""What is decided and told before a run's first process."""

from pathlib import Path

from headway.agent import new_run, resume_run
from headway.agent.prepare import idle_settings
from headway.hardware import Devices

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
