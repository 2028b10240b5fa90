"""Inference: token ids out of a decoder, and text out of a run."""

from headway.inference.generate import generate_ids, sample_token, text_pieces

__all__ = ["generate_ids", "sample_token", "text_pieces"]
