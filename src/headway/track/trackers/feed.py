"""Reads a run's event files in batches from where a tracker has got to: the files are the queue."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from headway.track.events import Event
from headway.track.run_folder import RunFolder
from headway.track.trackers.base import Scalars, Sent, State
from headway.track.user_log import USER, Logged, logged_path

MOST_BYTES = 1 << 20
"""Bytes of one file that are read at once."""
_NO_METRIC = {"kind", "t", "step", "data", "compute", "cursor", "chain", "checkpoint"}
_EVALUATED = {"loss": "eval_loss", "loss_ema": "eval_loss_ema", "reward": "eval_reward"}


class EventFeed:
    """What a tracker has not got yet."""

    def __init__(self, run: RunFolder, every_steps: int = 1, offsets: Mapping[str, int] | None = None) -> None:
        self._run, self._every = run, every_steps
        self.offsets = dict(offsets or {})
        """Bytes of each event file that were read."""
        self.outcome: str | None = None
        """How the last attempt that was read ended."""
        self._walls: dict[str, float] = {}
        self._last: dict[str, Scalars] = {}

    def batches(self) -> Iterator[list[Sent]]:
        """Yield what is new, in order within each file; `offsets` then says what has been read."""
        for path in self._paths():
            while (batch := self._read(path)) is not None:
                yield batch

    def _paths(self) -> list[Path]:
        paths = [path for path in self._run.events.glob("*.jsonl") if _is_sent(path)]
        return sorted(paths, key=lambda path: (path.name.partition("-")[0], not path.name.endswith("-agent.jsonl")))

    def _read(self, path: Path) -> list[Sent] | None:
        offset = self.offsets.get(path.name, 0)
        size = MOST_BYTES
        try:
            with path.open("rb") as file:
                if path.name not in self._walls:
                    self._walls[path.name] = _wall(file.readline())
                file.seek(offset)
                data = file.read(size)
                while b"\n" not in data and len(data) == size:  # a longer line
                    size *= 2
                    file.seek(offset)
                    data = file.read(size)
        except OSError:
            return None
        complete = data.rfind(b"\n") + 1
        if not complete:
            return None
        self.offsets[path.name] = offset + complete
        batch: list[Sent] = []
        for line in data[:complete].splitlines():
            batch += self._sent(path.name, line)
        return batch

    def _sent(self, name: str, line: bytes) -> Iterator[Sent]:
        try:
            event = from_json(line, cache_strings="keys")
        except ValueError:
            return
        if not isinstance(event, dict) or not isinstance(event.get("kind"), str):
            return
        time = event.get("t")
        wall = self._walls.get(name, 0.0) + (time / 1e9 if isinstance(time, int | float) else 0.0)
        if name.endswith("-agent.jsonl"):
            yield from self._agent(event, wall)
        elif USER in name:
            yield from self._user(event, wall)
        else:
            yield from self._leader(name, event, wall)

    def _leader(self, name: str, event: Event, wall: float) -> Iterator[Sent]:
        step = event.get("step")
        if type(step) is not int:
            return
        if event["kind"] == "eval":
            values = _numbers({_EVALUATED.get(key, key): value for key, value in event.items()})
            yield Scalars(step, wall, values)
            yield State("evaluated", wall, step=step, values=values)
        if event["kind"] == "step":
            values = _numbers(event)
            data, compute, tokens = (event.get(key) for key in ("data", "compute", "tokens"))
            if type(data) is int and type(compute) is int and data + compute > 0:
                values["step_s"] = (data + compute) / 1e9
                if isinstance(tokens, int):
                    values["tokens_per_s"] = tokens / values["step_s"]
            scalars = Scalars(step, wall, values)
            self._last[name] = scalars
            if step % self._every == 0:
                self._last.pop(name)
                yield scalars

    def _user(self, event: Event, wall: float) -> Iterator[Sent]:
        step = event.get("step")
        if type(step) is not int:
            return
        values = event.get("values")
        if event["kind"] == "logged" and isinstance(values, dict):
            yield Scalars(step, wall, _numbers(values))
        if event["kind"] == "media" and (path := logged_path(self._run, event.get("file"))) is not None:
            kind = event.get("type")
            if kind in ("image", "audio", "table", "artifact"):
                caption = str(event.get("caption", ""))
                yield wall, Logged(step, str(event.get("key")), kind, path, 0, str(event.get("sha256")), caption)

    def _agent(self, event: Event, wall: float) -> Iterator[Sent]:
        match event["kind"]:
            case "attempt":
                self.outcome = None
                step = event.get("from_step")
                yield State("started", wall, "", step if type(step) is int else None)
            case "end":
                self.outcome = str(event.get("outcome"))
                again = "; restarting" if "recovery" in event else ""
                yield State("incident" if again else self.outcome, wall, f"{event.get('reason', '')}{again}")
            case "hang" | "straggler" | "storage" | "node" if event.get("text"):
                yield State("incident", wall, str(event["text"]))
            case _:
                pass

    def last(self) -> list[Sent]:
        """Return the last step of each attempt, if `every_steps` left it out."""
        held, self._last = list(self._last.values()), {}
        return list(held)


def _is_sent(path: Path) -> bool:
    return path.name.endswith(("-rank-0.jsonl", "-agent.jsonl")) or f"-{USER}" in path.name


def _numbers(event: Mapping[str, Any]) -> dict[str, float]:
    return {
        key: math.nan if value is None else float(value)
        for key, value in event.items()
        if key not in _NO_METRIC and (value is None or (isinstance(value, int | float) and abs(value) < 1e300))
    }


def _wall(line: bytes) -> float:
    try:
        wall = from_json(line).get("wall")
    except (ValueError, AttributeError):
        return 0.0
    return float(wall) if isinstance(wall, int | float) else 0.0
