"""Between pixels and the numbers that diffusion models see: 0 to 255 is -1 to 1."""

import torch
from torch import Tensor

from headway.errors import ModelError

GRAY = (0.299, 0.587, 0.114)


def to_samples(pixels_NTYXC: Tensor, channels: int) -> Tensor:
    """Return samples [N, C, T, Y, X] of RGB pixels (uint8); with one channel, their brightness."""
    scaled = pixels_NTYXC.movedim(-1, 1).float() / 127.5 - 1
    if channels == 3:
        return scaled
    if channels != 1:
        raise ModelError(
            f"model.in_channels is {channels}, but pixels have 3 channels",
            hint="--set model.in_channels=3, or 1 for gray",
        )
    weights = torch.tensor(GRAY, device=scaled.device).view(1, 3, 1, 1, 1)
    return (scaled * weights).sum(dim=1, keepdim=True)


def first_frame(samples_NCTYX: Tensor, channels: int) -> Tensor:
    """Return what an image-to-video model takes beside a sample: its first frame, and zeros in place of the others.

    Before the frame's channels, the rest of `channels` is a mask: 1 where a frame is given.
    """
    out = samples_NCTYX.new_zeros(len(samples_NCTYX), channels, *samples_NCTYX.shape[2:])
    masks = channels - samples_NCTYX.shape[1]
    out[:, :masks, 0], out[:, masks:, 0] = 1, samples_NCTYX[:, :, 0]
    return out


def to_pixels(samples_NCTYX: Tensor) -> Tensor:
    """Return RGB pixels (uint8) [N, T, Y, X, 3] of samples of one or three channels."""
    levels = ((samples_NCTYX.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return levels.expand(-1, 3, -1, -1, -1).movedim(1, -1).contiguous()
