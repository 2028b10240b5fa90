"""Small diffusion models learn what their data shows, as judged from outside: digits by a classifier of scikit-learn,
motion by the correlation of neighbouring frames."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from headway.inference.diffusion import Generator, SamplingSettings
from headway.inference.load_diffusion import load_diffusion
from headway.models.diffusion import open_text_encoder
from headway.models.pixels import to_pixels
from headway.state import find_checkpoint, open_checkpoint
from headway.track import RunFolder, read_recipe

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


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


def generated(run: RunFolder, conditions: list[int] | list[str], guidance: float) -> np.ndarray:
    """Samples of a run's EMA weights [N, T, Y, X, 3]."""
    torch.set_num_threads(os.cpu_count() or 1)
    recipe, device = read_recipe(run), torch.device("cpu")
    module = load_diffusion(recipe, open_checkpoint(find_checkpoint(run.checkpoints)), device, ema=True)
    encoder = open_text_encoder(recipe.model, device) if recipe.model.conditioning == "text" else None
    generator = Generator(recipe.model, recipe.objective, module, encoder, device)
    width, height, frames = recipe.data.media.shapes[0]
    settings = SamplingSettings(steps=20, guidance=guidance, seed=5)
    return to_pixels(generator.generate(conditions, (frames, height, width), settings)).numpy()


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


SHAPES, COLOURS = ("square", "circle", "bar"), ("red", "green", "blue", "yellow")
DIRECTIONS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}


def motion_of(frames_TYXC: np.ndarray) -> str:
    """The direction of the shift that explains the change from each frame to the next, by phase-free correlation."""
    shape_TYX = frames_TYXC.astype(float).max(axis=3) - 24
    shape_TYX -= shape_TYX.mean(axis=(1, 2), keepdims=True)
    spectra = np.fft.fft2(shape_TYX)
    correlation = np.fft.ifft2((spectra[1:] * spectra[:-1].conj()).sum(axis=0)).real
    limit = 4
    best = max(
        ((down, across) for down in range(-limit, limit + 1) for across in range(-limit, limit + 1)),
        key=lambda shift: correlation[shift],
    )
    return max(DIRECTIONS, key=lambda name: float(np.dot(DIRECTIONS[name], best)))


def test_motion_is_measured_right_on_real_clips() -> None:
    sys.path.insert(0, str(ROOT / "examples"))
    from make_clips import frames

    for direction in DIRECTIONS:
        for shape in SHAPES:
            clip = frames(16, 12, shape, "blue", direction, (3.0, 9.0))[::2]
            assert motion_of(clip) == direction


def test_motion_in_generated_clips_is_that_of_their_captions(tmp_path: Path) -> None:
    commands(tmp_path, "video.toml")
    prompts = [f"a {colour} {shape} moves {way}" for colour in COLOURS for shape in SHAPES[:2] for way in DIRECTIONS]
    clips = generated(only_run(tmp_path), prompts, guidance=3.0)
    right = [motion_of(clip) == prompt.rpartition(" ")[2] for clip, prompt in zip(clips, prompts, strict=True)]
    assert np.mean(right) >= 0.8
