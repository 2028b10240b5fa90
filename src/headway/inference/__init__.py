"""Inference: token ids out of a decoder, and text out of a run."""

from headway.inference.generate import choose, generate, text_pieces

__all__ = ["choose", "generate", "text_pieces"]
