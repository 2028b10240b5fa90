"""A contact sheet: frames of clips in rows, with their captions, as one PNG."""

from collections.abc import Sequence
from pathlib import Path

from headway.data.media.dataset import MediaDataset
from headway.data.media.decode import decode_samples, need
from headway.data.media.manifest import Kind
from headway.data.media.specs import SampleSpec

TILE = 160
"""Pixels along the longer edge of a frame on the sheet."""
FRAMES = 5
"""Frames of a video in a row."""
ACROSS = 5
"""Images in a row."""
ROWS = 8
"""Rows of a full page."""
GAP, LINE = 8, 16


def full_page(kind: Kind) -> int:
    """Return how many clips a page shows."""
    return ROWS * (1 if kind == "video" else ACROSS)


def write_sheet(dataset: MediaDataset, clips: Sequence[int], out: Path) -> None:
    """Write frames of clips: of videos a row each, of images five in a row."""
    need("PIL.Image")
    from PIL import Image, ImageDraw

    per_clip = FRAMES if dataset.kind == "video" else 1
    across = 1 if dataset.kind == "video" else ACROSS
    cell = (per_clip * (TILE + GAP), TILE + LINE + GAP)
    rows = -(-len(clips) // across)
    sheet = Image.new("RGB", (across * cell[0] + GAP, rows * cell[1] + GAP), (250, 250, 250))
    draw = ImageDraw.Draw(sheet)
    for place, number in enumerate(clips):
        row, column = divmod(place, across)
        left, top = column * cell[0] + GAP, row * cell[1] + GAP
        clip = dataset.clip(number)
        scale = TILE / max(clip.width, clip.height)
        size = (max(1, round(clip.width * scale)), max(1, round(clip.height * scale)))
        starts = sorted({index * (clip.frames - 1) // max(per_clip - 1, 1) for index in range(per_clip)})
        specs = [SampleSpec(0, number, start, 1, 1, size, (0, 0), size, False, None, 0) for start in starts]
        for index, pixels in enumerate(decode_samples(dataset.kind, dataset.content(clip), clip, specs)):
            sheet.paste(Image.fromarray(pixels[0]), (left + index * (TILE + GAP), top))
        words = clip.captions[0] if clip.captions else clip.name
        draw.text((left, top + size[1] + 2), _shortened(words, cell[0] - GAP), fill=(30, 30, 30))
    sheet.save(out, format="PNG")


def _shortened(text: str, width: int) -> str:
    most = width // 6  # the built-in font is about so wide
    plain = "".join(c if c.isprintable() and ord(c) < 256 else "?" for c in text)
    return plain if len(plain) <= most else plain[: most - 3] + "..."
