"""Headway trains foundation models and accounts for every GPU-second."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.inference import LLM, SamplingParams
    from headway.policy_client import PolicyClient
    from headway.track.logged_values import Artifact, Audio, Image, Table
    from headway.track.user_log import log

__all__ = ["LLM", "Artifact", "Audio", "Image", "PolicyClient", "SamplingParams", "Table", "__version__", "log"]

__version__ = "0.1.0"

_LAZY = {
    "Artifact": "headway.track.logged_values",
    "Audio": "headway.track.logged_values",
    "Image": "headway.track.logged_values",
    "LLM": "headway.inference",
    "PolicyClient": "headway.policy_client",
    "SamplingParams": "headway.inference",
    "Table": "headway.track.logged_values",
    "log": "headway.track.user_log",
}
"""Names that are imported when they are used, and from where."""


def __getattr__(name: str) -> Any:
    """Import a name when it is used."""
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'headway' has no attribute {name!r}")
