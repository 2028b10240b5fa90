"""Bitwise comparison of runs: the hash chain that each step extends, and where two runs diverge."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from headway.track.differences import Cause, MetricDifference, find_causes, first_difference, read_conditions
from headway.track.events import Event, Record, read_run
from headway.track.metrics import history
from headway.track.run_folder import RunFolder

START = "0" * 32
"""The chain before the first step."""

_NAMED = 8  # differing tensors to name


def extend_chain(chain: str, step: int, cursor: int, loss: float, grad_norm: float) -> str:
    """Return the chain after a step: a hash of the chain so far and the bits of what the step did."""
    fields = struct.pack("<QQdd", step, cursor, loss, grad_norm)
    return sha256(chain.encode("ascii") + fields).hexdigest()[:32]


@dataclass(frozen=True)
class RunComparison:
    """Whether two runs agree at every common step, else where and in what they first differ."""

    equal: bool
    common_steps: int
    """Steps that both recorded."""
    common_digests: int
    """Checkpoints that both wrote."""
    step: int | None = None
    """The first step that differs."""
    differs: tuple[str, ...] = ()
    """What differs there: any of cursor, loss, grad_norm, chain, digest."""
    tensors_step: int | None = None
    """The first step whose checkpoints both exist and differ."""
    tensors: tuple[str, ...] = ()
    """Names of the first tensors that differ in them."""
    causes: tuple[Cause, ...] = ()
    """What differs between the runs' recipes, data, workers and environments, if they are not equal."""
    first: MetricDifference | None = None
    """The first number that differs, the learning rate included, which is no part of the chain."""

    @property
    def sentence(self) -> str:
        """The result in one sentence."""
        if self.equal:
            return f"equal: {self.common_steps} common steps, {self.common_digests} common checkpoints"
        if self.step is None:
            return "not comparable: the runs have no step in common"
        if "cursor" in self.differs:
            return f"they diverge at step {self.step}: the data order differs ({', '.join(self.differs)})"
        if self.differs == ("chain",):
            return f"they diverge before step {self.step}, the first that both recorded"
        if self.differs == ("digest",):
            return f"they diverge by step {self.step}: same losses, but different state digests"
        return f"they diverge at step {self.step}: {', '.join(self.differs)} differ"


def compare_runs(run_a: RunFolder, run_b: RunFolder) -> RunComparison:
    """Compare two runs' chains at every common step, and their checkpoints' digests."""
    records = [[*read_run(run, "rank-0"), *read_run(run, "agent")] for run in (run_a, run_b)]
    steps_a, steps_b = ({event["step"]: event for event in history(r)} for r in records)
    digests_a, digests_b = (checkpoint_digests(r) for r in records)
    common = sorted(steps_a.keys() & steps_b.keys())
    saved = sorted(digests_a.keys() & digests_b.keys())
    step = next((s for s in common if steps_a[s].get("chain") != steps_b[s].get("chain")), None)
    save = next((s for s in saved if digests_a[s] != digests_b[s]), None)
    if step is None and save is None and (common or saved):
        return RunComparison(True, len(common), len(saved))
    conditions = [read_conditions(run, r) for run, r in zip((run_a, run_b), records, strict=True)]
    causes, first = tuple(find_causes(*conditions)), first_difference(steps_a, steps_b)
    if step is None and save is None:
        return RunComparison(False, len(common), len(saved), causes=causes, first=first)
    earliest = min(s for s in (step, save) if s is not None)
    differs = _differences(steps_a[earliest], steps_b[earliest]) if earliest == step else ()
    if earliest == save:
        differs = (*differs, "digest")
    tensors_step, tensors = _first_tensors(run_a, run_b, [s for s in saved if digests_a[s] != digests_b[s]])
    return RunComparison(False, len(common), len(saved), earliest, differs, tensors_step, tensors, causes, first)


def checkpoint_digests(records: Sequence[Record]) -> dict[int, str]:
    """Return the digest of each checkpoint by step, without those that were rolled back."""
    saves = history(records, "checkpoint")
    return {event["step"]: event["digest"] for event in saves if isinstance(event.get("digest"), str)}


def _differences(a: Event, b: Event) -> tuple[str, ...]:
    """Return which inputs of the chain differ in a step; just "chain" if the cause is earlier."""
    return tuple(key for key in ("cursor", "loss", "grad_norm") if a.get(key) != b.get(key)) or ("chain",)


def _first_tensors(run_a: RunFolder, run_b: RunFolder, steps: Sequence[int]) -> tuple[int | None, tuple[str, ...]]:
    """Return the first of these steps with a checkpoint in both runs, and some tensors that differ there."""
    for step in steps:
        a, b = (_tensor_digests(run.checkpoints, step) for run in (run_a, run_b))
        if a and b:
            names = [name for name in dict.fromkeys([*a, *b]) if a.get(name) != b.get(name)]
            return step, tuple(names[:_NAMED])
    return None, ()


def _tensor_digests(checkpoints: Path, step: int) -> Mapping[str, str]:
    """Return each tensor's digest from a checkpoint's manifest; empty if it cannot be read."""
    try:
        manifest: Any = from_json((checkpoints / f"step-{step:08d}" / "manifest.json").read_bytes())
        return {name: str(entry["digest"]) for name, entry in manifest["tensors"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
