"""Classes of the user's own: found by the name that a recipe gives, and built from its arguments.

Nothing but that name decides what is imported: never a checkpoint, never a file that lies about. Whatever is wrong with
the class comes out as one sentence.
"""

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from headway.errors import ModelError
from headway.recipe import Model

__all__ = ["build_own", "load_class"]

NO_VALUES = "its constructor must not look at values of tensors (.item(), .numpy(), if), nor name a device"
IN_THIS_FOLDER = "PYTHONPATH=. headway train ... finds modules that lie in this folder; others must be installed"


def load_class(spec: str) -> type[nn.Module]:
    """The class that `package.module:Class` names."""
    place, _, name = spec.partition(":")
    module = _import(place)
    found = getattr(module, name, None)
    if found is None:
        others = [key for key, value in vars(module).items() if _is_model(value)]
        raise ModelError(
            f"model.class names {spec}, and {place} has no {name}", hint=_near(name, others, f"{place} has")
        )
    if not _is_model(found):
        raise ModelError(
            f"model.class names {spec}, which is no class of models",
            hint="a model is a class that is derived from torch.nn.Module",
        )
    model: type[nn.Module] = found
    return model


def build_own(model: Model, device: torch.device | str) -> nn.Module:
    """A recipe's own class, called with its arguments; on the meta device it takes no memory."""
    assert model.class_ is not None, "a decoder is not built here"
    made = _construct(load_class(model.class_), model, torch.device(device))
    _check_place(made, torch.device(device))
    _check_registered(made)
    _part_buffers(made)
    return made


def _import(place: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        missing = error.name or place
        if missing != place and not place.startswith(f"{missing}."):
            raise ModelError(
                f"model.class: {place} imports {missing}, which is not installed", hint=f"install {missing} first"
            ) from error
        raise ModelError(f"model.class: there is no module {missing}", hint=_near_modules(missing)) from error
    except (Exception, SystemExit) as error:  # a module may do anything while it is imported
        raise ModelError(f"model.class: importing {place} failed: {_words(error)}") from error


def _construct(found: type[nn.Module], model: Model, device: torch.device) -> nn.Module:
    _check_arguments(found, model.args)
    try:
        with device:
            return found(**model.args)
    except Exception as error:
        if device.type == "meta":
            raise ModelError(
                f"{model.class_} cannot be built on the meta device, where tensors have no values: {_words(error)}",
                hint=NO_VALUES,
            ) from error
        raise ModelError(f"{model.class_} cannot be built with model.args: {_words(error)}") from error


def _check_arguments(found: type[nn.Module], args: dict[str, Any]) -> None:
    """Find arguments that the constructor does not take, or misses, before it runs."""
    taken = inspect.signature(found).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
        for name in args:
            if name not in taken:
                raise ModelError(f"{found.__name__} takes no argument {name}", hint=_near(name, taken, "it takes"))
    required = [
        name
        for name, parameter in taken.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    missing = [name for name in required if name not in args]
    if missing:
        raise ModelError(
            f"{found.__name__} needs an argument {missing[0]}",
            hint=f"--set model.args.{missing[0]}=... or a line in the recipe's [model.args] gives it",
        )


def _check_place(model: nn.Module, device: torch.device) -> None:
    """Parameters that are put somewhere by name would take the memory of a whole model in every worker."""
    for name, parameter in model.named_parameters():
        if parameter.device.type != device.type:
            place = parameter.device.type
            raise ModelError(f"{type(model).__name__} puts {name} onto {place} itself", hint=NO_VALUES)


def _check_registered(model: nn.Module) -> None:
    """A tensor that a module merely has as an attribute stays behind when the module goes to its device."""
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor):
                where = f"{name}.{key}".lstrip(".")
                raise ModelError(
                    f"{type(model).__name__} has a tensor {where} that is neither parameter nor buffer",
                    hint=f'self.register_buffer("{key}", ..., persistent=False) makes it a part of the model',
                )


def _part_buffers(model: nn.Module) -> None:
    """Give each name a buffer of its own. Memory is given to one name after the other, which would part them anyway."""
    seen = set[int]()
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and id(buffer) in seen:
                module._buffers[key] = buffer = buffer.clone()
            seen.add(id(buffer))


def _is_model(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


def _words(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _near(name: str, names: Iterable[str], lead: str) -> str | None:
    """The nearest of some names, or all of them where none is near."""
    names = sorted(names)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5) or names[:8]
    return f"{lead} {', '.join(near)}" if near else None


def _near_modules(missing: str) -> str:
    """Where to look for a module that is not there."""
    package, _, name = missing.rpartition(".")
    path = importlib.import_module(package).__path__ if package else None
    near = difflib.get_close_matches(name, [module.name for module in pkgutil.iter_modules(path)], n=3)
    if package:
        return f"{package} has {', '.join(near)}" if near else f"look for {name} in {package}"
    return f"did you mean {' or '.join(near)}? {IN_THIS_FOLDER}" if near else IN_THIS_FOLDER
