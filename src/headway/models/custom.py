"""Custom model classes: imported by the name in a recipe, and constructed with its arguments.

Only that name decides what is imported: never a checkpoint or another file. Any error of the class becomes one
sentence.
"""

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from headway.errors import ModelError
from headway.recipe import Model

NO_VALUES = "its constructor must not read values of tensors (.item(), .numpy(), if), nor name a device"


def load_class(spec: str) -> type[nn.Module]:
    """Return the model class named by `package.module:Class`."""
    cls = load_name(spec, "model.class", _is_model)
    if not _is_model(cls):
        raise ModelError(
            f"model.class names {spec}, which is not a model class",
            hint="a model class derives from torch.nn.Module",
        )
    model: type[nn.Module] = cls
    return model


def load_name(spec: str, key: str, similar: Callable[[Any], bool] = inspect.isclass) -> Any:
    """Return what `package.module:name` names, for a recipe's key; if it is missing, a hint names what is `similar`."""
    module_name, _, name = spec.partition(":")
    module = _import(module_name, key)
    value = getattr(module, name, None)
    if value is None:
        others = [other for other, of in vars(module).items() if similar(of)]
        raise ModelError(
            f"{key} names {spec}, but {module_name} has no {name}", hint=_near(name, others, f"{module_name} has")
        )
    return value


def build_own(model: Model, device: torch.device | str) -> nn.Module:
    """Construct a recipe's custom class; on the meta device it takes no memory."""
    assert model.class_ is not None, "decoders of families are built elsewhere"
    module = _construct(load_class(model.class_), model, torch.device(device))
    _check_place(module, torch.device(device))
    _check_registered(module)
    _part_buffers(module)
    return module


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
        raise ModelError(f"{key}: importing {module_name} failed: {_describe(error)}") from error


def _construct(cls: type[nn.Module], model: Model, device: torch.device) -> nn.Module:
    _check_arguments(cls, model.args)
    try:
        with device:
            return cls(**model.args)
    except Exception as error:
        if device.type == "meta":
            raise ModelError(
                f"{model.class_} cannot be built on the meta device, where tensors have no values: {_describe(error)}",
                hint=NO_VALUES,
            ) from error
        raise ModelError(f"{model.class_} cannot be built with model.args: {_describe(error)}") from error


def _check_arguments(cls: type[nn.Module], args: dict[str, Any]) -> None:
    """Raise ModelError for unknown or missing arguments, before the constructor runs."""
    taken = inspect.signature(cls).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
        for name in args:
            if name not in taken:
                raise ModelError(f"{cls.__name__} takes no argument {name}", hint=_near(name, taken, "it takes"))
    required = [
        name
        for name, parameter in taken.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    missing = [name for name in required if name not in args]
    if missing:
        raise ModelError(
            f"{cls.__name__} needs an argument {missing[0]}",
            hint=f"set it in the recipe's [model.args] or with --set model.args.{missing[0]}=...",
        )


def _check_place(model: nn.Module, device: torch.device) -> None:
    """Raise ModelError for parameters with an explicit device: every worker would allocate the whole model."""
    for name, parameter in model.named_parameters():
        if parameter.device.type != device.type:
            raise ModelError(f"{type(model).__name__} puts {name} onto {parameter.device.type} itself", hint=NO_VALUES)


def _check_registered(model: nn.Module) -> None:
    """Raise ModelError for tensors that are plain attributes: they do not move with the module."""
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor):
                path = f"{name}.{key}".lstrip(".")
                raise ModelError(
                    f"{type(model).__name__} has a tensor {path} that is neither a parameter nor a buffer",
                    hint=f'self.register_buffer("{key}", ..., persistent=False) makes it a part of the model',
                )


def _part_buffers(model: nn.Module) -> None:
    """Untie buffers: memory is allocated by name, which would separate them anyway."""
    seen = set[int]()
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and id(buffer) in seen:
                module._buffers[key] = buffer = buffer.clone()
            seen.add(id(buffer))


def _is_model(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


def _describe(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _near(name: str, names: Iterable[str], prefix: str) -> str | None:
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
