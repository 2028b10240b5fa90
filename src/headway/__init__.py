"""Headway trains foundation models and accounts for every GPU-second."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.inference import LLM, SamplingParams
    from headway.policy_client import PolicyClient

__all__ = ["LLM", "PolicyClient", "SamplingParams", "__version__"]

__version__ = "0.1.0"

_NEED_TORCH = {
    "LLM": "headway.inference",
    "PolicyClient": "headway.policy_client",
    "SamplingParams": "headway.inference",
}
"""Names that are imported when they are used, and from where."""


def __getattr__(name: str) -> Any:
    """Import what needs torch only when it is used."""
    if name in _NEED_TORCH:
        return getattr(importlib.import_module(_NEED_TORCH[name]), name)
    raise AttributeError(f"module 'headway' has no attribute {name!r}")
