"""The worker's side of a save: it copies its part of the state into memory that the agent holds.

On a CPU the copy is the whole stall. On a GPU it runs on its own stream, concurrent with the next forward and backward
passes; the device waits for it before the parameters next change (`fence`), and the host never waits. The agent does
the rest: no thread of the trainer works on it, and workers exchange no messages.
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
from headway.track.carried_records import carry_record
from headway.train.build import Parts
from headway.train.rng import rng_state

FLUSH_S = 1.0
WORD_S = 0.5


@dataclass(frozen=True)
class _Copy:
    """A copy in progress on the device."""

    buffer: int
    step: int
    host_s: float
    """Host time to start it."""
    done: torch.cuda.Event
    reached: torch.cuda.Event
    """Event recorded where the device waits for it, if it does."""

    @property
    def waited_s(self) -> float:
        """Return how long the device waited for it; call after both events."""
        return max(0.0, self.reached.elapsed_time(self.done) / 1e3)


class SaveClient:
    """The channel to the agent, and the buffers received over it."""

    def __init__(self, line: Channel, parts: Parts, attempt: int) -> None:
        self._attempt = attempt
        model, held, world = parts.spread.model, parts.held, parts.world
        self._line, self._model, self._held, self._world = line, model, held, world
        self._recorder, self._faults, self._beat = parts.recorder, parts.faults, parts.beat
        frozen = frozen_names(model, held)
        average = None if parts.average is None else parts.average.tensors
        items = owned_pieces(named_state(model, parts.optimizer, held, average), held)
        self._owned = [item for item in items if item.piece.name not in frozen]
        trained = len(self._owned)
        self._owned += [item for item in items if item.piece.name in frozen]
        self._moving = {f"model/{name}" for name, _ in model.named_buffers()}
        shapes = [item.piece for item in self._owned]
        self._plan: BufferPlan = plan_buffer(shapes[:trained], shapes[trained:])
        self._buffers: list[SaveBuffer] = []
        self._targets: list[list[Tensor]] = []
        self._free = set[int]()
        self._steps = dict[int, int]()
        self._asked = False
        self._copy: _Copy | None = None
        self._stream = torch.cuda.Stream() if world.device.type == "cuda" else None
        layout = [[piece.name, piece.dtype, piece.shape, piece.start, piece.local_shape] for piece in shapes]
        line.send("pieces", trained=layout[:trained], still=layout[trained:])
        if self._stream is not None:
            with parts.recorder.span("buffers"):  # page-locking takes seconds: do it before the first step
                self._need_buffers()

    # -- called by the loop

    def full(self) -> bool:
        """Whether all buffers are in use, so that a save would have to wait."""
        self._need_buffers()
        self._handle_messages(0.0)
        return not self._free

    def take_save_request(self) -> bool:
        """Whether the agent has requested a save since the last call."""
        self._handle_messages(0.0)
        asked, self._asked = self._asked, False
        return asked

    def skip(self, step: int) -> None:
        """Report a skipped save to the agent."""
        self._say("skipped", step=step)

    def save(self, step: int, cursor: int, chain: str, tiers: tuple[Tier, ...], last: bool = False) -> None:
        """Copy this worker's part of a step's state; only the last save of a run waits for a free buffer."""
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
            note = {"attempt": self._attempt, "cursor": cursor, "chain": chain, "rng": rng, "mesh": self._world.sizes}
            note |= {"tiers": tiers, "last": last}
            self._buffers[number].mark(step, NEVER)
            self._buffers[number].write_note(note)
            self._steps[number] = step
            self._refresh()
            if self._stream is None:
                for target, item in zip(self._targets[number], self._owned, strict=True):
                    target.copy_(item.tensor)
                self._tell(number, step, time.monotonic() - started)
            else:
                self._copy = self._start_copy(number, step)
                if last:
                    self.finish()

    def fence(self) -> Callable[[], float] | None:
        """Make the device wait for a copy before it changes the copied tensors.

        Return a function that gives the seconds it waited, once the step is over.
        """
        copy = self._copy
        if copy is None:
            return None
        copy.reached.record()
        torch.cuda.current_stream().wait_event(copy.done)
        return lambda: copy.waited_s

    def tick(self) -> None:
        """Report a finished copy to the agent."""
        if self._copy is not None and self._copy.done.query():
            self.finish()

    def finish(self) -> None:
        """Wait for a copy in progress, and report it to the agent."""
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
            for target, item in zip(self._targets[number], self._owned, strict=True):
                target.copy_(item.tensor, non_blocking=True)
            done = torch.cuda.Event(enable_timing=True)
            done.record()
        return _Copy(number, step, time.monotonic() - begun, done, torch.cuda.Event(enable_timing=True))

    def _tell(self, number: int, step: int, stall_s: float) -> None:
        self._faults.reach("saved", step)
        # A state must not outlive the record of its steps: what cannot be written now travels with it.
        flushed = self._recorder.flush(FLUSH_S)
        carried = {} if flushed else {name: r.model_dump() for name, r in carry_record(self._recorder).items()}
        self._buffers[number].mark(step, step)
        self._say("filled", buffer=number, step=step, stall_s=stall_s, **({"records": carried} if carried else {}))

    def _refresh(self) -> None:
        """Look up buffers again, since a module may replace them; parameters and optimizer states never move."""
        if not self._moving:
            return
        state = named_state(self._model, share=self._held)
        now = owned_pieces({name: tensor for name, tensor in state.items() if name in self._moving}, self._held)
        tensors = {item.piece: item.tensor for item in now}
        self._owned = [OwnedPiece(item.piece, tensors.get(item.piece, item.tensor)) for item in self._owned]

    # -- the channel

    def _need_buffers(self) -> None:
        while not self._buffers:
            self._wait()

    def _wait(self) -> None:
        """Wait for a message of the agent; however slow its disk, that is not a hang."""
        self._handle_messages(WORD_S)
        self._beat.mark()

    def _handle_messages(self, timeout_s: float | None) -> None:
        for message in _receive(self._line, timeout_s):
            match message.kind:
                case "buffers":
                    self._take_buffers(message.descriptors)
                    self._free = set(message.fields["free"])
                case "free":
                    number, saved = message.fields["buffer"], (message.fields["attempt"], message.fields["step"])
                    if (self._attempt, self._steps.get(number)) in (saved, (self._attempt, None)):
                        self._free.add(number)  # else it was filled again, which a new agent cannot know
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
            self._targets.append([as_tensor(bits[item.piece.name], item.piece.dtype) for item in self._owned])

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
    """Page-lock a buffer: copies from the device are then asynchronous and run at link speed."""
    memory = torch.frombuffer(buffer.memory, dtype=torch.uint8)
    status: Callable[[int, int, int], Any] = torch.cuda.cudart().cudaHostRegister
    failed = int(status(memory.data_ptr(), memory.numel(), 0))
    if failed:
        raise StateError(
            f"cannot page-lock {memory.numel() / 1e9:.1f} GB of memory for saves (CUDA error {failed})",
            hint="the machine may be short of memory: lower checkpoint.memory_gb",
        )
