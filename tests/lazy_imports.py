"""Large libraries, imported when a test first needs them: every tester collects all tests, but runs only some."""

import importlib
import warnings
from typing import Any

__all__ = ["dct", "diffusers", "openai", "transformers"]


class _Later:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "pytestmark":  # pytest looks for these in all that a module has
            raise AttributeError(name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return getattr(importlib.import_module(self._name), name)


dct: Any = _Later("scipy.fft")
diffusers: Any = _Later("diffusers")
openai: Any = _Later("openai")
transformers: Any = _Later("transformers")
