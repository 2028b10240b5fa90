"""Small diffusion models learn what their data shows, as judged from outside: digits by a classifier of scikit-learn,
motion by the correlation of neighbouring frames."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headway.track import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]  # whole recipes: minutes of a CPU that others may want
ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "benchmarks")]
from make_clips import frames  # noqa: E402

from video_motion import DIRECTIONS, SHAPES, generated, motion_of, share_of_matches  # noqa: E402


def commands(folder: Path, recipe: str) -> None:
    """Run the commands that a recipe's comments name, up to its training, in a folder."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    (folder / "recipes").symlink_to(ROOT / "recipes")
    (folder / "examples").symlink_to(ROOT / "examples")
    for line in (ROOT / "recipes" / recipe).read_text().splitlines():
        if line.startswith("#   ") and not line.startswith("#   headway sample"):
            done = subprocess.run(line[4:], shell=True, cwd=folder, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr


def only_run(folder: Path) -> RunFolder:
    (run,) = (folder / "runs").iterdir()
    return RunFolder(run)


def test_a_classifier_recognizes_generated_digits(tmp_path: Path) -> None:
    """A support vector machine that is trained on the real digits, and never saw a generated one."""
    from sklearn.datasets import load_digits
    from sklearn.svm import SVC

    commands(tmp_path, "images.toml")
    labels = [number % 10 for number in range(300)]
    pixels = generated(only_run(tmp_path), labels, guidance=2.0)
    images, truth = load_digits(return_X_y=True)
    classifier = SVC(gamma=0.001).fit(images[:1200], truth[:1200])
    assert classifier.score(images[1200:], truth[1200:]) > 0.94  # it is a judge to trust
    recognized = classifier.predict(pixels[:, 0, :, :, 0].reshape(-1, 64) / 16.0) == labels
    assert recognized.mean() >= 0.9
    each = pixels[:, 0, :, :, 0].reshape(30, 10, 64).std(axis=0).mean()
    real = 16 * np.mean([images[truth == digit].std(axis=0).mean() for digit in range(10)])
    assert each > 0.4 * real  # samples of a class differ


def test_motion_is_measured_right_on_real_clips() -> None:
    for direction in DIRECTIONS:
        for shape in SHAPES:
            clip = frames(16, 12, shape, "blue", direction, (3.0, 9.0))[::2]
            assert motion_of(clip) == direction


def test_motion_in_generated_clips_is_that_of_their_captions(tmp_path: Path) -> None:
    commands(tmp_path, "video.toml")
    assert share_of_matches(only_run(tmp_path), guidance=3.0) >= 0.8
