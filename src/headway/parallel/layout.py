"""How a model is split, by module names: for built-in families here, for custom classes in the recipe."""

import difflib
import re
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from headway.errors import ModelError
from headway.models import Decoder
from headway.models.diffusion import DiffusionTransformer
from headway.models.diffusion.wan import WideRMSNorm
from headway.plan.stages import stages_by_cost
from headway.recipe import ModelLayout, Parallel, Recipe

Cut = Literal["columns", "rows", "vocabulary", "share", "keys", "features"]
"""How the tensor axis splits a module; `keys` is a projection to fewer heads than workers, which is replicated;
`features` a norm over what is split, whose statistics are summed."""

DECODER = ModelLayout(
    blocks="layers",
    first=("embed",),
    last=("norm", "head", "score"),
    columns=(
        *(f"layers.*.attention.{name}" for name in ("q", "k", "v")),
        *(f"layers.*.mlp.{name}" for name in ("gate", "up")),
    ),
    rows=("layers.*.attention.o", "layers.*.mlp.down"),
    vocabulary=("embed", "head"),
    share=(
        "layers.*.*norm",
        "layers.*.attention.q_norm",
        "layers.*.attention.k_norm",
        "norm",
        "embed.positions",
        "score",
    ),
    whole=("layers.*.attention", "layers.*.mlp"),
)
DIFFUSION = ModelLayout(
    blocks="layers",
    columns=(
        *(f"layers.*.{part}.{name}" for part in ("attention", "cross") for name in ("q", "k", "v")),
        *(f"layers.*.cross.image_{name}" for name in ("k", "v")),
        "layers.*.mlp.up",
    ),
    rows=("layers.*.attention.o", "layers.*.cross.o", "layers.*.mlp.down"),
    whole=("layers.*.attention", "layers.*.mlp"),
)
"""Every worker has the whole sequence. Cross-attention is no `whole`: its keys and values have another input."""
BUILT_IN = (DECODER, DIFFUSION)


def layout_of(model: nn.Module, stated: ModelLayout | None) -> ModelLayout:
    """Return the layout of a built-in model, or the recipe's."""
    if isinstance(model, DiffusionTransformer):
        return DIFFUSION
    return DECODER if isinstance(model, Decoder) else stated or ModelLayout()


def blocks_of(model: nn.Module, layout: ModelLayout) -> tuple[str, list[nn.Module]]:
    """Return the name of the list of blocks, and the blocks; without a layout, the longest list."""
    if layout.blocks is not None:
        blocks = dict(model.named_modules()).get(layout.blocks)
        if not isinstance(blocks, nn.ModuleList | nn.Sequential):
            raise ModelError(
                f"model.layout.blocks names {layout.blocks}, which {_lacks(model, blocks)}",
                hint=_nearest(layout.blocks, [n for n, m in model.named_modules() if isinstance(m, nn.ModuleList)]),
            )
        return layout.blocks, list(blocks)
    lists = [(name, list(m)) for name, m in model.named_modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    return max(lists, key=lambda item: len(item[1]), default=("", []))


def _lacks(model: nn.Module, module: nn.Module | None) -> str:
    return f"{_class(model)} lacks" if module is None else f"is a {type(module).__name__}, not a list"


@dataclass(frozen=True)
class TensorCuts:
    """How the tensor axis splits each module, by name."""

    cuts: dict[str, Cut]
    whole: frozenset[str]
    """Modules around columns that take the stream for them; it is gathered there if it is split by sequence."""
    divided: tuple[tuple[str, str], ...]
    """Modules and their attributes that count what is split."""
    splits_sequence: bool = True
    """Whether the stream is split by sequence outside of these."""
    key_heads: int = 0
    """Number of heads of modules split as `keys`."""

    @property
    def by_sequence(self) -> bool:
        """Whether the stream is split by sequence outside of modules that need it whole."""
        return bool(self.whole) and self.splits_sequence

    def is_cut(self, parameter: str) -> bool:
        """Whether the layout says how to split a parameter, by its name."""
        owner = parameter.rpartition(".")[0]
        return any(owner == cut or owner.startswith(f"{cut}.") for cut in self.cuts)

    def enters(self, name: str) -> bool:
        """Whether a module gathers its input itself, and not a module around it."""
        parts = name.split(".")
        return not any(".".join(parts[:end]) in self.whole for end in range(1, len(parts)))


def cuts_of(model: nn.Module, layout: ModelLayout, size: int) -> TensorCuts:
    """Resolve a layout for a model; raise ModelError for unknown names and uneven splits."""
    if isinstance(model, Decoder) and model.model.UNCUT:
        family, why = model.model.family, model.model.UNCUT
        raise ModelError(f"parallel.tensor is {size}, but {family} does not support it: {why}")
    modules = dict(model.named_modules())
    cuts = dict[str, Cut]()
    for kind in ("columns", "rows", "vocabulary", "share"):
        for pattern in getattr(layout, kind):
            cuts |= dict.fromkeys(_matches(model, pattern, modules, kind, optional=layout in BUILT_IN), kind)
    if isinstance(model, Decoder) and model.model.kv_heads % size:
        cuts |= {name: "keys" for name in cuts if name.endswith((".attention.k", ".attention.v"))}
    if isinstance(model, DiffusionTransformer):
        _check_heads(model, size)
        cuts |= {name: "features" for name, module in modules.items() if isinstance(module, WideRMSNorm)}
    gathered = frozenset(n for pattern in layout.whole for n in _matches(model, pattern, modules, "whole"))
    heads = model.model.kv_heads if isinstance(model, Decoder) else 0
    divided = tuple(_divided(model, layout, modules, size))
    tensor_cuts = TensorCuts(cuts, gathered, divided, layout is not DIFFUSION, heads)
    if not {"columns", "rows"} <= {*cuts.values()}:
        linear = [f"{name}.weight" for name, module in modules.items() if isinstance(module, nn.Linear)]
        left_out = next((name for name in linear if not tensor_cuts.is_cut(name)), "its matrices")
        raise ModelError(
            f"parallel.tensor is {size}, but model.layout does not say how to split {left_out} of {_class(model)}",
            hint="name its linear modules in model.layout.columns and rows (docs/guides/own-models.md)",
        )
    for name, cut in cuts.items():
        _check_shape(modules[name], name, cut, size)
    _check_ties(model, tensor_cuts)
    if tensor_cuts.by_sequence:
        _check_covered(model, tensor_cuts)
    return tensor_cuts


_SHAPES = re.compile(r"\b(shapes?|sizes?|dim(ension)?s?)\b")


def explain_shapes(model: nn.Module, cuts: TensorCuts, error: RuntimeError) -> ModelError | None:
    """Return which module and parameter an incomplete layout left out, from the error of a pass; None for other errors.

    A layout that splits some of the modules that feed each other, but not all, fails where they meet: in the innermost
    module on the stack.
    """
    if type(error) is not RuntimeError or not _SHAPES.search(str(error)):
        return None
    names = {id(module): name for name, module in model.named_modules()}
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    inside = [names[key] for frame in frames if (key := id(frame.f_locals.get("self"))) in names]
    if not inside:
        return None
    name = inside[-1]
    place = name.rpartition(".")[0] if name in cuts.cuts else name  # what feeds a split module is beside it
    within = {key: value for key, value in model.named_parameters() if not place or key.startswith(f"{place}.")}
    left_out = [key for key, value in within.items() if value.ndim > 1 and not cuts.is_cut(key)]
    what = f"model.layout is incomplete: {name or _class(model)} failed with {str(error).splitlines()[0]}"
    if left_out:
        owner = left_out[0].rpartition(".")[0]
        hint = f"name {owner} in columns, rows or vocabulary of model.layout"
        return ModelError(f"{what}; {left_out[0]} is not split", hint=hint)
    counts = [key for key, value in vars(dict(model.named_modules())[place]).items() if type(value) is int]
    counts = [f"{place}.{key}" for key in counts if not key.startswith("_") and (place, key) not in cuts.divided]
    hint = f"name the count of heads or features in model.layout.divide: {' or '.join(counts)}" if counts else None
    return ModelError(f"{what}; {next(iter(within), name)} is split, but not every number that follows it", hint=hint)


def _check_shape(module: nn.Module, name: str, cut: Cut, size: int) -> None:
    if cut in ("share", "keys", "features"):
        return
    weight = getattr(module, "weight", None)
    if weight is None or weight.ndim != 2 or (cut != "vocabulary" and not isinstance(module, nn.Linear)):
        raise ModelError(
            f"model.layout.{cut} names {name}, a {type(module).__name__}, which cannot be split that way",
            hint=f"{cut} takes linear modules{' and embeddings' if cut == 'vocabulary' else ''}",
        )
    length = weight.shape[1 if cut == "rows" else 0]
    if cut == "vocabulary":
        if -(-length // size) * (size - 1) >= length:
            raise ModelError(f"a vocabulary of {length} ({name}) is too small for tensor {size}")
        if getattr(module, "padding_idx", None) is not None:
            raise ModelError(f"{name} has a padding_idx, which a split embedding does not support")
    elif length % size:
        side = "inputs" if cut == "rows" else "outputs"
        raise ModelError(f"tensor {size} does not divide the {length} {side} of {name}", hint=_divisors(length))


def _check_heads(model: DiffusionTransformer, size: int) -> None:
    heads = model.model.heads
    if heads % size:
        raise ModelError(f"tensor {size} does not divide the {heads} heads of {_class(model)}", hint=_divisors(heads))


def _divisors(length: int) -> str:
    return f"tensor may be {', '.join(str(n) for n in range(1, min(length, 64) + 1) if length % n == 0)}"


def _check_ties(model: nn.Module, cuts: TensorCuts) -> None:
    """Raise ModelError if a tied parameter is split in different ways."""
    seen = dict[int, str]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = seen.setdefault(id(parameter), name)
        kinds = [cuts.cuts.get(tied.rpartition(".")[0]) for tied in (first, name)]
        if kinds[0] != kinds[1]:
            raise ModelError(
                f"{first} and {name} are tied, but model.layout splits only one of them, or each differently",
                hint="name both modules in the same list: a tied embedding and head in vocabulary",
            )


def _check_covered(model: nn.Module, cuts: TensorCuts) -> None:
    """Raise ModelError for parameters of which a sequence-parallel layout does not say whether they see all tokens."""
    for name, _ in model.named_parameters():
        owner = name.rpartition(".")[0]
        if not cuts.is_cut(name):
            raise ModelError(
                f"model.layout.whole splits sequences, but model.layout does not say what {name} sees of them",
                hint=f"name {owner or 'its module'} in share, columns, rows or vocabulary",
            )


def _divided(
    model: nn.Module, layout: ModelLayout, modules: dict[str, nn.Module], size: int
) -> Iterator[tuple[str, str]]:
    for pattern in layout.divide:
        owner, _, attribute = pattern.rpartition(".")
        for name in _matches(model, owner, modules, "divide") if owner else [""]:
            value: Any = getattr(modules[name], attribute, None)
            key = f"{name}.{attribute}".lstrip(".")
            if not isinstance(value, int):
                what = "does not exist" if value is None else f"is {value!r}, not an integer"
                raise ModelError(f"model.layout.divide names {key}, which {what}")
            if value % size:
                sizes = ", ".join(str(n) for n in range(1, value + 1) if value % n == 0)
                raise ModelError(
                    f"tensor {size} does not divide {key}, which is {value}", hint=f"tensor may be {sizes}"
                )
            yield name, attribute


def check_layout(model: nn.Module, recipe: Recipe, workers: int) -> None:
    """Raise ModelError if a model cannot be split over a recipe's mesh."""
    parallel = recipe.parallel or Parallel()
    sizes, layout, seq = parallel.sizes(workers), layout_of(model, recipe.model.layout), recipe.data.seq
    tensor = sizes["tensor"]
    if tensor > 1 and cuts_of(model, layout, tensor).by_sequence and seq % tensor:
        below = seq // tensor * tensor
        raise ModelError(f"tensor {tensor} does not divide data.seq ({seq})", hint=f"use {below} or {below + tensor}")
    if sizes["pipeline"] > 1:
        check_pipeline(model, layout, stages_of(model, layout, parallel, sizes["pipeline"]))


def stages_of(model: nn.Module, layout: ModelLayout, parallel: Parallel, ranks: int) -> tuple[int, ...]:
    """Return the number of blocks per pipeline stage: as given, or as even as possible."""
    return parallel.stages or stages_by_cost(len(blocks_of(model, layout)[1]), 0.0, 0.0, ranks, parallel.chunks)


def check_pipeline(model: nn.Module, layout: ModelLayout, counts: Iterable[int]) -> None:
    """Raise ModelError if a model cannot be split into stages of these numbers of blocks."""
    counts = tuple(counts)
    if layout is DIFFUSION:
        raise ModelError(
            f"a pipeline of {len(counts)} stages, but diffusion transformers have no pipeline axis",
            hint="use replicate, shard or tensor axes",
        )
    if layout.blocks is None:
        raise ModelError(
            f"a pipeline of {len(counts)} stages, but model.layout does not say where to split {_class(model)}",
            hint="set model.layout.blocks to its list of blocks, first and last to the modules before and after",
        )
    name, blocks = blocks_of(model, layout)
    if len(counts) > len(blocks):
        raise ModelError(
            f"{len(blocks)} blocks ({name} of {_class(model)}) cannot fill {len(counts)} pipeline stages",
            hint=f"parallel.pipeline x chunks may be at most {len(blocks)}",
        )
    if sum(counts) != len(blocks) or min(counts) < 1:
        raise ModelError(
            f"{_class(model)} has {len(blocks)} blocks, but parallel.stages has {', '.join(map(str, counts))}",
            hint=f"parallel.stages must sum to {len(blocks)}; without it they are as even as possible",
        )
    modules = dict(model.named_modules())
    placed = {name}
    for kind in ("first", "last"):
        for pattern in getattr(layout, kind):
            placed |= {*_matches(model, pattern, modules, kind, optional=layout in BUILT_IN)}
    both = {*named(model, layout.first)} & {*named(model, layout.last)}
    if both:
        raise ModelError(f"model.layout has {min(both)} in both first and last")
    for parameter, _ in model.named_parameters():
        if not any(parameter.startswith(f"{module}.") for module in placed):
            raise ModelError(
                f"model.layout does not say which pipeline stage has {parameter}",
                hint=f"put it into a block of {name}, or into one module with the embedding: only that module, the "
                "blocks and the last modules may change the stream",
            )


def _matches(
    model: nn.Module, pattern: str, modules: dict[str, nn.Module], kind: str, optional: bool = False
) -> list[str]:
    names = [name for name in modules if _regex(pattern).fullmatch(name)]
    if not names and not optional:
        raise ModelError(
            f"model.layout.{kind}: {_class(model)} has no {pattern}",
            hint=_nearest(pattern, list(modules)),
        )
    return names


def named(model: nn.Module, patterns: Iterable[str]) -> list[str]:
    """Return the modules that match patterns."""
    regexes = [_regex(pattern) for pattern in patterns]
    return [name for name, _ in model.named_modules() if any(regex.fullmatch(name) for regex in regexes)]


def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))


def _nearest(name: str, names: list[str]) -> str | None:
    plain = {re.sub(r"\b\d+\b", "*", candidate) for candidate in names if candidate}
    near = difflib.get_close_matches(name, sorted(plain), n=3, cutoff=0.3)
    return f"did you mean {' or '.join(near)}?" if near else None


def _class(model: nn.Module) -> str:
    return type(model).__name__
