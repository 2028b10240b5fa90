"""What a process did when, as intervals: flattened to the innermost one, and put over those of another. Pure."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from headway.track.events import Event

LONGEST = 1 << 62
"""Nanoseconds; a larger number means a damaged record."""

Interval: TypeAlias = tuple[int, int, str]
"""Begin, end, account. A plain tuple: named tuples were the largest single cost of a long run's ledger."""


def flatten(intervals: Iterable[Interval], begin: int, end: int) -> list[Interval]:
    """Cut [begin, end] into pieces, each with the account of its innermost interval, "" for none.

    Innermost is the latest begun; of two begun together, the shorter, then the later recorded. Intervals may cross.
    """
    pieces: list[Interval] = []
    open_: list[tuple[int, str]] = []  # ends and accounts, by start time: the last still open is innermost
    now = begin

    def advance(until: int) -> None:
        nonlocal now
        while now < until:
            while open_ and open_[-1][0] <= now:
                open_.pop()
            upto, name = open_[-1] if open_ else (until, "")
            pieces.append((now, min(upto, until), name))
            now = min(upto, until)

    # Sorted before they are clipped: of two that began before the allocation, the later is still the inner one.
    for first, last, name in sorted(intervals, key=lambda interval: (interval[0], -interval[1])):
        if max(first, begin) < min(last, end):
            if first > now:
                advance(first)
            open_.append((last, name))
    advance(end)
    return pieces


def overlay(upper: list[Interval], lower: list[Interval]) -> Iterable[Interval]:
    """Fill the gaps of a flat list from another that covers the same time."""
    begins = [begin for begin, _, _ in lower]
    for piece in upper:
        begin, end, name = piece
        if name:
            yield piece
            continue
        index = max(bisect_right(begins, begin) - 1, 0)
        while index < len(lower) and lower[index][0] < end:
            first, last, name = lower[index]
            yield max(first, begin), min(last, end), name
            index += 1


def time_of(event: Event, name: str = "t") -> int | None:
    """Return an integer field of an event; None if it is missing or out of range."""
    value = event.get(name)
    return value if type(value) is int and -LONGEST < value < LONGEST else None


def span_intervals(events: Sequence[Event], accounts: Mapping[str, str], open_until: int) -> list[Interval]:
    """Return the spans of a process; an end closes all spans begun inside, unclosed ones end at `open_until`."""
    spans: list[Interval] = []  # by start, with names for accounts
    open_: list[int] = []
    for event in events:
        t, name = time_of(event), str(event.get("name"))
        if t is None or name not in accounts:
            continue
        if event["kind"] == "begin":
            open_.append(len(spans))
            spans.append((t, open_until, name))
        elif event["kind"] == "end-span" and any(spans[index][2] == name for index in open_):
            closed = ""
            while closed != name:
                index = open_.pop()
                begin, _, closed = spans[index]
                spans[index] = (begin, t, closed)
    return [(begin, end, accounts[name]) for begin, end, name in spans]


def step_intervals(steps: Iterable[Event], offset: int, kept: int | None) -> list[Interval]:
    """Return the data stall and compute of each step; those of rolled-back steps are rework.

    The wait for a save's copy is a separate interval at the end of the step, where the device waits.
    """
    intervals: list[Interval] = []
    for event in steps:
        t, step = time_of(event), time_of(event, "step")
        if t is None or step is None:
            continue
        end = t + offset
        computed = end - (time_of(event, "compute") or 0)
        waited = computed - (time_of(event, "data") or 0)
        lost = kept is not None and step > kept
        intervals.append((waited, computed, "rework" if lost else "data stall"))
        intervals.append((computed, end, "rework" if lost else "compute"))
        stalled = min(time_of(event, "checkpoint") or 0, end - computed)
        if stalled > 0 and not lost:
            intervals.append((end - stalled, end, "checkpoint stall"))
    return intervals
