"""How far the run of a job has come, and what it has saved: read by its node from the run's folder, cheaply."""

import contextlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

_CHECKPOINT = re.compile(r"step-([0-9]+)")
_RECORD = re.compile(r"([0-9]+)-rank-0\.jsonl")
_STEP = re.compile(rb'"step": ?([0-9]+)')
TAIL_BYTES = 64 * 2**10
"""Of a record: enough for several steps."""


@dataclass(frozen=True)
class RunProgress:
    """The newest step of a run, and its newest durable checkpoint."""

    step: int | None = None
    saved_step: int | None = None
    saved_unix_s: float | None = None
    """When the checkpoint was committed."""


def read_progress(folder: Path) -> RunProgress | None:
    """Return the progress of a run; None if the folder has no run's records."""
    if not (folder / "recipe.json").exists():
        return None
    saved = _newest_checkpoint(folder / "checkpoints")
    step = _last_step(folder / "events")
    if saved is None:
        return RunProgress(step)
    return RunProgress(step, saved[0], saved[1])


def _newest_checkpoint(folder: Path) -> tuple[int, float] | None:
    """The step and time of the newest checkpoint; its name is given at its commit."""
    steps = list[tuple[int, Path]]()
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            match = _CHECKPOINT.fullmatch(path.name)
            if match is not None:
                steps.append((int(match[1]), path / "manifest.json"))
    for step, manifest in sorted(steps, reverse=True):
        with contextlib.suppress(OSError):
            return step, manifest.stat().st_mtime
    return None


def _last_step(events: Path) -> int | None:
    """The last step that the newest attempt has recorded: of whole lines at the end of its record."""
    records = list[tuple[int, Path]]()
    with contextlib.suppress(OSError):
        for path in events.iterdir():
            match = _RECORD.fullmatch(path.name)
            if match is not None:
                records.append((int(match[1]), path))
    for _, path in sorted(records, reverse=True):
        with contextlib.suppress(OSError), path.open("rb") as file:
            file.seek(max(path.stat().st_size - TAIL_BYTES, 0))
            for line in reversed(file.read().split(b"\n")[:-1]):
                step = _step_of(line)
                if step is not None:
                    return step
    return None


def _step_of(line: bytes) -> int | None:
    if not _STEP.search(line):
        return None
    with contextlib.suppress(ValueError):
        event = json.loads(line)
        if isinstance(event, dict) and event.get("kind") == "step" and isinstance(event.get("step"), int):
            return int(event["step"])
    return None
