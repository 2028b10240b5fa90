"""Headway trains foundation models and accounts for every GPU-second."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.api import load, plan, runs, train
    from headway.inference import LLM, SamplingParams
    from headway.policy_client import PolicyClient
    from headway.track.logged_values import Artifact, Audio, Image, Table
    from headway.track.user_log import log

__all__ = [
    "LLM",
    "Artifact",
    "Audio",
    "Image",
    "PolicyClient",
    "SamplingParams",
    "Table",
    "__version__",
    "load",
    "log",
    "plan",
    "runs",
    "train",
]

__version__ = "0.1.0"

_LAZY = {
    "Artifact": "headway.track.logged_values",
    "Audio": "headway.track.logged_values",
    "Image": "headway.track.logged_values",
    "LLM": "headway.inference",
    "PolicyClient": "headway.policy_client",
    "SamplingParams": "headway.inference",
    "Table": "headway.track.logged_values",
    "load": "headway.api",
    "log": "headway.track.user_log",
    "runs": "headway.api",
}
"""Names that are imported when they are used, and from where."""
_CALLABLE = ("plan", "train")
"""Packages that can be called; see `headway.callable_package`."""


def __getattr__(name: str) -> Any:
    """Import a name when it is used."""
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name in _CALLABLE:
        return importlib.import_module(f"headway.{name}")
    raise AttributeError(f"module 'headway' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The names to complete, whether they are imported yet or not."""
    return __all__
