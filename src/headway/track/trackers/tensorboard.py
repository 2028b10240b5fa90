"""TensorBoard's event files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.recipe.track import TensorBoard
from headway.track.trackers.base import RunFacts, Scalars, Sent, State, Tracker


class TensorBoardTracker(Tracker):
    """Writes scalars and PNG images; each opening makes a file of its own, as TensorBoard expects."""

    name = "tensorboard"

    def __init__(self, settings: TensorBoard) -> None:
        self._settings = settings

    def open(self, run: RunFacts, known: Mapping[str, Any]) -> dict[str, Any]:
        """Begin an event file."""
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = Path(self._settings.folder) / run.name
        self._writer = EventFileWriter(str(folder))
        return {**known, "folder": str(folder)}

    def send(self, batch: Sequence[Sent]) -> None:
        """Write a batch."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        for item in batch:
            if isinstance(item, State):
                continue
            if isinstance(item, Scalars):
                step, wall = item.step, item.wall
                values = [Summary.Value(tag=key, simple_value=value) for key, value in item.values.items()]
            else:
                wall, file = item
                if file.kind != "image" or file.path.suffix != ".png":
                    continue
                step, image = file.step, Summary.Image(encoded_image_string=file.path.read_bytes())
                values = [Summary.Value(tag=file.key, image=image)]
            self._writer.add_event(Event(wall_time=wall, step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self, outcome: str | None) -> None:  # noqa: ARG002
        """End the event file."""
        self._writer.close()
