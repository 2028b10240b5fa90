"""Where every device-second of a run went: `account(records) -> Ledger`.

Each attempt allocates `workers` devices from its start to its end. Each device's recorded intervals are put on the
agent's clock and clipped to the allocation; every nanosecond then belongs to the account of the innermost (latest
begun) interval that covers it, a worker's intervals before its agent's. What no interval covers is unattributed. No
account is computed as a remainder, and they sum to the total exactly.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headway.track.accounts import ACCOUNTS, AttemptTime
from headway.track.attempt_records import AttemptRecords, plausible_count
from headway.track.events import Event, Record, kept_until
from headway.track.incidents import Incident, find_incidents
from headway.track.intervals import time_of

_ADVICE = {
    "start-up": "Its share shrinks as the run gets longer.",
    "compile": "A warm compile cache helps later starts; short runs do better with train.compile = false.",
    "generation": "Shorter answers (rl.max_tokens), or fewer (rl.samples), are sampled sooner.",
    "scoring": "Answers are scored while others are sampled: raise rl.reward_workers, or make the rewards faster.",
    "weight sync": "Workers that hold whole weights share them with the sampler; shards are gathered for every batch.",
    "rollout wait": "Workers wait for the one whose answers are longest.",
    "data stall": "Move the dataset to a faster disk, or leave a core free for the loader.",
    "checkpoint stall": "Save less often: raise checkpoint.every_steps.",
    "evaluation": "Evaluate less often (eval.every_steps, eval.tasks_every_steps) or less of it (eval.windows, "
    "eval.tasks_limit).",
    "detection": "Timeouts follow the run's own step times; the first steps have none yet. Comparing replicas "
    "also counts here (health.compare_every_steps).",
    "restart": "The incidents say why the run restarted.",
    "rework": "Save more often (lower checkpoint.every_steps), so that a failure loses fewer steps.",
    "shut-down": "See the last lines of the workers' logs for what delays their exit.",
    "unattributed": "No recorded interval covers this time; check that the workers' records are complete.",
}


_STORAGE_ADVICE = "Saves waited for storage that had failed (see the incidents): free space, or repair it."


class Overhead(NamedTuple):
    """Time spent in an account other than compute, with advice."""

    account: str
    seconds: float
    advice: str


@dataclass(frozen=True)
class Ledger:
    """Where every device-nanosecond of a run went."""

    accounts: Mapping[str, int]
    """Nanoseconds by account, in the order of ACCOUNTS."""
    total_ns: int
    """Device-nanoseconds allocated: workers x duration, summed over attempts."""
    attempts: tuple[AttemptTime, ...]
    useful_ns: int | None
    """Device time of the kept steps' model FLOPs at the device's peak; None when that is unknown."""
    useful_full_attention_ns: int | None
    """The same, also counting the masked half of attention, as many publications do."""
    steps: int
    """Steps that count."""
    lost_steps: int
    """Steps that a later attempt rolled back."""
    incidents: tuple[Incident, ...]
    storage_ns: int = 0
    """How much of the checkpoint stall was a wait for storage that had failed."""

    def seconds(self, name: str) -> float:
        """Device-seconds in an account."""
        return self.accounts[name] / 1e9

    def share(self, name: str) -> float:
        """An account's share of the allocation, 0 to 1."""
        return self.accounts[name] / self.total_ns if self.total_ns else 0.0

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization during the kept steps (compute and data stall); None if the peak is unknown or too
        low."""
        return None if self.peak_too_low else self._over_steps(self.useful_ns)

    @property
    def mfu_full_attention(self) -> float | None:
        """The same, also counting the masked half of attention."""
        return None if self.peak_too_low else self._over_steps(self.useful_full_attention_ns)

    @property
    def peak_too_low(self) -> bool:
        """Whether steps were faster than the peak allows: that of a CPU is measured at the start, when other work may
        have slowed it down."""
        return (self._over_steps(self.useful_ns) or 0.0) > 1.0

    def _over_steps(self, useful_ns: int | None) -> float | None:
        time_ns = self.accounts["compute"] + self.accounts["data stall"]
        return useful_ns / time_ns if useful_ns is not None and time_ns else None


def account(records: Iterable[Record]) -> Ledger:
    """Attribute every device-nanosecond of a run to an account."""
    records = list(records)
    kept = kept_until(records)
    numbers = sorted({record.header.attempt for record in records})
    attempts = [AttemptRecords(number, records, number != numbers[-1], kept.get(number)) for number in numbers]
    times = tuple(attempt.account() for attempt in attempts)
    steps, lost = _count_steps(attempts)
    pairs = zip(attempts, (None, *attempts), strict=False)
    incidents = sorted(
        incident
        for attempt, before in pairs
        for incident in find_incidents(attempt, lost.get(attempt.number, 0), before)
    )
    return Ledger(
        accounts={name: sum(attempt.accounts[name] for attempt in times) for name in ACCOUNTS},
        total_ns=sum(attempt.total_ns for attempt in times),
        attempts=times,
        useful_ns=_useful_ns(attempts, "flops_per_token"),
        useful_full_attention_ns=_useful_ns(attempts, "flops_per_token_full_attention"),
        steps=steps,
        lost_steps=sum(lost.values()),
        incidents=tuple(incidents),
        storage_ns=sum(attempt.storage_ns for attempt in times),
    )


def largest_overhead(ledger: Ledger) -> Overhead | None:
    """Return the account other than compute that took the most time, with advice; None if there is no overhead."""
    name = max((name for name in ACCOUNTS if name != "compute"), key=lambda name: ledger.accounts[name])
    outage = any(attempt.ended_in_outage for attempt in ledger.attempts)
    waited = outage or 2 * ledger.storage_ns > ledger.accounts["checkpoint stall"]
    advice = _STORAGE_ADVICE if name == "checkpoint stall" and waited else _ADVICE[name]
    return Overhead(name, ledger.seconds(name), advice) if ledger.accounts[name] else None


def _count_steps(attempts: Sequence[AttemptRecords]) -> tuple[int, dict[int, int]]:
    """Return how many steps count, and how many earlier ones each attempt rolled back."""
    counted: set[int] = set()
    lost: dict[int, int] = {}
    for attempt in attempts:
        resumed = [s for e in attempt.leader.rest if e["kind"] == "resumed" and (s := time_of(e, "step")) is not None]
        if resumed:
            back = {step for step in counted if step > resumed[-1]}
            lost[attempt.number] = len(back)
            counted -= back
        counted |= {step for e in attempt.leader.steps if (step := time_of(e, "step")) is not None}
    return len(counted), lost


def _useful_ns(attempts: Sequence[AttemptRecords], flops_key: str) -> int | None:
    """Return the device time of the kept steps' model FLOPs at peak; None if no attempt recorded its peak."""
    useful: float | None = None
    for attempt in attempts:
        facts = [event for event in attempt.leader.rest if event["kind"] == "facts"]
        flops, peak = (plausible_count(facts[-1].get(key)) if facts else 0.0 for key in (flops_key, "peak_flops"))
        if not flops or peak < 1:
            continue
        tokens = sum(
            plausible_count(event.get("tokens")) for event in attempt.leader.steps if _is_kept(event, attempt.kept)
        )
        useful = (useful or 0.0) + tokens * flops / peak * 1e9
    return None if useful is None else round(useful)


def _is_kept(event: Event, kept: int | None) -> bool:
    step = time_of(event, "step")
    return step is not None and (kept is None or step <= kept)
