"""Whether two trials computed the same, and if not, where they part first: pure, on arrays and numbers.

    forward     sums over what modules put out in the first step          |difference| / sum
    loss        of each step                                              |difference| / loss
    gradient    each tensor at each step                                  norm of the difference / norm
    parameter   each tensor after each step's plain update                the same
    adamw       each tensor after one AdamW update                        the same, where gradients stand out from noise

Things are looked at in the order in which a step makes them, so that the first that parts is nearest to the cause.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "KINDS",
    "TOLERANCES",
    "Finding",
    "Kind",
    "ModuleSums",
    "Tolerances",
    "TrialNumbers",
    "Verdict",
    "compare_trials",
    "merge_marks",
]

Kind = Literal["forward", "loss", "gradient", "parameter", "adamw"]
KINDS: tuple[Kind, ...] = ("forward", "loss", "gradient", "parameter", "adamw")
Tensors: TypeAlias = Mapping[str, NDArray[Any]]
"""Whole tensors by name; read one at a time."""
CHUNK = 1 << 20
"""Elements that are turned into float64 at once."""
QUIET = 1e-4
"""A tensor whose norm is less than this of all tensors' together is measured against that much: gradients that are zero
but for rounding (a key's bias behind a softmax) would else differ by all of their norm. One that is wrong altogether is
still found down to `tolerance * QUIET`, 1e-8 of all in float32, which is about what rounding leaves of such a sum."""

SMALL = 0.01
"""After AdamW a tensor is as large as its elements would be if they were all of this size, if it is not larger: what
began at zero (Gemma's norms) is nothing but one update, in which gradients count by their sign."""


@dataclass(frozen=True)
class Tolerances:
    """The largest differences that rounding explains."""

    forward: float
    loss: float
    gradient: float
    parameter: float
    noise: float
    """AdamW makes full steps of gradients however small: below this share of the tensor's largest they are left out."""

    def of(self, kind: Kind) -> float:
        """That of one kind; AdamW's parameters are parameters."""
        return float(getattr(self, "parameter" if kind == "adamw" else kind))


TOLERANCES: Mapping[str, Tolerances] = {
    # Measured on decoders of 4 layers, over shard, tensor, pipeline and pairs of them: forward 4e-9, loss 8e-8,
    # gradients 1e-6, parameters 2e-7.
    "float32": Tolerances(forward=1e-5, loss=1e-5, gradient=1e-4, parameter=1e-4, noise=1e-6),
    # Eight bits, 4e-3 of a number: a mesh rounds elsewhere (FSDP the stream between blocks too, which autocast leaves
    # in float32), and each layer hands the others' rounding on. Measured on 4 and 6 layers: forward 3e-4, loss 3e-5,
    # gradients 1.3e-2 (keys). After AdamW 5e-2 where gradients are above 1e-3 of the largest, 1e-4 above 1e-2.
    "bfloat16": Tolerances(forward=2e-3, loss=2e-3, gradient=5e-2, parameter=5e-2, noise=2e-2),
}
"""By the precision of the products."""


@dataclass(frozen=True)
class ModuleSums:
    """Sums over all that a module put out in one step."""

    place: tuple[int, int]
    """Where it stands in the model's forward order."""
    name: str
    sum: float
    squares: float
    count: float
    """Elements; a multiple of one process' where several workers hold them alike."""


@dataclass(frozen=True)
class TrialNumbers:
    """What one trial wrote down."""

    losses: Sequence[float]
    marks: Sequence[ModuleSums]
    gradients: Sequence[Tensors]
    """Of each step."""
    parameters: Sequence[Tensors]
    """After each step's plain update."""
    adamw: Tensors
    """After one AdamW update with the last gradients."""
    order: Sequence[str] = ()
    """Parameters in the model's order."""


@dataclass(frozen=True)
class Finding:
    """One thing that was compared."""

    kind: Kind
    name: str
    """The module or tensor; the loss has none."""
    step: int
    difference: float
    """Relative; infinite where there is nothing to compare with."""
    tolerance: float
    note: str = ""
    """What is wrong with it beside its values."""

    @property
    def parts(self) -> bool:
        """Whether rounding does not explain it."""
        return not self.difference <= self.tolerance

    @property
    def subject(self) -> str:
        """What it is, in words."""
        return {
            "forward": f"forward of {self.name}",
            "loss": "the loss",
            "gradient": f"gradient of {self.name}",
            "parameter": f"{self.name} after the update",
            "adamw": f"{self.name} after AdamW",
        }[self.kind]

    @property
    def sentence(self) -> str:
        """Where it is and by how much it is off."""
        what = self.note or f"off by {self.difference:.1e}, {self.tolerance:.0e} allowed"
        return f"{self.subject}, step {self.step}: {what}"


@dataclass(frozen=True)
class Verdict:
    """What a comparison came to."""

    largest: Mapping[Kind, Finding]
    """The largest difference of each kind."""
    first: Finding | None
    """What parts first, in the order of the computation; None where nothing does."""

    @property
    def equal(self) -> bool:
        """Whether all differences are within their tolerances."""
        return self.first is None


def compare_trials(single: TrialNumbers, mesh: TrialNumbers, tolerances: Tolerances) -> Verdict:
    """Hold a mesh's trial against that of a single process."""
    findings = list(_findings(single, mesh, tolerances))
    largest = dict[Kind, Finding]()
    for finding in findings:
        if finding.kind not in largest or finding.difference > largest[finding.kind].difference:
            largest[finding.kind] = finding
    return Verdict(largest, next((finding for finding in findings if finding.parts), None))


def merge_marks(ranks: Iterable[Iterable[ModuleSums]]) -> list[ModuleSums]:
    """One mark a module, of what all workers heard; in forward order."""
    merged = dict[str, ModuleSums]()
    for mark in (mark for rank in ranks for mark in rank):
        have = merged.get(mark.name)
        if have is not None:
            sums = {key: getattr(have, key) + getattr(mark, key) for key in ("sum", "squares", "count")}
            mark = replace(have, **sums)
        merged[mark.name] = mark
    return sorted(merged.values(), key=lambda mark: mark.place)


def _findings(single: TrialNumbers, mesh: TrialNumbers, tolerances: Tolerances) -> Iterator[Finding]:
    """Everything that is compared, in the order of the computation."""
    steps = len(single.losses)
    forwards, backwards = list(single.order), list(reversed(single.order))
    yield from _marks(single.marks, mesh.marks, tolerances.forward)
    for step in range(1, steps + 1):
        i = step - 1
        yield _loss(single.losses[i], mesh.losses[i], step, tolerances.loss)
        gradients = _ordered(single.gradients[i], mesh.gradients[i], backwards)
        yield from _tensors("gradient", step, gradients, single.gradients[i], mesh.gradients[i], tolerances)
        parameters = _ordered(single.parameters[i], mesh.parameters[i], forwards)
        yield from _tensors("parameter", step, parameters, single.parameters[i], mesh.parameters[i], tolerances)
    slopes = single.gradients[-1]
    loud = _loud(slopes, tolerances.gradient)
    moved = [name for name in _ordered(single.adamw, mesh.adamw, forwards) if name not in slopes or name in loud]
    yield from _tensors("adamw", steps, moved, single.adamw, mesh.adamw, tolerances, slopes)


def _marks(single: Sequence[ModuleSums], mesh: Sequence[ModuleSums], tolerance: float) -> Iterator[Finding]:
    theirs = {mark.name: mark for mark in mesh}
    for mark in single:
        other = theirs.pop(mark.name, None)
        difference, note = (math.inf, "not called on the mesh") if other is None else _mark(mark, other)
        yield Finding("forward", mark.name, 1, difference, tolerance, note)
    for name in theirs:
        yield Finding("forward", name, 1, math.inf, tolerance, "called on the mesh only")


def _mark(mark: ModuleSums, other: ModuleSums) -> tuple[float, str]:
    copies = other.count / mark.count if mark.count else 1.0
    if copies < 1 or copies != round(copies):
        return math.inf, f"{other.count:,.0f} elements on the mesh for {mark.count:,.0f}"
    squares = abs(other.squares / copies - mark.squares)
    # A sum may cancel: it is held against the largest that elements of this size could have.
    sums = abs(other.sum / copies - mark.sum)
    most = math.sqrt(mark.count * mark.squares)
    return max(_relative(squares, mark.squares), _relative(sums, most)), ""


def _loss(single: float, mesh: float, step: int, tolerance: float) -> Finding:
    return Finding("loss", "", step, _relative(abs(mesh - single), abs(single)), tolerance)


def _tensors(
    kind: Kind,
    step: int,
    names: Iterable[str],
    single: Tensors,
    mesh: Tensors,
    tolerances: Tolerances,
    slopes: Tensors | None = None,
) -> Iterator[Finding]:
    """Each tensor's difference; with `slopes`, over the elements whose gradients there stand out from noise."""
    measured = list[tuple[str, float, float, str]]()
    for name in names:
        least = 0.0
        ours, theirs = single.get(name), mesh.get(name)
        off, norm, note = math.inf, 0.0, _mismatch(ours, theirs)
        if ours is not None and theirs is not None and not note:
            chosen = None if slopes is None or name not in slopes else _chosen(slopes[name], tolerances.noise)
            off, norm = _distance(ours, theirs, chosen)
            least = SMALL * math.sqrt(ours.size) if kind == "adamw" else 0.0
        measured.append((name, off, max(norm, least), note))
    total = math.sqrt(sum(norm**2 for _, _, norm, _ in measured if math.isfinite(norm)))
    for name, off, norm, note in measured:
        yield Finding(kind, name, step, _relative(off, max(norm, QUIET * total)), tolerances.of(kind), note)


def _ordered(single: Tensors, mesh: Tensors, order: Sequence[str]) -> list[str]:
    """All names there are; those that the order does not have come last."""
    names = {*single, *mesh}
    return [name for name in order if name in names] + sorted(names - {*order})


def _mismatch(ours: NDArray[Any] | None, theirs: NDArray[Any] | None) -> str:
    if ours is None or theirs is None:
        return "missing on the mesh" if theirs is None else "on the mesh only"
    same = ours.shape == theirs.shape
    return "" if same else f"of shape {list(theirs.shape)} on the mesh, {list(ours.shape)} in one process"


def _loud(gradients: Tensors, tolerance: float) -> set[str]:
    """The tensors whose gradients are a hundred times what `QUIET` leaves to rounding; AdamW would make steps of it."""
    norms = {name: _norm(gradients[name]) for name in gradients}
    total = math.sqrt(sum(norm**2 for norm in norms.values()))
    return {name for name, norm in norms.items() if not norm <= 100 * tolerance * QUIET * total}


def _chosen(gradient: NDArray[Any], noise: float) -> NDArray[np.bool_]:
    sizes = np.abs(gradient)
    chosen: NDArray[np.bool_] = ~(sizes <= noise * sizes.max(initial=0.0))  # what is not a number stays in
    return chosen


def _norm(a: NDArray[Any]) -> float:
    return _distance(a, a)[1]


def _distance(a: NDArray[Any], b: NDArray[Any], chosen: NDArray[np.bool_] | None = None) -> tuple[float, float]:
    """The norm of a - b and that of a, in float64, over all elements or the chosen ones."""
    off = norm = 0.0
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    for begin in range(0, flat_a.size, CHUNK):
        here = slice(begin, begin + CHUNK)
        x, y = flat_a[here].astype(np.float64), flat_b[here].astype(np.float64)
        if chosen is not None:
            kept = chosen.reshape(-1)[here]
            x, y = x[kept], y[kept]
        with np.errstate(invalid="ignore", over="ignore"):  # infinities come out as no number, which parts
            off += float(np.square(x - y).sum())
            norm += float(np.square(x).sum())
    return math.sqrt(off), math.sqrt(norm)


def _relative(off: float, scale: float) -> float:
    """A difference over a size; over nothing, itself. What is not a number is as far off as can be."""
    ratio = off / scale if scale > 0 else off
    return ratio if math.isfinite(ratio) else math.inf
