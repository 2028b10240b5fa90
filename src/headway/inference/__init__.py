"""Inference: generate token ids from a decoder, and text from a run."""

from headway.inference.generate import generate_ids, sample_token, text_pieces

__all__ = ["generate_ids", "sample_token", "text_pieces"]
