"""`hw.log`: what is written is read back by other libraries, and nothing leads out of the run's folder."""

import io
import json
import math
import threading
import wave
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image as PillowImage

import headway as hw
from conftest import Lab
from eventually import eventually
from headway.errors import UsageError
from headway.recipe import Recipe
from headway.recipe.rl import Rl
from headway.rl.scorer import Scorer
from headway.track import Recorder, RunFolder, read_metrics, record_path, user_log
from headway.track.logged_values import Artifact, Audio, Image, Table
from headway.track.user_log import UserLog, logged_files, logged_path, logged_series, user_records


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "a-run")
    folder.path.mkdir()
    return folder


def test_picture_has_the_pixels_that_pillow_reads(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for shape in ((3, 5), (1, 1, 1), (7, 2, 3), (4, 9, 4)):
        pixels = rng.integers(0, 256, shape, np.uint8)
        suffix, data = Image(pixels).encode()
        read = np.asarray(PillowImage.open(io.BytesIO(data)))
        assert suffix == ".png"
        assert (read == pixels.squeeze(-1) if shape[2:] == (1,) else read == pixels).all()
    floats = torch.linspace(0, 1, 12, dtype=torch.bfloat16).reshape(3, 4)
    read = np.asarray(PillowImage.open(io.BytesIO(Image(floats).encode()[1])))
    assert (read == np.rint(floats.float().numpy() * 255)).all()
    file = tmp_path / "x.jpg"
    PillowImage.fromarray(pixels[:, :, :3]).save(file)
    assert Image(file).encode() == (".jpg", file.read_bytes())
    assert Image(PillowImage.open(file)).encode()[0] == ".png"


def test_sound_has_the_samples_that_wave_reads() -> None:
    samples = np.stack([np.linspace(-1, 1, 50), np.zeros(50)], axis=1)
    with wave.open(io.BytesIO(Audio(samples, 8000).encode()[1])) as file:
        assert (file.getframerate(), file.getnchannels(), file.getnframes()) == (8000, 2, 50)
        read = np.frombuffer(file.readframes(50), "<i2").reshape(50, 2)
    assert np.abs(read / 32767 - samples).max() < 1e-4


def test_log_is_read_back(run: RunFolder, tmp_path: Path) -> None:
    note = tmp_path / "note.txt"
    note.write_text("kept")
    log = UserLog(run.path, 1, "rank-0")
    log.step = 3
    log.log({"a/b": 1, "t": torch.tensor(2.5), "n": np.float32(0.5), "nan": math.nan})
    log.log({"a/b": 3.0})
    log.log(
        {"pic": Image(np.zeros((2, 2))), "rows": Table(["x", "y"], [[1, None], ["z", True]]), "f": Artifact(note)}, 7
    )
    log.close()
    values = logged_series(user_records(run), {})
    assert {key: (steps.tolist(), numbers.tolist()) for key, (steps, numbers) in values.items() if key != "nan"} == {
        "a/b": ([3], [2.0]), "t": ([3], [2.5]), "n": ([3], [0.5]),
    }  # fmt: skip
    assert np.isnan(values["nan"][1]).all()
    files = {item.key: item for item in logged_files(run)}
    assert {key: (item.step, item.kind) for key, item in files.items()} == {
        "pic": (7, "image"), "rows": (7, "table"), "f": (7, "artifact"),
    }  # fmt: skip
    assert json.loads(files["rows"].path.read_bytes()) == {"columns": ["x", "y"], "rows": [[1, None], ["z", True]]}
    assert files["f"].path.read_text() == "kept"
    assert files["f"].caption == "note.txt"


@pytest.mark.parametrize(
    "values",
    [{"": 1}, {"../x": 1}, {"a/../b": 1}, {3: 1}, {"x": object()}, {"x": [1, 2]}, {"x": "text"}, [1], {"\n": 1}],
)
def test_what_cannot_be_logged_is_refused(run: RunFolder, values: object) -> None:
    with pytest.raises(UsageError):
        UserLog(run.path, 1, "rank-0").log(values)  # type: ignore[arg-type]
    assert not run.events.exists()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Image(np.zeros((2, 2, 5))), lambda: Image("no such file"), lambda: Image(np.array([["a"]])),
        lambda: Image(np.full((2, 2), 300)), lambda: Audio(np.zeros(3), 0), lambda: Audio(np.zeros((2, 2, 2)), 8000),
        lambda: Table(["a"], [[1, 2]]), lambda: Artifact("no such file"),
    ],
)  # fmt: skip
def test_values_of_a_wrong_shape_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(UsageError):
        make()


def test_names_of_files_cannot_lead_out_of_the_run(run: RunFolder, tmp_path: Path) -> None:
    run.logged.mkdir()
    (tmp_path / "secret.png").write_text("s")
    (run.logged / "00000001-link.png").symlink_to(tmp_path / "secret.png")
    (run.logged / "00000001-file.png").write_text("p")
    with Recorder(record_path(run.events, 1, "user-rank-0"), attempt=1, process="user-rank-0") as recorder:
        for name in ("../secret.png", "/etc/passwd", "00000001-link.png", "00000001-file.png", "00000001-gone.png", 7):
            recorder.event("media", step=1, key="k", type="image", file=name)
        recorder.event("media", step="x", key="k", type="image", file="00000001-file.png")
        recorder.event("logged", step=1, values={"a": "no number", "b": True, "c": 2})
        recorder.event("logged", step=1, values=[1])
    assert [item.path.name for item in logged_files(run)] == ["00000001-file.png"]
    assert logged_path(run, "00000001-link.png") is None
    assert logged_series(user_records(run), {})["c"][1].tolist() == [2.0]


def test_full_disk_costs_the_values_and_not_the_run(run: RunFolder) -> None:
    run.logged.write_text("a file where the folder should be")
    log = UserLog(run.path, 1, "rank-0")
    log.log({"pic": Image(np.zeros((2, 2)))})
    log.close()
    messages = [event["message"] for record in user_records(run) for event in record.events if event["kind"] == "log"]
    assert len(messages) == 1
    assert messages[0].startswith("pic of step 0 was not logged: ")


def test_more_files_than_the_disk_takes_are_dropped_and_counted(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_log, "WAITING_FILES", 2)
    log = UserLog(run.path, 1, "rank-0")
    queued = threading.Event()
    monkeypatch.setattr(log, "_written", lambda *_: {"waited": queued.wait(300)})
    for _ in range(5):
        log.log({"pic": Table([], [])})
    queued.set()
    log.close()
    kinds = [event["kind"] for record in user_records(run) for event in record.events]
    assert sorted(kinds) == ["log", "media", "media"]


def test_outside_of_a_run_values_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    hw.log({"loss": 0.25, "pic": hw.Image(np.zeros((1, 1)))})
    assert capsys.readouterr().err == "hw.log outside of a run: loss=0.25, pic=<image>\n"


def test_rewards_log_into_the_run_of_their_worker(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    from headway.rl.rewards import Answer

    user_log.open_log(run.path, 2, "rank-1")
    try:
        user_log.set_step(5)
        with Scorer(Rl(rewards="logging_rewards:length", reward_workers=2)) as scorer:
            scorer.score([Answer(text=text, prompt="", fields={}, tokens=1, finish="stop") for text in ("a", "abc")])
            eventually(lambda: "length" in logged_series(user_records(run), {}))
            eventually(lambda: logged_series(user_records(run), {})["length"][1].tolist() == [2.0])
    finally:
        user_log.close_log()
    assert {record.header.process.split("-score-")[0] for record in user_records(run)} == {"user-rank-1"}


def test_callback_of_a_run_logs_at_the_step_it_is_told(lab: Lab, recipe: Callable[..., Recipe]) -> None:
    lived = lab.train(recipe({"train.steps": 3, "callbacks": [{"class": "own_callbacks:Logging"}]}))
    assert lived.outcome.state == "finished"
    metrics = read_metrics(lived.run)
    assert metrics["own/double"][0].tolist() == [1, 2, 3]
    assert np.allclose(metrics["own/double"][1], 2 * metrics["loss"][1])
    assert [(item.step, item.key) for item in logged_files(lived.run)] == [(2, "grid")]
    assert all(path.stat().st_mode & 0o077 == 0 for path in lived.run.logged.iterdir())
