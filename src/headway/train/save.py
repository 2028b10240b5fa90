"""A worker's end of a save: its part of the state, copied into memory that the agent holds.

On a CPU the copy is the whole stall. On a GPU it runs on a stream of its own beside the next forward and backward
passes, and the device waits for it before the parameters next change (`fence`); the host waits for nothing. What
becomes of the copy is the agent's business: no thread of the trainer works on it, no word goes from worker to worker.
"""

import base64
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headway.errors import StateError, WorkerError
from headway.state import BufferPlan, Channel, ChannelClosed, Message, SaveBuffer, plan_buffer
from headway.state.save_buffer import NEVER
from headway.state.tensors import OwnedPiece, as_tensor, frozen_names, named_state, owned_pieces
from headway.state.tiers import Tier
from headway.train.build import Parts
from headway.train.rng import rng_state

__all__ = ["SaveClient"]

FLUSH_S = 1.0
WORD_S = 0.5


@dataclass(frozen=True)
class _Copy:
    """A copy that the device is at work on."""

    buffer: int
    step: int
    host_s: float
    """What the host spent on starting it."""
    done: torch.cuda.Event
    reached: torch.cuda.Event
    """Recorded where the device waits for it, if it ever does."""

    @property
    def waited_s(self) -> float:
        """How long the device has waited for it; asked when both have happened."""
        return max(0.0, self.reached.elapsed_time(self.done) / 1e3)


class SaveClient:
    """The line to the agent, and the buffers that came over it."""

    def __init__(self, line: Channel, parts: Parts, attempt: int) -> None:
        self._attempt = attempt
        model, held, world = parts.spread.model, parts.held, parts.world
        self._line, self._model, self._held, self._world = line, model, held, world
        self._recorder, self._faults, self._beat = parts.recorder, parts.faults, parts.beat
        still = frozen_names(model, held)
        average = None if parts.average is None else parts.average.tensors
        mine = owned_pieces(named_state(model, parts.optimizer, held, average), held)
        self._owned = [own for own in mine if own.piece.name not in still]
        trained = len(self._owned)
        self._owned += [own for own in mine if own.piece.name in still]
        self._moving = {f"model/{name}" for name, _ in model.named_buffers()}
        shapes = [own.piece for own in self._owned]
        self._plan: BufferPlan = plan_buffer(shapes[:trained], shapes[trained:])
        self._buffers: list[SaveBuffer] = []
        self._targets: list[list[Tensor]] = []
        self._free = set[int]()
        self._steps = dict[int, int]()
        self._asked = False
        self._copy: _Copy | None = None
        self._stream = torch.cuda.Stream() if world.device.type == "cuda" else None
        told = [[piece.name, piece.dtype, piece.shape, piece.start, piece.local_shape] for piece in shapes]
        line.send("pieces", trained=told[:trained], still=told[trained:])
        if self._stream is not None:
            with parts.recorder.span("buffers"):  # page-locking takes seconds: better before the first step than after
                self._need_buffers()

    # -- what the loop asks and says

    def full(self) -> bool:
        """Whether all buffers are still in use, so that a save would have to wait."""
        self._need_buffers()
        self._hear(0.0)
        return not self._free

    def take_wish(self) -> bool:
        """Whether the agent has asked for a save since the last time."""
        self._hear(0.0)
        asked, self._asked = self._asked, False
        return asked

    def skip(self, step: int) -> None:
        """Tell the agent that a save is left out."""
        self._say("skipped", step=step)

    def save(self, step: int, cursor: int, chain: str, tiers: tuple[Tier, ...], last: bool = False) -> None:
        """Copy this worker's part of the state of a step; only the last save of a run waits for a free buffer."""
        with self._recorder.span("checkpoint"):
            started = time.monotonic()
            self._faults.reach("save", step)
            self._need_buffers()
            self.finish()
            while not self._free:
                self._wait()
            number = min(self._free)
            self._free.remove(number)
            rng = base64.b64encode(rng_state(self._world).numpy().tobytes()).decode()
            mesh = {name: axis.size for name, axis in self._world.axes.items()}
            note = {"attempt": self._attempt, "cursor": cursor, "chain": chain, "rng": rng, "mesh": mesh}
            note |= {"tiers": tiers, "last": last}
            self._buffers[number].mark(step, NEVER)
            self._buffers[number].write_note(note)
            self._steps[number] = step
            self._refresh()
            if self._stream is None:
                for target, own in zip(self._targets[number], self._owned, strict=True):
                    target.copy_(own.tensor)
                self._tell(number, step, time.monotonic() - started)
            else:
                self._copy = self._start_copy(number, step)
                if last:
                    self.finish()

    def fence(self) -> Callable[[], float] | None:
        """Have the device wait for a copy before it changes what is copied.

        Returns what tells, once the step is over, how many seconds it waited.
        """
        copy = self._copy
        if copy is None:
            return None
        copy.reached.record()
        torch.cuda.current_stream().wait_event(copy.done)
        return lambda: copy.waited_s

    def tick(self) -> None:
        """Tell the agent of a copy that is done by now."""
        if self._copy is not None and self._copy.done.query():
            self.finish()

    def finish(self) -> None:
        """Wait for a copy under way, and tell the agent."""
        if self._copy is not None:
            copy, self._copy = self._copy, None
            copy.done.synchronize()
            waited_s = copy.waited_s if copy.reached.query() and copy.reached.cuda_event else 0.0
            self._tell(copy.buffer, copy.step, copy.host_s + waited_s)

    # -- copies

    def _start_copy(self, number: int, step: int) -> _Copy:
        assert self._stream is not None
        begun = time.monotonic()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for target, own in zip(self._targets[number], self._owned, strict=True):
                target.copy_(own.tensor, non_blocking=True)
            done = torch.cuda.Event(enable_timing=True)
            done.record()
        return _Copy(number, step, time.monotonic() - begun, done, torch.cuda.Event(enable_timing=True))

    def _tell(self, number: int, step: int, stall_s: float) -> None:
        self._faults.reach("saved", step)
        # A state must not outlive the record of its steps: a restart from it would leave a gap.
        self._recorder.flush(FLUSH_S)
        self._buffers[number].mark(step, step)
        self._say("filled", buffer=number, step=step, stall_s=stall_s)

    def _refresh(self) -> None:
        """A module may have put another tensor in a buffer's place; parameters and optimizer states stay put."""
        if not self._moving:
            return
        state = named_state(self._model, share=self._held)
        now = owned_pieces({name: tensor for name, tensor in state.items() if name in self._moving}, self._held)
        tensors = {own.piece: own.tensor for own in now}
        self._owned = [OwnedPiece(own.piece, tensors.get(own.piece, own.tensor)) for own in self._owned]

    # -- the line

    def _need_buffers(self) -> None:
        while not self._buffers:
            self._wait()

    def _wait(self) -> None:
        """Wait for a word of the agent's; that is no hang, however slow its disk."""
        self._hear(WORD_S)
        self._beat.mark()

    def _hear(self, timeout_s: float | None) -> None:
        for message in _receive(self._line, timeout_s):
            match message.kind:
                case "buffers":
                    self._take_buffers(message.descriptors)
                    self._free = set(message.fields["free"])
                case "free":
                    number, told = message.fields["buffer"], (message.fields["attempt"], message.fields["step"])
                    if (self._attempt, self._steps.get(number)) in (told, (self._attempt, None)):
                        self._free.add(number)  # else it is filled again: an agent that took over cannot know
                case "save":
                    self._asked = True
                case "refused":
                    raise StateError(message.fields["message"], hint=message.fields["hint"])

    def _take_buffers(self, descriptors: list[int]) -> None:
        self._buffers = [SaveBuffer(self._plan, descriptor) for descriptor in descriptors]
        for buffer in self._buffers:
            if self._stream is not None:
                _page_lock(buffer)
            bits = {piece.name: buffer.bits(part, piece) for part in self._plan.parts for piece in part.pieces}
            self._targets.append([as_tensor(bits[own.piece.name], own.piece.dtype) for own in self._owned])

    def _say(self, kind: str, **fields: Any) -> None:
        try:
            self._line.send(kind, **fields)
        except ChannelClosed:
            raise WorkerError("the agent is gone") from None


def _receive(line: Channel, timeout_s: float | None) -> list[Message]:
    try:
        return line.receive(timeout_s)
    except ChannelClosed:
        raise WorkerError("the agent is gone") from None


def _page_lock(buffer: SaveBuffer) -> None:
    """Have the driver lock a buffer's pages: copies from the device then run at the link's speed, by themselves."""
    memory = torch.frombuffer(buffer.memory, dtype=torch.uint8)
    status: Callable[[int, int, int], Any] = torch.cuda.cudart().cudaHostRegister
    failed = int(status(memory.data_ptr(), memory.numel(), 0))
    if failed:
        raise StateError(
            f"the driver could not lock {memory.numel() / 1e9:.1f} GB of memory for saves (error {failed})",
            hint="the machine may lack memory: checkpoint.memory_gb bounds what is kept",
        )
