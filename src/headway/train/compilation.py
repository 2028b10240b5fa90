"""Records compilations by torch.compile, so that the ledger can separate them from compute."""

from typing import Any

from torch._dynamo.callback import callback_handler

from headway.track import Recorder
from headway.track.heartbeat import HeartbeatWriter, Phase


def record_compilation(recorder: Recorder, beat: HeartbeatWriter) -> None:
    """Record a `compile` span and heartbeat phase around every compilation, forward and backward."""
    during: list[Phase] = []

    def begin(_: Any) -> None:
        recorder.event("begin", name="compile")
        during.append(beat.phase)
        beat.enter("compile")

    def end(_: Any) -> None:
        recorder.event("end-span", name="compile")
        beat.enter(during.pop())

    callback_handler.register_start_callback(begin)
    callback_handler.register_end_callback(end)
