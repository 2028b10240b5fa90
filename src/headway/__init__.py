"""Headway trains foundation models and accounts for every GPU-second."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.inference import LLM, SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import what needs torch only when it is used."""
    if name in ("LLM", "SamplingParams"):
        return getattr(importlib.import_module("headway.inference"), name)
    raise AttributeError(f"module 'headway' has no attribute {name!r}")
