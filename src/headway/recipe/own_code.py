"""Code of the user's own, imported by `package.module:name`.

Only the name in a recipe or a command decides what is imported: never a checkpoint or another file. Any error becomes
one sentence.
"""

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from headway.errors import ModelError

OWN_NAME = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
"""`package.module:name`."""


def load_name(spec: str, key: str, similar: Callable[[Any], bool] = inspect.isclass) -> Any:
    """Return what `package.module:name` names, for a recipe's key; if it is missing, a hint names what is `similar`."""
    module_name, _, name = spec.partition(":")
    module = _import(module_name, key)
    value = getattr(module, name, None)
    if value is None:
        others = [other for other, of in vars(module).items() if similar(of)]
        raise ModelError(
            f"{key} names {spec}, but {module_name} has no {name}", hint=near_names(name, others, f"{module_name} has")
        )
    return value


def _import(module_name: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if missing != module_name and not module_name.startswith(f"{missing}."):
            raise ModelError(
                f"{key}: {module_name} imports {missing}, which is not installed", hint=f"install {missing} first"
            ) from error
        raise ModelError(f"{key}: no module {missing}", hint=_near_modules(missing)) from error
    except (Exception, SystemExit) as error:  # an import may raise anything
        raise ModelError(f"{key}: importing {module_name} failed: {describe_error(error)}") from error


def describe_error(error: BaseException) -> str:
    """Return the kind and the first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def near_names(name: str, names: Iterable[str], prefix: str) -> str | None:
    """Return a hint with similar names, or all if none is similar."""
    names = sorted(names)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5) or names[:8]
    return f"{prefix} {', '.join(near)}" if near else None


def _near_modules(missing: str) -> str:
    """Return a hint for a missing module."""
    package, _, name = missing.rpartition(".")
    path = importlib.import_module(package).__path__ if package else None
    near = difflib.get_close_matches(name, [module.name for module in pkgutil.iter_modules(path)], n=3)
    if package:
        return f"{package} has {', '.join(near)}" if near else f"look for {name} in {package}"
    here = next((file for file in (Path(f"{name}.py"), Path(name)) if file.exists()), None)
    if here is not None:  # workers import what is on PYTHONPATH, not what is in the current folder
        return f"{here} is in this folder: put PYTHONPATH=. before the command"
    question = f"did you mean {' or '.join(near)}? " if near else ""
    return f"{question}install the package that has {name}, or add its folder to PYTHONPATH"
