"""Answers to rows of training: packed without crossing a row's end, with the columns that a policy's loss reads."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.data.loader import MASKED, Batch
from headway.rl.advantages import Estimator, divergences
from headway.rl.rollout import Rollout

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class PackedAnswers:
    """Rows of answers, and where each answer is."""

    batch: Batch
    spans: tuple[tuple[int, slice], ...]
    """Of each answer: its row, and where in it the labels of the answer's tokens are."""


def pack_answers(rollouts: Sequence[Rollout], seq: int, rows_multiple: int) -> PackedAnswers:
    """Pack prompts with their answers into rows of `seq` inputs, best-fit decreasing: a function of the lengths alone.

    Labels are what the model wrote; documents are numbered per row, padding being the last. The number of rows is a
    multiple of `rows_multiple`, and at least that, with rows of padding where answers do not fill them.
    """
    lengths = [len(rollout.prompt_ids) + len(rollout.token_ids) - 1 for rollout in rollouts]
    assert all(length <= seq for length in lengths), "prompts that leave too little room are not sampled"
    rows = best_fit(lengths, seq)
    count = max(-(-len(rows) // rows_multiple), 1) * rows_multiple
    width = max((len(row) for row in rows), default=0) + 1
    inputs = np.zeros((count, seq), dtype=np.int64)
    labels = np.full((count, seq), MASKED, dtype=np.int64)
    documents = np.zeros((count, seq), dtype=np.int32)
    answers = np.full((count, width), -1, dtype=np.int64)
    behaviour = np.zeros((count, seq), dtype=np.float32)
    spans = [(0, slice(0))] * len(rollouts)
    for row, members in enumerate(rows):
        first = 0
        for number, member in enumerate(members):
            rollout, length = rollouts[member], lengths[member]
            ids = np.array(rollout.prompt_ids + rollout.token_ids, dtype=np.int64)
            inputs[row, first : first + length] = ids[:-1]
            documents[row, first : first + length] = number
            start = first + len(rollout.prompt_ids) - 1  # the input that predicts the answer's first token
            for low, high in rollout.written:
                labels[row, start + low : start + high] = rollout.token_ids[low:high]
                behaviour[row, start + low : start + high] = rollout.logprobs[low:high]
            answers[row, number] = member
            spans[member] = row, slice(start, start + len(rollout.token_ids))
            first += length
        documents[row, first:] = len(members)
    trained = int((labels != MASKED).sum())
    columns: dict[str, npt.NDArray[Any]] = {"answer": answers, "behaviour": behaviour}
    return PackedAnswers(Batch(inputs, labels, trained, documents, columns), tuple(spans))


def best_fit(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Return the members of each row: the longest first, each into the fullest row that has room."""
    rows = list[list[int]]()
    rooms = list[tuple[int, int]]()  # (room left, row), ascending
    for member in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        place = bisect_left(rooms, (lengths[member], -1))
        if place == len(rooms):
            rows.append([member])
            insort(rooms, (size - lengths[member], len(rows) - 1))
        else:
            room, row = rooms.pop(place)
            rows[row].append(member)
            insort(rooms, (room - lengths[member], row))
    return rows


def per_answer(values: Floats, answers: npt.NDArray[np.int64]) -> Floats:
    """Return a column [rows, documents] of values by answer; 0 where there is no answer."""
    padded = np.append(values.astype(np.float32), np.float32(0))
    spread: Floats = padded[answers]  # -1 is the appended zero
    return spread


def per_token(values: Sequence[Floats], packed: PackedAnswers) -> Floats:
    """Return a column [rows, seq], as labels, of values by answer and token; 0 elsewhere."""
    column = np.zeros(packed.batch.labels.shape, dtype=np.float32)
    for of_answer, span in zip(values, packed.spans, strict=True):
        column[span] = of_answer
    return np.where(packed.batch.labels != MASKED, column, np.float32(0))


def token_divergences(
    packed: PackedAnswers, logprobs: Floats, reference: Floats, kind: Estimator
) -> list[npt.NDArray[np.float64]]:
    """Return the divergence from the reference at each token of each answer; 0 where the model did not write it."""
    gaps = np.where(packed.batch.labels != MASKED, divergences(logprobs, reference, kind), 0.0)
    return [gaps[span] for span in packed.spans]
