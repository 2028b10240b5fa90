"""Inference: an engine that runs the decoders of `models/` with a paged KV cache, its Python API and its server."""

from headway.inference.llm import LLM, Completion, Generated
from headway.inference.load import LoadedModel, load_model
from headway.inference.params import SamplingParams
from headway.inference.text_engine import EngineOptions, TextEngine

__all__ = [
    "LLM",
    "Completion",
    "EngineOptions",
    "Generated",
    "LoadedModel",
    "SamplingParams",
    "TextEngine",
    "load_model",
]
