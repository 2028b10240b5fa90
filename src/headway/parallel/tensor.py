"""The tensor axis: each matrix of a layer is split over the axis's workers, from outside the model.

Parameters become DTensors, whose placements serve saving, loading and counting; arithmetic sees plain local tensors. A
module's own `forward` runs unchanged on its share of the weights, between a collective before and one after it. If some
modules gather the sequence, the stream is split by sequence elsewhere.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from headway.models.layers import RMSNorm
from headway.parallel.collectives import copied, gathered, scattered, summed
from headway.parallel.layout import Cut, TensorCuts
from headway.parallel.local_part import Forward, local_values, on_local, placed, share_of, to_local
from headway.parallel.pipeline import PassThrough
from headway.parallel.world import Axis
from headway.recipe.lora import A, B

SEQUENCE = 1
"""The token dim of a stream [B, L, D]."""


def cut_tensors(model: nn.Module, cuts: TensorCuts, mesh: DeviceMesh, axis: Axis) -> frozenset[str]:
    """Split a model over an axis; return the parameters whose gradients must be summed over it."""
    modules = dict(model.named_modules())
    replaced = dict[int, nn.Parameter]()  # by the original parameter, so that tied ones stay tied
    partial_sums = set[str]()
    for name, module in modules.items():
        cut = _cut_of(name, cuts)
        for key, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in replaced:
                replaced[id(parameter)] = placed(parameter, _placement(cut, key), mesh, axis)
            module._parameters[key] = replaced[id(parameter)]
            if _is_partial(cut, key, cuts):
                partial_sums.add(f"{name}.{key}")
        _cut_forward(module, name, cut, cuts, axis)
    for name, attribute in cuts.divided:
        if name in modules and hasattr(modules[name], attribute):  # else it is another stage's
            setattr(modules[name], attribute, getattr(modules[name], attribute) // axis.size)
    return frozenset(partial_sums)


def _cut_of(name: str, cuts: TensorCuts) -> Cut | None:
    """Return the value for a module, or for its closest ancestor."""
    while name:
        if name in cuts.cuts:
            return cuts.cuts[name]
        name = name.rpartition(".")[0]
    return None


def _placement(cut: Cut | None, key: str) -> Placement:
    if cut in ("columns", "vocabulary", "features"):
        return Replicate() if key == A else Shard(0)
    return Shard(1) if cut == "rows" and key in ("weight", A) else Replicate()


def _is_partial(cut: Cut | None, key: str, cuts: TensorCuts) -> bool:
    """Whether a replicated parameter's gradient is only a part of it on each worker: one that sees some of the tokens,
    or the side of an adapter that is not split."""
    if cut in ("share", "keys"):
        return True
    return (cut, key) in (("columns", A), ("rows", B)) or (cut == "rows" and key == "bias" and cuts.by_sequence)


# -- collectives before and after a module


def _cut_forward(module: nn.Module, name: str, cut: Cut | None, cuts: TensorCuts, axis: Axis) -> None:
    """Wrap a module's `forward`, which sees local tensors, with its collectives."""
    computes = any(True for _ in module.parameters(recurse=False)) or name in cuts.whole
    if not computes or isinstance(module, PassThrough):
        return
    values = partial(_own_head, cuts.key_heads, axis) if cut == "keys" else local_values
    forward: Forward = partial(on_local, module, module.forward, values)
    if cut == "features":
        assert isinstance(module, RMSNorm), "other norms need other statistics"
        forward = partial(on_local, module, partial(_norm_of_share, module, axis), local_values)
    elif cut == "rows":
        forward = partial(_rows, module, module.forward, _leave(cuts, axis))
    elif cut == "vocabulary" and isinstance(module, nn.Embedding):
        forward = partial(_embed, forward, share_of(module.weight.shape[0], axis), _leave(cuts, axis))
    elif name in cuts.whole or (cut in ("columns", "vocabulary") and cuts.enters(name)):
        forward = partial(_entering, forward, _enter(cuts, axis))
    module.forward = forward


def _enter(cuts: TensorCuts, axis: Axis) -> Callable[[Tensor], Tensor]:
    """Return the collective that brings the stream to a module that sees all of it."""
    assert axis.group is not None, "an axis of one place cuts nothing"
    return partial(gathered, dim=SEQUENCE, group=axis.group) if cuts.by_sequence else partial(copied, group=axis.group)


def _leave(cuts: TensorCuts, axis: Axis) -> Callable[[Tensor], Tensor]:
    """Return the collective that reduces partial sums to the stream."""
    assert axis.group is not None, "an axis of one place cuts nothing"
    return partial(scattered, dim=SEQUENCE, group=axis.group) if cuts.by_sequence else partial(summed, group=axis.group)


def _entering(forward: Forward, enter: Callable[[Tensor], Tensor], x: Tensor, *rest: Any, **named: Any) -> Tensor:
    return forward(enter(x), *rest, **named)


def _rows(module: nn.Module, plain: Forward, leave: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Row-parallel product; the bias is added once, to the sum."""
    bias = module._parameters.get("bias")

    def without_bias(parameters: dict[str, Any]) -> dict[str, Any]:
        return {**local_values(parameters), **({} if bias is None else {"bias": None})}

    y = leave(on_local(module, plain, without_bias, x))
    return y if bias is None else y + to_local(bias)


def _norm_of_share(module: RMSNorm, axis: Axis, x: Tensor) -> Tensor:
    """RMSNorm over features that are split: the sum of squares is that of all shares, and so is its gradient."""
    assert axis.group is not None, "an axis of one place cuts nothing"
    own = x.float()
    squares = copied(summed(own.square().sum(dim=-1, keepdim=True), axis.group), axis.group)
    normal = own * torch.rsqrt(squares / (x.shape[-1] * axis.size) + module.eps)
    return normal.to(x.dtype) * module.weight.to(x.dtype)


def _embed(
    forward: Forward, rows: tuple[int, int], leave: Callable[[Tensor], Tensor], tokens: Tensor, *rest: Any
) -> Tensor:
    """Vocabulary-parallel embedding: each worker looks up its own rows; other tokens are zeros."""
    begin, end = rows
    elsewhere = (tokens < begin) | (tokens >= end)
    embedded = forward((tokens - begin).masked_fill(elsewhere, 0), *rest)
    return leave(embedded.masked_fill(elsewhere.unsqueeze(-1), 0))


def _own_head(heads: int, axis: Axis, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return, of a projection to fewer heads than workers, the one head that this worker's queries use."""
    which = axis.rank // (axis.size // heads)
    local = {key: tensor for key, tensor in local_values(parameters).items() if tensor is not None}
    return {key: tensor if key == A else tensor.unflatten(0, (heads, -1))[which] for key, tensor in local.items()}
