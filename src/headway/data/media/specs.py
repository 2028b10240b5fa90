"""What a sample is: a part of a clip. Decoder processes import this, so it imports nothing."""

from typing import NamedTuple


def span(frames: int, stride: int) -> int:
    """Return over how many frames of a clip a sample extends."""
    return (frames - 1) * stride + 1


class SampleSpec(NamedTuple):
    """A part of a clip, and what is made of it."""

    number: int
    clip: int
    start: int
    """Its first frame."""
    frames: int
    stride: int
    resize: tuple[int, int]
    """Width and height that the clip's frames, as shown, are scaled to."""
    crop: tuple[int, int]
    """Left and top edge of the sample in the scaled frames."""
    size: tuple[int, int]
    """Width and height of the sample."""
    flip: bool
    caption: int | None
    """Which of the clip's captions; None: the sample has none."""
    bucket: int
    segment: int = 0
    """First frame of the segment that it is taken from."""

    @property
    def end(self) -> int:
        """The frame after its last."""
        return self.start + span(self.frames, self.stride)
