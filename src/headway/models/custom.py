"""Custom model classes: imported by the name in a recipe, and constructed with its arguments.

Only that name decides what is imported: never a checkpoint or another file. Any error of the class becomes one
sentence.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from headway.errors import ModelError
from headway.models.diffusion.families import empty_transformer
from headway.models.families import empty_decoder
from headway.recipe import Model
from headway.recipe.families.diffusion import DiffusionModel
from headway.recipe.own_code import describe_error, load_name, near_names

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


def build_own(model: Model, device: torch.device | str) -> nn.Module:
    """Construct a recipe's custom class; on the meta device it takes no memory."""
    assert model.class_ is not None, "decoders of families are built elsewhere"
    module = _construct(load_class(model.class_), model, torch.device(device))
    _check_place(module, torch.device(device))
    _check_registered(module)
    _part_buffers(module)
    return module


def _construct(cls: type[nn.Module], model: Model, device: torch.device) -> nn.Module:
    _check_arguments(cls, model.args)
    try:
        with device:
            return cls(**model.args)
    except Exception as error:
        if device.type == "meta":
            wrong = f"{model.class_} cannot be built on the meta device, where tensors have no values"
            raise ModelError(
                f"{wrong}: {describe_error(error)}",
                hint=NO_VALUES,
            ) from error
        raise ModelError(f"{model.class_} cannot be built with model.args: {describe_error(error)}") from error


def _check_arguments(cls: type[nn.Module], args: dict[str, Any]) -> None:
    """Raise ModelError for unknown or missing arguments, before the constructor runs."""
    taken = inspect.signature(cls).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
        for name in args:
            if name not in taken:
                raise ModelError(f"{cls.__name__} takes no argument {name}", hint=near_names(name, taken, "it takes"))
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


def empty_model(model: Model) -> nn.Module:
    """Return the recipe's plain model on the meta device."""
    if isinstance(model, DiffusionModel):
        return empty_transformer(model, "meta")
    return empty_decoder(model, "meta") if model.class_ is None else build_own(model, "meta")
