"""The share of generated clips that move as their captions say, for a run of `recipes/video.toml`.

    python benchmarks/video_motion.py RUN_FOLDER [--guidance 1 2 3] [--step N]

Every colour of square and circle moves in every direction: 32 captions, one clip each, of the EMA weights. The
direction is that of the shift which explains the change from each frame to the next, by correlation; it knows nothing
of the model.
"""

import argparse
import os
from pathlib import Path

import numpy as np
import torch

from headway.inference.diffusion import Generator, SamplingSettings
from headway.inference.load_diffusion import load_diffusion
from headway.models.diffusion import open_text_encoder
from headway.models.pixels import to_pixels
from headway.state import find_checkpoint, open_checkpoint
from headway.track import RunFolder, read_recipe

SHAPES, COLOURS = ("square", "circle", "bar"), ("red", "green", "blue", "yellow")
DIRECTIONS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
FARTHEST = 4
"""Pixels per frame of a shift that is considered."""


def prompts() -> list[str]:
    """Return the captions."""
    return [f"a {colour} {shape} moves {way}" for colour in COLOURS for shape in SHAPES[:2] for way in DIRECTIONS]


def generated(
    run: RunFolder, conditions: list[int] | list[str], guidance: float, step: int | None = None
) -> np.ndarray:
    """Return samples of a run's EMA weights [N, T, Y, X, 3]."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    recipe, device = read_recipe(run), torch.device("cpu")
    module = load_diffusion(recipe, open_checkpoint(find_checkpoint(run.checkpoints, step)), device, ema=True)
    encoder = open_text_encoder(recipe.model, device) if recipe.model.conditioning == "text" else None
    generator = Generator(recipe.model, recipe.objective, module, encoder, device)
    width, height, frames = recipe.data.media.shapes[0]
    settings = SamplingSettings(steps=20, guidance=guidance, seed=5)
    return to_pixels(generator.generate(conditions, (frames, height, width), settings)).numpy()


def motion_of(frames_TYXC: np.ndarray) -> str:
    """The direction of the shift that explains the change from each frame to the next, by phase-free correlation."""
    shape_TYX = frames_TYXC.astype(float).max(axis=3) - 24
    shape_TYX -= shape_TYX.mean(axis=(1, 2), keepdims=True)
    spectra = np.fft.fft2(shape_TYX)
    correlation = np.fft.ifft2((spectra[1:] * spectra[:-1].conj()).sum(axis=0)).real
    shifts = range(-FARTHEST, FARTHEST + 1)
    best = max(((down, across) for down in shifts for across in shifts), key=lambda shift: correlation[shift])
    return max(DIRECTIONS, key=lambda name: float(np.dot(DIRECTIONS[name], best)))


def share_of_matches(run: RunFolder, guidance: float, step: int | None = None) -> float:
    """Return the share of captions whose clip moves as they say."""
    clips = generated(run, prompts(), guidance, step)
    matches = [motion_of(clip) == prompt.rpartition(" ")[2] for clip, prompt in zip(clips, prompts(), strict=True)]
    return float(np.mean(matches))


def main() -> None:
    """Print the share per guidance."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="Folder of a run.")
    parser.add_argument("--guidance", nargs="+", type=float, default=[1.0, 2.0, 3.0])
    parser.add_argument("--step", type=int, help="Of the checkpoint; the latest by default.")
    given = parser.parse_args()
    run = RunFolder(given.run)
    for guidance in given.guidance:
        share = share_of_matches(run, guidance, given.step)
        print(f"guidance {guidance:g}: {share:.0%} of {len(prompts())} clips move as their caption says", flush=True)


if __name__ == "__main__":
    main()
