"""Lets `hw.train(...)` and `hw.plan(...)` be called, although `headway.train` and `headway.plan` are packages.

Python allows a module's class to be replaced, for this kind of use; nothing but the call is added.
"""

import importlib
import sys
from types import ModuleType
from typing import Any


class CallablePackage(ModuleType):
    """A package that can be called as the function of `headway.api` with its name."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call the function."""
        return getattr(importlib.import_module("headway.api"), self.__name__.rpartition(".")[2])(*arguments, **options)


def make_callable(name: str) -> None:
    """Make a package callable."""
    sys.modules[name].__class__ = CallablePackage
