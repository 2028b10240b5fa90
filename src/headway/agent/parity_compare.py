"""Compares two trials of a parity check and finds the first difference: pure, on arrays and numbers.

    forward     sums over the outputs of modules in the first step        |difference| / sum
    loss        of each step                                              |difference| / loss
    gradient    each tensor at each step                                  norm of the difference / norm
    parameter   each tensor after each step's plain update                the same
    adamw       each tensor after one AdamW update                        the same, where gradients exceed the noise

Numbers are compared in the order in which a step computes them, so that the first difference is nearest to the cause.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headway.recipe import Train

Kind = Literal["forward", "loss", "gradient", "parameter", "adamw"]
KINDS: tuple[Kind, ...] = ("forward", "loss", "gradient", "parameter", "adamw")
Tensors: TypeAlias = Mapping[str, NDArray[Any]]
"""Full tensors by name; read one at a time."""
CHUNK = 1 << 20
"""Elements converted to float64 at once."""
QUIET = 1e-4
"""The norm of a tensor counts as at least this share of the norm of all tensors: gradients that are zero but for
rounding (a key's bias behind a softmax) would else differ by their whole norm. A tensor that is wrong altogether is
still found down to `tolerance * QUIET`, 1e-8 of all in float32, which is about the rounding error of such a sum."""

SMALL = 0.01
"""After AdamW the norm of a tensor counts as at least that of elements of this size: a tensor that started at zero
(Gemma's norms) is nothing but one update, in which only the signs of gradients count."""


@dataclass(frozen=True)
class Tolerances:
    """The largest differences that rounding explains."""

    forward: float
    loss: float
    gradient: float
    parameter: float
    noise: float
    """AdamW takes full steps however small a gradient is: those below this share of the largest are excluded."""

    def of(self, kind: Kind) -> float:
        """Return the tolerance of a kind; parameters after AdamW have that of parameters."""
        return float(getattr(self, "parameter" if kind == "adamw" else kind))


TOLERANCES: Mapping[str, Tolerances] = {
    # Measured on decoders of 4 layers, over shard, tensor, pipeline and pairs of them: forward 4e-9, loss 8e-8,
    # gradients 1e-6, parameters 2e-7.
    "float32": Tolerances(forward=1e-5, loss=1e-5, gradient=1e-4, parameter=1e-4, noise=1e-6),
    # Eight bits, 4e-3 of a number: a mesh rounds at other points (FSDP also the residual stream between blocks, which
    # autocast leaves in float32), and each layer passes rounding errors on. Measured on 4 and 6 layers: forward 3e-4,
    # loss 3e-5, gradients 1.3e-2 (keys). After AdamW 5e-2 for gradients above 1e-3 of the largest, 1e-4 above 1e-2.
    "bfloat16": Tolerances(forward=2e-3, loss=2e-3, gradient=5e-2, parameter=5e-2, noise=2e-2),
    # Two or three bits: where two meshes differ by the rounding of bfloat16, about one number in thirty has the next
    # code, up to a quarter away in e5m2. Measured on decoders of 2 to 4 layers, over shard, tensor and pipeline:
    # loss 2.4e-3, gradients 0.135.
    "fp8": Tolerances(forward=1e-2, loss=5e-3, gradient=0.2, parameter=0.1, noise=0.1),
}
"""By dtype of the matrix products."""


def tolerances_of(train: Train) -> Tolerances:
    """Return the tolerances of a recipe's precision."""
    return TOLERANCES["fp8" if train.fp8 is not None else train.dtype]


@dataclass(frozen=True)
class ModuleSums:
    """Sums over the outputs of a module in one step."""

    place: tuple[int, int]
    """Position in the model's forward order."""
    name: str
    sum: float
    squares: float
    count: float
    """Elements; a multiple of the single process's if several workers hold the same ones."""


@dataclass(frozen=True)
class TrialNumbers:
    """The numbers of one trial."""

    losses: Sequence[float]
    module_sums: Sequence[ModuleSums]
    gradients: Sequence[Tensors]
    """Per step."""
    parameters: Sequence[Tensors]
    """After each step's plain update."""
    adamw: Tensors
    """After one AdamW update with the last gradients."""
    order: Sequence[str] = ()
    """Parameters in the model's order."""


@dataclass(frozen=True)
class Finding:
    """One comparison."""

    kind: Kind
    name: str
    """The module or tensor; the loss has none."""
    step: int
    difference: float
    """Relative; infinite if there is nothing to compare with."""
    tolerance: float
    note: str = ""
    """What is wrong other than the values."""

    @property
    def differs(self) -> bool:
        """Whether the difference exceeds the tolerance."""
        return not self.difference <= self.tolerance

    @property
    def subject(self) -> str:
        """What was compared."""
        return {
            "forward": f"forward of {self.name}",
            "loss": "the loss",
            "gradient": f"gradient of {self.name}",
            "parameter": f"{self.name} after the update",
            "adamw": f"{self.name} after AdamW",
        }[self.kind]

    @property
    def sentence(self) -> str:
        """Where the difference is and how large."""
        what = self.note or f"off by {self.difference:.1e}, {self.tolerance:.0e} allowed"
        return f"{self.subject}, step {self.step}: {what}"


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison."""

    largest: Mapping[Kind, Finding]
    """The largest difference of each kind."""
    first: Finding | None
    """The first difference in the order of the computation; None if equal."""

    @property
    def equal(self) -> bool:
        """Whether all differences are within their tolerances."""
        return self.first is None


def compare_trials(single: TrialNumbers, mesh: TrialNumbers, tolerances: Tolerances) -> Verdict:
    """Compare a mesh's trial with that of a single process."""
    findings = list(_findings(single, mesh, tolerances))
    largest = dict[Kind, Finding]()
    for finding in findings:
        if finding.kind not in largest or finding.difference > largest[finding.kind].difference:
            largest[finding.kind] = finding
    return Verdict(largest, next((finding for finding in findings if finding.differs), None))


def merge_sums(ranks: Iterable[Iterable[ModuleSums]]) -> list[ModuleSums]:
    """Add up the sums of all workers per module; in forward order."""
    merged = dict[str, ModuleSums]()
    for module in itertools.chain.from_iterable(ranks):
        before = merged.get(module.name)
        if before is not None:
            sums = {key: getattr(before, key) + getattr(module, key) for key in ("sum", "squares", "count")}
            module = replace(before, **sums)
        merged[module.name] = module
    return sorted(merged.values(), key=lambda module: module.place)


def _findings(single: TrialNumbers, mesh: TrialNumbers, tolerances: Tolerances) -> Iterator[Finding]:
    """Compare everything, in the order of the computation."""
    steps = len(single.losses)
    forwards, backwards = list(single.order), list(reversed(single.order))
    yield from _compare_sums(single.module_sums, mesh.module_sums, tolerances.forward)
    for i, step in enumerate(range(1, steps + 1)):
        loss, mesh_loss = single.losses[i], mesh.losses[i]
        yield Finding("loss", "", step, _relative(abs(mesh_loss - loss), abs(loss)), tolerances.loss)
        gradients = _ordered(single.gradients[i], mesh.gradients[i], backwards)
        yield from _compare_tensors("gradient", step, gradients, single.gradients[i], mesh.gradients[i], tolerances)
        parameters = _ordered(single.parameters[i], mesh.parameters[i], forwards)
        yield from _compare_tensors("parameter", step, parameters, single.parameters[i], mesh.parameters[i], tolerances)
    last = single.gradients[-1]
    significant = _significant(last, tolerances.gradient)
    names = [n for n in _ordered(single.adamw, mesh.adamw, forwards) if n not in last or n in significant]
    yield from _compare_tensors("adamw", steps, names, single.adamw, mesh.adamw, tolerances, last)


def _compare_sums(single: Sequence[ModuleSums], mesh: Sequence[ModuleSums], tolerance: float) -> Iterator[Finding]:
    on_mesh = {module.name: module for module in mesh}
    for module in single:
        other = on_mesh.pop(module.name, None)
        difference, note = (math.inf, "not called on the mesh") if other is None else _module_difference(module, other)
        yield Finding("forward", module.name, 1, difference, tolerance, note)
    for name in on_mesh:
        yield Finding("forward", name, 1, math.inf, tolerance, "called on the mesh only")


def _module_difference(single: ModuleSums, mesh: ModuleSums) -> tuple[float, str]:
    copies = mesh.count / single.count if single.count else 1.0
    if copies < 1 or copies != round(copies):
        return math.inf, f"{mesh.count:,.0f} elements on the mesh for {single.count:,.0f}"
    squares = abs(mesh.squares / copies - single.squares)
    # A sum may cancel: compare it with the largest that elements of this size could have.
    sums = abs(mesh.sum / copies - single.sum)
    largest = math.sqrt(single.count * single.squares)
    return max(_relative(squares, single.squares), _relative(sums, largest)), ""


def _compare_tensors(
    kind: Kind,
    step: int,
    names: Iterable[str],
    single: Tensors,
    mesh: Tensors,
    tolerances: Tolerances,
    gradients: Tensors | None = None,
) -> Iterator[Finding]:
    """Compare tensors by name; with `gradients`, only the elements whose gradients exceed the noise."""
    measured = list[tuple[str, float, float, str]]()
    for name in names:
        least = 0.0
        expected, actual = single.get(name), mesh.get(name)
        off, norm, note = math.inf, 0.0, _mismatch(expected, actual)
        if expected is not None and actual is not None and not note:
            mask = None if gradients is None or name not in gradients else _mask(gradients[name], tolerances.noise)
            off, norm = _distance(expected, actual, mask)
            least = SMALL * math.sqrt(expected.size) if kind == "adamw" else 0.0
        measured.append((name, off, max(norm, least), note))
    total = math.sqrt(sum(norm**2 for _, _, norm, _ in measured if math.isfinite(norm)))
    for name, off, norm, note in measured:
        yield Finding(kind, name, step, _relative(off, max(norm, QUIET * total)), tolerances.of(kind), note)


def _ordered(single: Tensors, mesh: Tensors, order: Sequence[str]) -> list[str]:
    """Return all names; those missing from `order` come last."""
    names = {*single, *mesh}
    return [name for name in order if name in names] + sorted(names - {*order})


def _mismatch(expected: NDArray[Any] | None, actual: NDArray[Any] | None) -> str:
    if expected is None or actual is None:
        return "missing on the mesh" if actual is None else "on the mesh only"
    same = expected.shape == actual.shape
    return "" if same else f"of shape {list(actual.shape)} on the mesh, {list(expected.shape)} in one process"


def _significant(gradients: Tensors, tolerance: float) -> set[str]:
    """Find tensors whose gradients are 100 times what `QUIET` leaves to rounding: AdamW takes full steps of it."""
    norms = {name: _distance(gradients[name], gradients[name])[1] for name in gradients}
    total = math.sqrt(sum(norm**2 for norm in norms.values()))
    return {name for name, norm in norms.items() if not norm <= 100 * tolerance * QUIET * total}


def _mask(gradient: NDArray[Any], noise: float) -> NDArray[np.bool_]:
    sizes = np.abs(gradient)
    mask: NDArray[np.bool_] = ~(sizes <= noise * sizes.max(initial=0.0))  # keeps NaN
    return mask


def _distance(a: NDArray[Any], b: NDArray[Any], mask: NDArray[np.bool_] | None = None) -> tuple[float, float]:
    """Return the norms of a - b and of a, in float64, over all elements or those of a mask."""
    off = norm = 0.0
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    for begin in range(0, flat_a.size, CHUNK):
        chunk = slice(begin, begin + CHUNK)
        x, y = flat_a[chunk].astype(np.float64), flat_b[chunk].astype(np.float64)
        if mask is not None:
            selected = mask.reshape(-1)[chunk]
            x, y = x[selected], y[selected]
        with np.errstate(invalid="ignore", over="ignore"):  # infinities become NaN, which differs
            off += float(np.square(x - y).sum())
            norm += float(np.square(x).sum())
    return math.sqrt(off), math.sqrt(norm)


def _relative(off: float, scale: float) -> float:
    """Return a difference relative to a scale, or itself if that is 0; infinity for NaN."""
    ratio = off / scale if scale > 0 else off
    return ratio if math.isfinite(ratio) else math.inf
