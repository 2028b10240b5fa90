"""Short videos of moving shapes, each with captions that name the shape, its colour and the way it moves.

    python examples/make_clips.py [OUT [CLIPS [SIZE [FRAMES]]]]

OUT/clips has the files and OUT/captions.jsonl a row for each: two captions, the direction as a label (0 left, 1 right,
2 up, 3 down), and the scene that the clip belongs to. A shape crosses the picture, from near the edge that it moves
away from. The clips of a scene share shape, colour and lane, so that a model that is tested on other scenes has not
seen them. Build a dataset from them with
`headway data build data/clips 'OUT/clips/**/*.mp4' --kind video --captions OUT/captions.jsonl`.
"""

import argparse
import json
import random
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
COLOURS = {"red": (230, 50, 40), "green": (60, 200, 80), "blue": (60, 90, 240), "yellow": (240, 220, 60)}
SHAPES = ("square", "circle", "bar")
PER_SCENE = 4
"""Clips of a scene: the same shape and colour in four directions."""


def mask(shape: str, size: int, centre: tuple[float, float], radius: float) -> np.ndarray:
    """Return how much of each pixel the shape covers; it leaves on one side and comes back on the other."""
    grid = np.arange(size) + 0.5
    across, down = (np.abs((grid - c + size / 2) % size - size / 2) for c in centre)
    if shape == "circle":
        distance = np.hypot(across[None, :], down[:, None])
    else:
        narrow = 0.5 if shape == "bar" else 1.0
        distance = np.maximum(across[None, :] / narrow, down[:, None])
    return np.clip(radius - distance + 0.5, 0, 1)


def frames(size: int, count: int, shape: str, colour: str, direction: str, start: tuple[float, float]) -> np.ndarray:
    """Return [count, size, size, 3] of a shape that moves by a sixteenth of the picture per frame."""
    out = np.empty((count, size, size, 3), np.uint8)
    step = size / 16
    for number in range(count):
        centre = tuple((s + d * step * number) % size for s, d in zip(start, DIRECTIONS[direction], strict=True))
        cover = mask(shape, size, centre, size / 5)[..., None]
        out[number] = np.round(cover * COLOURS[colour] + (1 - cover) * 24)
    return out


def start_of(direction: str, size: int, lane: float, edge: float) -> tuple[float, float]:
    """Return where a shape begins: near the edge that it moves away from, so that it crosses the picture."""
    along = edge if direction in ("left", "up") else size - edge
    return (along, lane) if direction in ("left", "right") else (lane, along)


def write_clip(path: Path, pictures: np.ndarray, fps: int = 8, gop: int = 12) -> None:
    """Encode frames with H.264, a keyframe every `gop` frames."""
    path.parent.mkdir(parents=True, exist_ok=True)
    height, width = pictures.shape[1:3]
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=fps, options={"crf": "12", "g": str(gop), "threads": "1"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.time_base = Fraction(1, fps)
        for picture in pictures:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, "rgb24")))
        container.mux(stream.encode())


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description="Short videos of moving shapes, with captions and labels.")
    parser.add_argument("out", metavar="OUT", nargs="?", default="data/clips-files", help="folder (%(default)s)")
    parser.add_argument("clips", metavar="CLIPS", nargs="?", type=int, default=96, help="clips (%(default)s)")
    parser.add_argument("size", metavar="SIZE", nargs="?", type=int, default=32, help="width, height (%(default)s)")
    parser.add_argument("frames", metavar="FRAMES", nargs="?", type=int, default=24, help="of a clip (%(default)s)")
    options = parser.parse_args()
    out, clips, size, count = Path(options.out), options.clips, options.size, options.frames
    out.mkdir(parents=True, exist_ok=True)
    generator = random.Random(1)
    with (out / "captions.jsonl").open("w") as captions:
        for number in range(clips):
            scene, turn = divmod(number, PER_SCENE)
            if turn == 0:
                shape, colour = generator.choice(SHAPES), generator.choice(list(COLOURS))
                lane, edge = generator.uniform(0, size), generator.uniform(0.7, 0.9) * size
            direction = list(DIRECTIONS)[turn]
            start = start_of(direction, size, lane, edge)
            name = f"scene-{scene:03d}/{direction}.mp4"
            write_clip(out / "clips" / name, frames(size, count, shape, colour, direction, start))
            row = {
                "file": name,
                "captions": [f"a {colour} {shape} moves {direction}", f"{direction}: a {shape}, {colour}"],
                "label": turn,
                "source": f"scene-{scene:03d}",
            }
            print(json.dumps(row), file=captions)
    print(f"{out}: {clips} clips of {count} frames, {size} x {size} pixels")


if __name__ == "__main__":
    main()
