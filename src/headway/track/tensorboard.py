"""Export a run's metrics to TensorBoard event files, without torch."""

import time
from pathlib import Path

from headway.errors import UsageError
from headway.track.events import read_run
from headway.track.metrics import history, read_metrics
from headway.track.run_folder import RunFolder


def export_tensorboard(run: RunFolder, folder: Path) -> int:
    """Write every metric of a run as scalars into `folder/<run>`; return the number of values."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError as error:
        raise UsageError(
            "the tensorboard package is not installed", hint="pip install 'headway[tensorboard]'"
        ) from error
    walls = _walls(run)
    rows: dict[int, list[tuple[str, float]]] = {}
    for key, (steps, values) in read_metrics(run).items():
        for step, value in zip(steps.tolist(), values.tolist(), strict=True):
            rows.setdefault(step, []).append((key, value))
    writer = EventFileWriter(str(folder / run.name))
    for step in sorted(rows):
        summary = Summary(value=[Summary.Value(tag=key, simple_value=value) for key, value in rows[step]])
        writer.add_event(Event(wall_time=walls.get(step, time.time()), step=step, summary=summary))
    writer.close()
    return sum(len(row) for row in rows.values())


def _walls(run: RunFolder) -> dict[int, float]:
    """Return when each step ended, in Unix seconds."""
    walls: dict[int, float] = {}
    for record in read_run(run, process="rank-0"):
        for event in history([record]):
            if type(event.get("t")) is int:
                walls[event["step"]] = record.header.wall + event["t"] / 1e9
    return walls
