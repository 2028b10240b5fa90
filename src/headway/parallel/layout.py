"""How a model is cut, by the names of its modules: for Headway's own families here, for others in the recipe."""

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from headway.errors import ModelError
from headway.models import Decoder
from headway.plan.stages import stages_by_cost
from headway.recipe import ModelLayout, Parallel, Recipe

__all__ = [
    "Cut",
    "TensorCuts",
    "blocks_of",
    "check_layout",
    "check_pipeline",
    "cuts_of",
    "layout_of",
    "named",
    "stages_of",
]

Cut = Literal["columns", "rows", "vocabulary", "share", "keys"]
"""How the tensor axis cuts a module; `keys` is a projection to fewer heads than there are workers, held whole."""

DECODER = ModelLayout(
    blocks="layers",
    first=("embed",),
    last=("norm", "head"),
    columns=(
        *(f"layers.*.attention.{name}" for name in ("q", "k", "v")),
        *(f"layers.*.mlp.{name}" for name in ("gate", "up")),
    ),
    rows=("layers.*.attention.o", "layers.*.mlp.down"),
    vocabulary=("embed", "head"),
    share=("layers.*.*norm", "layers.*.attention.q_norm", "layers.*.attention.k_norm", "norm", "embed.positions"),
    whole=("layers.*.attention", "layers.*.mlp"),
)


def layout_of(model: nn.Module, stated: ModelLayout | None) -> ModelLayout:
    """The layout of one of Headway's own models, or the one that a recipe states."""
    return DECODER if isinstance(model, Decoder) else stated or ModelLayout()


def blocks_of(model: nn.Module, layout: ModelLayout) -> tuple[str, list[nn.Module]]:
    """The name of the list of blocks, and the blocks; without a layout, the longest list there is."""
    if layout.blocks is not None:
        blocks = dict(model.named_modules()).get(layout.blocks)
        if not isinstance(blocks, nn.ModuleList | nn.Sequential):
            raise ModelError(
                f"model.layout.blocks names {layout.blocks}, which {_class(model)} {_lacks(blocks)}",
                hint=_nearest(layout.blocks, [n for n, m in model.named_modules() if isinstance(m, nn.ModuleList)]),
            )
        return layout.blocks, list(blocks)
    lists = [(name, list(m)) for name, m in model.named_modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    return max(lists, key=lambda item: len(item[1]), default=("", []))


def _lacks(module: nn.Module | None) -> str:
    return "does not have" if module is None else f"has as a {type(module).__name__}, not as a list"


@dataclass(frozen=True)
class TensorCuts:
    """What the tensor axis does to each module, by name."""

    cuts: dict[str, Cut]
    whole: frozenset[str]
    """Modules for which the stream is gathered; if there are any, it is shared out by sequence between them."""
    divided: tuple[tuple[str, str], ...]
    """Modules and their attributes that count what is shared out."""
    key_heads: int = 0
    """Heads that modules cut as `keys` project to."""

    @property
    def by_sequence(self) -> bool:
        """Whether workers hold a share of each sequence between the modules that need it whole."""
        return bool(self.whole)

    def enters(self, name: str) -> bool:
        """Whether a module takes its input for itself, and not as a part of one that has done so."""
        parts = name.split(".")
        return not any(".".join(parts[:end]) in self.whole for end in range(1, len(parts)))


def cuts_of(model: nn.Module, layout: ModelLayout, size: int) -> TensorCuts:
    """A layout's names found in a model, and its shapes seen to be cut evenly; ModelError says what is not."""
    if isinstance(model, Decoder) and model.model.UNCUT:
        family, why = model.model.family, model.model.UNCUT
        raise ModelError(f"parallel.tensor is {size}, and no tensor axis cuts {family}: {why}")
    modules = dict(model.named_modules())
    cuts = dict[str, Cut]()
    for kind in ("columns", "rows", "vocabulary", "share"):
        for pattern in getattr(layout, kind):
            cuts |= dict.fromkeys(_matches(model, pattern, modules, kind, optional=layout is DECODER), kind)
    if isinstance(model, Decoder) and model.model.kv_heads % size:
        cuts |= {name: "keys" for name in cuts if name.endswith((".attention.k", ".attention.v"))}
    whole = frozenset(n for pattern in layout.whole for n in _matches(model, pattern, modules, "whole"))
    heads = model.model.kv_heads if isinstance(model, Decoder) else 0
    made = TensorCuts(cuts, whole, tuple(_divided(model, layout, modules, size)), heads)
    if not {"columns", "rows"} <= {*cuts.values()}:
        raise ModelError(
            f"parallel.tensor is {size}, and model.layout does not say how {_class(model)} is cut",
            hint="model.layout.columns and rows name its linear modules (docs/guides/own-models.md)",
        )
    for name, cut in cuts.items():
        _check_shape(modules[name], name, cut, size)
    _check_ties(model, made)
    if made.by_sequence:
        _check_covered(model, made)
    return made


def _check_shape(module: nn.Module, name: str, cut: Cut, size: int) -> None:
    if cut in ("share", "keys"):
        return
    weight = getattr(module, "weight", None)
    if weight is None or weight.ndim != 2 or (cut != "vocabulary" and not isinstance(module, nn.Linear)):
        raise ModelError(
            f"model.layout.{cut} names {name}, a {type(module).__name__}: it has no matrix that can be cut so",
            hint=f"{cut} takes linear modules{' and embeddings' if cut == 'vocabulary' else ''}",
        )
    length = weight.shape[1 if cut == "rows" else 0]
    if cut == "vocabulary":
        if -(-length // size) * (size - 1) >= length:
            raise ModelError(f"a vocabulary of {length} ({name}) is too small for tensor {size}")
        if getattr(module, "padding_idx", None) is not None:
            raise ModelError(f"{name} has a padding_idx, which a shared-out embedding cannot have")
    elif length % size:
        side = "inputs" if cut == "rows" else "outputs"
        raise ModelError(f"tensor {size} does not divide the {length} {side} of {name}", hint=_divisors(length))


def _divisors(length: int) -> str:
    return f"tensor may be {', '.join(str(n) for n in range(1, min(length, 64) + 1) if length % n == 0)}"


def _check_ties(model: nn.Module, cuts: TensorCuts) -> None:
    """A parameter that several modules have is cut one way."""
    seen = dict[int, str]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = seen.setdefault(id(parameter), name)
        kinds = [cuts.cuts.get(one.rpartition(".")[0]) for one in (first, name)]
        if kinds[0] != kinds[1]:
            raise ModelError(
                f"{first} and {name} are one parameter, and model.layout cuts only one of them, or each another way",
                hint="name both modules in the same list: a tied embedding and head in vocabulary",
            )


def _check_covered(model: nn.Module, cuts: TensorCuts) -> None:
    """By sequence, it matters of every parameter whether it sees all tokens or a share of them."""
    for name, _ in model.named_parameters():
        owner = name.rpartition(".")[0]
        if not any(owner == cut or owner.startswith(f"{cut}.") for cut in cuts.cuts):
            raise ModelError(
                f"model.layout.whole shares sequences out, and nothing says what {name} sees of them",
                hint=f"name {owner or 'its module'} in share, columns, rows or vocabulary",
            )


def _divided(
    model: nn.Module, layout: ModelLayout, modules: dict[str, nn.Module], size: int
) -> Iterator[tuple[str, str]]:
    for pattern in layout.divide:
        owner, _, attribute = pattern.rpartition(".")
        for name in _matches(model, owner, modules, "divide") if owner else [""]:
            value: Any = getattr(modules[name], attribute, None)
            where = f"{name}.{attribute}".lstrip(".")
            if not isinstance(value, int):
                what = "does not exist" if value is None else f"is {value!r} and no whole number"
                raise ModelError(f"model.layout.divide names {where}, which {what}")
            if value % size:
                sizes = ", ".join(str(n) for n in range(1, value + 1) if value % n == 0)
                raise ModelError(
                    f"tensor {size} does not divide {where}, which is {value}", hint=f"tensor may be {sizes}"
                )
            yield name, attribute


def check_layout(model: nn.Module, recipe: Recipe, workers: int) -> None:
    """See that a model can be cut onto a recipe's mesh; ModelError says why not."""
    parallel = recipe.parallel or Parallel()
    sizes, layout, seq = parallel.sizes(workers), layout_of(model, recipe.model.layout), recipe.data.seq
    tensor = sizes["tensor"]
    if tensor > 1 and cuts_of(model, layout, tensor).by_sequence and seq % tensor:
        below = seq // tensor * tensor
        raise ModelError(
            f"tensor {tensor} does not divide data.seq, which is {seq}", hint=f"{below} and {below + tensor} would do"
        )
    if sizes["pipeline"] > 1:
        check_pipeline(model, layout, stages_of(model, layout, parallel, sizes["pipeline"]))


def stages_of(model: nn.Module, layout: ModelLayout, parallel: Parallel, ranks: int) -> tuple[int, ...]:
    """Blocks of each stage of a pipeline: as stated, or as even as can be."""
    return parallel.stages or stages_by_cost(len(blocks_of(model, layout)[1]), 0.0, 0.0, ranks, parallel.chunks)


def check_pipeline(model: nn.Module, layout: ModelLayout, counts: Iterable[int]) -> None:
    """See that a model can be cut into stages of so many blocks; ModelError says why not."""
    counts = tuple(counts)
    if layout.blocks is None:
        raise ModelError(
            f"a pipeline of {len(counts)} stages, and model.layout does not say where {_class(model)} is cut",
            hint="model.layout.blocks names its list of blocks, first and last what comes before and after",
        )
    name, blocks = blocks_of(model, layout)
    if len(counts) > len(blocks):
        raise ModelError(
            f"{len(blocks)} blocks ({name} of {_class(model)}) cannot fill {len(counts)} pipeline stages",
            hint=f"parallel.pipeline x chunks may be {len(blocks)} at most",
        )
    if sum(counts) != len(blocks) or min(counts) < 1:
        raise ModelError(
            f"{_class(model)} has {len(blocks)} blocks, not shared out by stages of {', '.join(map(str, counts))}",
            hint=f"parallel.stages must sum up to {len(blocks)}; without it they are as even as can be",
        )
    modules = dict(model.named_modules())
    placed = {name}
    for kind in ("first", "last"):
        for pattern in getattr(layout, kind):
            placed |= {*_matches(model, pattern, modules, kind, optional=layout is DECODER)}
    both = {*named(model, layout.first)} & {*named(model, layout.last)}
    if both:
        raise ModelError(f"model.layout has {min(both)} both in first and in last: one stage has it")
    for parameter, _ in model.named_parameters():
        if not any(parameter.startswith(f"{module}.") for module in placed):
            raise ModelError(
                f"nothing says which stage of a pipeline has {parameter}",
                hint=f"put it into a block of {name}, or into one module with the embedding: nothing may happen to the "
                "stream but what that module, the blocks and the last modules do",
            )


def _matches(
    model: nn.Module, pattern: str, modules: dict[str, nn.Module], kind: str, optional: bool = False
) -> list[str]:
    found = [name for name in modules if _regex(pattern).fullmatch(name)]
    if not found and not optional:
        raise ModelError(
            f"model.layout.{kind} names {pattern}, which {_class(model)} does not have",
            hint=_nearest(pattern, list(modules)),
        )
    return found


def named(model: nn.Module, patterns: Iterable[str]) -> list[str]:
    """The modules that patterns name."""
    regexes = [_regex(pattern) for pattern in patterns]
    return [name for name, _ in model.named_modules() if any(regex.fullmatch(name) for regex in regexes)]


def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))


def _nearest(name: str, names: list[str]) -> str | None:
    plain = {re.sub(r"\b\d+\b", "*", candidate) for candidate in names if candidate}
    near = difflib.get_close_matches(name, sorted(plain), n=3, cutoff=0.3)
    return f"the nearest there are: {', '.join(near)}" if near else None


def _class(model: nn.Module) -> str:
    return type(model).__name__
