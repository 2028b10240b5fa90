"""Clips of datasets of images and video, and contact sheets of them.

Files of a dataset are decoded by a process of their own, `python -m headway.dashboard.sheets FOLDER OUT CLIP...`, with
limits of memory and time: a damaged or hostile one ends that process and not the server.
"""

import contextlib
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headway.data.media.dataset import open_media
from headway.errors import RunError

SHOWN = 15
"""Clips on a page."""
LIMIT_S, LIMIT_BYTES = 60, 4 << 30
LONGEST_CAPTION = 400


def clip_page(folder: Path, first: int) -> dict[str, Any]:
    """Return what the index of a dataset says of some of its clips."""
    dataset = open_media(folder, verify="sizes")
    clips = [dataset.clip(number) for number in _numbers(dataset.clips, first)]
    return {
        "count": dataset.clips,
        "first": first,
        "clips": [
            {
                "clip": clip.number,
                "name": clip.name,
                "captions": [caption[:LONGEST_CAPTION] for caption in clip.captions],
                "label": clip.label,
                "width": clip.width,
                "height": clip.height,
                "frames": clip.frames,
                "seconds": clip.duration_s,
            }
            for clip in clips
        ],
    }


def contact_sheet(folder: Path, first: int) -> bytes:
    """Return a PNG with frames of the clips of a page."""
    numbers = _numbers(open_media(folder, verify="sizes").clips, first)
    with tempfile.TemporaryDirectory(prefix="headway-sheet-") as work:
        out = Path(work, "sheet.png")
        command = [sys.executable, "-m", "headway.dashboard.sheets", str(folder), str(out), *map(str, numbers)]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT_S)
        if not out.is_file():
            raise RunError("these clips could not be drawn", hint=f"headway data show {folder} names what is wrong")
        return out.read_bytes()


def _numbers(clips: int, first: int) -> range:
    return range(min(first, clips), min(first + SHOWN, clips))


def main(folder: str, out: str, clips: Sequence[str]) -> None:
    """Draw a sheet, within limits; a file appears when it is whole."""
    from headway.data.media.sheet import write_sheet

    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))
    partial = Path(f"{out}.partial")
    write_sheet(open_media(folder, verify="sizes"), [int(clip) for clip in clips], partial)
    partial.rename(out)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
