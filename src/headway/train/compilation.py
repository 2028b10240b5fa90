"""Records when torch.compile compiles, so that the ledger can tell it from computing."""

from typing import Any

from torch._dynamo.callback import callback_handler

from headway.track import Recorder

__all__ = ["record_compilation"]


def record_compilation(recorder: Recorder) -> None:
    """Write a `compile` span around each compilation, forward and backward, first and again."""

    def begin(_: Any) -> None:
        recorder.event("begin", name="compile")

    def end(_: Any) -> None:
        recorder.event("end-span", name="compile")

    callback_handler.register_start_callback(begin)
    callback_handler.register_end_callback(end)
