"""Rollouts of a run on disk: a file of JSON lines per batch of rollouts, and one per worker while a batch is sampled.

    rollouts/batch-00000012.jsonl              header, rollouts in order, end
    rollouts/batch-00000012.rank-0.part.jsonl  header, rollouts as they are scored
    rollouts/batch-00000012.0.safetensors      log-probabilities of packed answers that its first update needs

A batch is named after the first step that learns from it. Rollouts are appended as soon as they are scored, so that a
worker killed while others are sampled loses none; whoever continues takes those whose header is that of the batch it
would sample: the same step, weights (by the run's chain) and place in the order of prompts.
"""

import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from headway.errors import RunError
from headway.rl.rollout import AnswerScore, Rollout
from headway.track import RunFolder

Floats = npt.NDArray[np.float32]

FORMAT = 1
FOLDER = "rollouts"
_BATCH = re.compile(r"batch-(\d{8})\.jsonl")


@dataclass(frozen=True)
class BatchHeader:
    """What a batch of rollouts is a function of."""

    step: int
    """The first step that learns from it."""
    version: int
    """The step after which the weights were those that sampled it."""
    chain: str
    """The run's chain after that step."""
    cursor: int
    """Sample of the run that it begins with."""


@dataclass(frozen=True)
class RolloutBatch:
    """A finished batch."""

    header: BatchHeader
    end: int
    """Sample of the run that the next batch begins with."""
    rollouts: tuple[Rollout, ...]
    """By sample, then by answer."""


_FIELDS = tuple(each.name for each in fields(Rollout))


@dataclass
class _Encoded:
    """Lines of a batch's rollouts that this process appended to a part, so that none is encoded again when the batch is
    finished, for which training waits: 0.6 s for 512 answers of 560 tokens."""

    header: BatchHeader | None = None
    lines: dict[tuple[int, int], tuple[Rollout, str]] = field(default_factory=dict)
    """By sample and answer."""

    def line(self, rollout: Rollout) -> str:
        """Return the line of a rollout."""
        kept = self.lines.get((rollout.sample, rollout.answer))
        return kept[1] if kept is not None and kept[0] == rollout else _line(_row_of(rollout))


class RolloutFiles:
    """The rollouts of one run."""

    def __init__(self, run: RunFolder) -> None:
        self._folder = run.path / FOLDER
        self._encoded = _Encoded()

    def path(self, step: int) -> Path:
        """Return the file of a finished batch."""
        return self._folder / f"batch-{step:08d}.jsonl"

    def steps(self) -> list[int]:
        """Return the first steps of the finished batches there are, ascending."""
        names = (_BATCH.fullmatch(path.name) for path in self._folder.glob("batch-*.jsonl"))
        return sorted(int(name[1]) for name in names if name)

    def header(self, step: int) -> BatchHeader | None:
        """Return the header of a finished batch; None if there is none."""
        try:
            with self.path(step).open() as file:
                return _header_of([json.loads(file.readline())])
        except (FileNotFoundError, ValueError):
            return None

    def unfinished(self) -> dict[int, BatchHeader]:
        """Return the header of the newest file of each batch that is not finished, by its first step."""
        parts = sorted(self._folder.glob("batch-*.part.jsonl"), key=lambda path: (_changed_ns(path), path.name))
        headers = [_header_of(list(_lines(path))) for path in parts]
        return {header.step: header for header in headers if header is not None and self.header(header.step) is None}

    def read(self, step: int) -> RolloutBatch | None:
        """Return a finished batch; None if there is none, or its end is missing."""
        try:
            return self.parse(self.path(step).read_text())
        except FileNotFoundError:
            return None
        except ValueError:
            raise RunError(f"{self.path(step)} is damaged", hint="remove it: its rollouts are sampled again") from None

    def parse(self, text: str) -> RolloutBatch | None:
        """Return the batch of a finished file's text; None if its end is missing."""
        lines = list(_rows(text))
        header = _header_of(lines)
        if header is None or "end" not in lines[-1]:
            return None
        return RolloutBatch(header, int(lines[-1]["end"]), tuple(map(_rollout_of, lines[1:-1])))

    def read_parts(self, header: BatchHeader) -> dict[tuple[int, int], Rollout]:
        """Return the rollouts of an unfinished batch by sample and answer, from all workers' files of this header."""
        rollouts = dict[tuple[int, int], Rollout]()
        for path in sorted(self._folder.glob(f"batch-{header.step:08d}.rank-*.part.jsonl")):
            lines = list(_lines(path))
            if _header_of(lines) == header:
                for rollout in map(_rollout_of, lines[1:]):
                    rollouts[rollout.sample, rollout.answer] = rollout
        return rollouts

    def open_part(self, header: BatchHeader, writer: str) -> "PartWriter":
        """Return the file that a worker, by its rank, or one of its generators appends rollouts of a batch to."""
        if self._encoded.header != header:
            self._encoded = _Encoded(header)
        path = self._folder / f"batch-{header.step:08d}.rank-{writer}.part.jsonl"
        return PartWriter(path, header, self._encoded)

    def finish(self, batch: RolloutBatch) -> None:
        """Write a finished batch durably, and remove its parts."""
        self._folder.mkdir(exist_ok=True)
        final = self.path(batch.header.step)
        temporary = final.with_suffix(".tmp")
        with temporary.open("w") as file:
            file.write(_line({"format": FORMAT, **asdict(batch.header)}))
            file.writelines(map(self._encoded.line, batch.rollouts))
            file.write(_line({"end": batch.end}))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(final)
        for part in self._folder.glob(f"batch-{batch.header.step:08d}.rank-*.part.jsonl"):
            part.unlink(missing_ok=True)

    def read_scores(
        self, header: BatchHeader, share: int, names: Collection[str], shape: tuple[int, ...]
    ) -> dict[str, Floats] | None:
        """Return stored log-probabilities of a step's share of a batch; None if some are missing."""
        if not names:
            return {}
        path = self._scores_path(header.step, share)
        try:
            with safe_open(path, framework="numpy") as file:
                if file.metadata() != _identity(header):
                    return None
                scores = {name: file.get_tensor(name) for name in names}
        except (OSError, SafetensorError):
            return None
        return scores if all(values.shape == shape for values in scores.values()) else None

    def store_scores(self, header: BatchHeader, share: int, columns: Mapping[str, Floats]) -> None:
        """Store log-probabilities of a step's share of a batch durably."""
        path = self._scores_path(header.step, share)
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(_sorted(save(dict(columns), metadata=_identity(header))))
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)

    def _scores_path(self, step: int, share: int) -> Path:
        return self._folder / f"batch-{step:08d}.{share}.safetensors"

    def discard(self, version: int) -> None:
        """Remove what the weights after the step `version`, or later ones, have sampled."""
        parts = sorted(self._folder.glob("batch-*.part.jsonl"))
        started = [header for path in parts if (header := _header_of(list(_lines(path)))) is not None]
        finished = [header for step in self.steps() if (header := self.header(step)) is not None]
        for step in {header.step for header in (*started, *finished) if header.version >= version}:
            for path in self._folder.glob(f"batch-{step:08d}.*"):
                path.unlink(missing_ok=True)

    def prune(self, keep: int, needed_from: int) -> None:
        """Remove all but the newest `keep` batches before a step that a checkpoint may be resumed from."""
        old = [step for step in self.steps() if step < needed_from]
        for step in old[: max(0, len(old) - keep)]:
            for path in (self.path(step), *self._folder.glob(f"batch-{step:08d}.*.safetensors")):
                path.unlink(missing_ok=True)


class PartWriter:
    """Appends rollouts of an unfinished batch; what was written of another header is replaced."""

    def __init__(self, path: Path, header: BatchHeader, encoded: _Encoded) -> None:
        self._encoded = encoded
        path.parent.mkdir(exist_ok=True)
        with suppress(FileNotFoundError):
            if _header_of(list(_lines(path))) != header or not path.read_bytes().endswith(b"\n"):
                _rewrite(path, header)
        fresh = not path.exists()
        self._file = path.open("a")
        if fresh:
            self._append({"format": FORMAT, **asdict(header)})

    def add(self, rollout: Rollout) -> None:
        """Append a scored rollout; it is in the file when this returns, though not yet on the disk."""
        line = self._append(_row_of(rollout))
        self._encoded.lines[rollout.sample, rollout.answer] = rollout, line

    def _append(self, row: Mapping[str, Any]) -> str:
        line = _line(row)
        self._file.write(line)
        self._file.flush()
        return line

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _rewrite(path: Path, header: BatchHeader) -> None:
    """Drop a torn last line, or everything if the file is of another batch."""
    lines = list(_lines(path))
    kept = lines if _header_of(lines) == header else []
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(map(_line, kept or [{"format": FORMAT, **asdict(header)}])))
    temporary.replace(path)


def to_lines(rollouts: Iterable[Rollout]) -> str:
    """Return rollouts as JSON lines, to send them to another worker."""
    return "".join(_line(_row_of(rollout)) for rollout in rollouts)


def from_lines(text: str) -> list[Rollout]:
    """Return the rollouts of JSON lines."""
    return from_rows(map(json.loads, text.splitlines()))


def from_rows(rows: Iterable[Mapping[str, Any]]) -> list[Rollout]:
    """Return the rollouts of parsed JSON lines."""
    return [_rollout_of(row) for row in rows]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Return the rows of a file, which may be missing; a torn last line is ignored."""
    try:
        yield from _rows(path.read_text())
    except FileNotFoundError:
        return
    except ValueError:
        raise RunError(
            f"{path} is damaged: a line is not JSON", hint="remove it: its rollouts are sampled again"
        ) from None


def _changed_ns(path: Path) -> int:
    """Return when a file was last written to; 0 if it is gone."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _rows(text: str) -> Iterator[dict[str, Any]]:
    return map(json.loads, text.split("\n")[:-1])


def _identity(header: BatchHeader) -> dict[str, str]:
    return {key: str(value) for key, value in asdict(header).items()}


def _sorted(file: bytes) -> bytes:
    """Return a safetensors file with the keys of its header in order: `save` writes those of its metadata in any."""
    end = 8 + int.from_bytes(file[:8], "little")
    header = json.dumps(json.loads(file[8:end]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + file[end:]


def _header_of(lines: Sequence[Mapping[str, Any]]) -> BatchHeader | None:
    if not lines or lines[0].get("format") != FORMAT:
        return None
    return BatchHeader(**{key: value for key, value in lines[0].items() if key != "format"})


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, separators=(",", ":")) + "\n"


def _row_of(rollout: Rollout) -> dict[str, Any]:
    # asdict copies every token: 1.5 s for 512 answers of 560 tokens.
    row = {name: getattr(rollout, name) for name in _FIELDS}
    return row if rollout.score is None else {**row, "score": asdict(rollout.score)}


def _rollout_of(row: Mapping[str, Any]) -> Rollout:
    score = row["score"]
    values = {key: tuple(row[key]) for key in ("prompt_ids", "token_ids", "logprobs")}
    values["turns"] = tuple(row.get("turns", ()))
    values["written"] = tuple((first, end) for first, end in row["written"])
    return Rollout(**{**row, **values, "score": None if score is None else AnswerScore(**score)})
