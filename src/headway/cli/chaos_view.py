"""Formats a fault matrix: a table and the agent's messages as text, or JSON."""

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from operator import attrgetter
from typing import Any

from headway.chaos.matrix import CaseResult, FaultMatrix, SoakResult
from headway.chaos.random_faults import count_kinds
from headway.chaos.torchrun_baseline import BaselineResult
from headway.cli.text import columns, plural, short_seconds

NAME = 22
MISSED = 3
"""Faults that did not fire to name: one that ends a run prevents all later ones."""


def matrix_lines(matrix: FaultMatrix, peers: Sequence[BaselineResult] = ()) -> list[str]:
    """Return a matrix as text, with the torchrun baseline if there is one."""
    below = [*_beside(peers), ""] if peers else []
    return [*_head(matrix), *_table(matrix), "", *below, *_said(matrix), *_trouble(matrix), _end(matrix)]


def _head(matrix: FaultMatrix) -> list[str]:
    tries = max((len(result.tries) for result in matrix.results), default=1)
    often = f", medians of {tries} tries" if tries > 1 else ""
    step = f"{1e3 * matrix.step_s:.0f} ms"
    return [f"{matrix.recipe}: {plural(matrix.workers, 'worker')}, {plural(matrix.steps, 'step')} of {step}{often}", ""]


def _table(matrix: FaultMatrix) -> Iterator[str]:
    yield f"  {'fault':<{NAME}}  {'noticed':>8}  {'stepping':>8}  {'redone':>6}  {'lost':>8}  oracle"
    for result in matrix.results:
        noticed = _seconds(result.median(lambda figures: figures.noticed_s))
        stepping = _seconds(result.median(lambda figures: figures.stepping_s))
        redone, lost = result.median(lambda figures: figures.redone), result.median(lambda figures: figures.lost_s)
        yield (
            f"  {result.case.name:<{NAME}}  {noticed:>8}  {stepping:>8}  {'-' if redone is None else f'{redone:g}':>6}"
            f"  {_seconds(lost):>8}  {_verdict(result)}"
        )


def _verdict(result: CaseResult) -> str:
    if len(result.tries) > 1:
        return f"met {result.met} of {len(result.tries)}"
    if result.met:
        return "refused" if result.case.way == "refused" else "equal"
    return "NOT MET"


def _seconds(value: float | None) -> str:
    return "-" if value is None else short_seconds(value)


def _beside(peers: Sequence[BaselineResult]) -> Iterator[str]:
    yield f"  {'under torchrun':<{NAME}}  {'restarts':>8}  {'stepping':>8}  {'recovered':>9}"
    for peer in peers:
        restarted = _seconds(peer.median(lambda result: result.restarted_s))
        stepping = _seconds(peer.median(lambda result: result.stepping_s))
        row = (
            f"  {peer.case.name:<{NAME}}  {restarted:>8}  {stepping:>8}  {f'{peer.recovered} of {len(peer.tries)}':>9}"
        )
        yield f"{row}{_otherwise(peer)}"


def _otherwise(peer: BaselineResult) -> str:
    """Return the outcomes of the tries that did not recover."""
    outcomes = Counter(result.outcome for result in peer.tries if result.outcome != "recovered")
    words = [f"{count} {outcome}" if len(peer.tries) > 1 else outcome for outcome, count in outcomes.items()]
    return f"  ({', '.join(words)})" if words else ""


def _said(matrix: FaultMatrix) -> Iterator[str]:
    """Yield the agent's messages in the first try of each row."""
    yield "messages of the agent:"
    for result in matrix.results:
        messages = result.tries[0].said
        if messages:
            yield from _wrapped(f"{result.case.name}: {'; then: '.join(messages)}")
    yield ""


def _trouble(matrix: FaultMatrix) -> Iterator[str]:
    """Yield what went wrong."""
    for result in matrix.results:
        for number, case_run in enumerate(result.tries, start=1):
            which = f", try {number}" if len(result.tries) > 1 else ""
            for text in (*case_run.complaints, *(f"left behind: {leftover}" for leftover in case_run.left)):
                yield from _wrapped(f"{result.case.name}{which}: {text}")


def _end(matrix: FaultMatrix) -> str:
    met = sum(result.met == len(result.tries) for result in matrix.results)
    return f"{met} of {plural(len(matrix.results), 'fault')} handled as expected."


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, columns(), initial_indent="  ", subsequent_indent="    ", break_long_words=True)


def matrix_object(matrix: FaultMatrix, peers: Sequence[BaselineResult] = ()) -> dict[str, Any]:
    """Return a matrix as JSON-ready values."""
    return {
        "recipe": matrix.recipe,
        "workers": matrix.workers,
        "steps": matrix.steps,
        "step_s": matrix.step_s,
        "met": matrix.met,
        "faults": [_object(result) for result in matrix.results],
        "beside": [_peer_object(peer) for peer in peers],
    }


def _object(result: CaseResult) -> dict[str, Any]:
    return {
        "name": result.case.name,
        "what": result.case.what,
        "way": result.case.way,
        "met": result.met,
        **{name: result.median(attrgetter(name)) for name in ("noticed_s", "stepping_s", "redone", "lost_s")},
        "tries": [asdict(case_run) | {"met": case_run.met} for case_run in result.tries],
    }


def _peer_object(peer: BaselineResult) -> dict[str, Any]:
    return {
        "name": peer.case.name,
        "recovered": peer.recovered,
        **{name: peer.median(attrgetter(name)) for name in ("restarted_s", "stepping_s")},
        "tries": [asdict(result) for result in peer.tries],
    }


# -- one long run with random faults


def long_lines(long: SoakResult) -> list[str]:
    """Return a long run as text."""
    count = len(long.faults.faults)
    lines = [
        f"{len(long.struck)} of {plural(count, 'fault')} fired in {plural(long.steps, 'step')} "
        f"(seed {long.seed}), {long.seconds:.0f} s:",
        *(f"  {number:>4}  {name}" for name, number in count_kinds(long.faults).items()),
        f"{plural(long.attempts, 'attempt')}; {long.lost_s:.1f} worker-seconds lost",
    ]
    if long.met:
        return [*lines, "equal: chain and digest match the run without faults; nothing was left behind."]
    wrong = [*long.complaints, *(f"left behind: {leftover}" for leftover in long.left)]
    missed = [f"fault {number} never fired" for number in range(count) if number not in long.struck][:MISSED]
    return [*lines, *(line for text in [*wrong, *missed] for line in _wrapped(text)), "NOT recovered exactly."]


def long_object(long: SoakResult, recipe: str, workers: int) -> dict[str, Any]:
    """Return a long run as JSON-ready values."""
    return {
        "recipe": recipe,
        "workers": workers,
        "seed": long.seed,
        "steps": long.steps,
        "attempts": long.attempts,
        "met": long.met,
        "kinds": count_kinds(long.faults),
        "faults": len(long.faults.faults),
        "struck": len(long.struck),
        "lost_s": long.lost_s,
        "seconds": long.seconds,
        "complaints": list(long.complaints),
        "left": list(long.left),
    }
