"""The engine in a thread of its own, for the coroutines of a server.

Coroutines send commands through a queue and get outputs through queues of their own. All work on the engine happens in
its thread, between two passes.
"""

import asyncio
import itertools
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import torch

from headway.errors import HeadwayError
from headway.frozen_heap import frozen_heap
from headway.inference.params import SamplingParams
from headway.inference.text_engine import TextEngine, TextOutput


class Overloaded(HeadwayError):
    """The queue is full."""


class Draining(HeadwayError):
    """The server is about to end."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down", hint="try another one")


@dataclass
class Timings:
    """Seconds of finished steps of requests, by kind, since they were last taken."""

    first_token_s: list[float] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    request_s: list[float] = field(default_factory=list)


@dataclass
class _Client:
    """A request's coroutine, and when its tokens came."""

    send: Callable[[TextOutput | HeadwayError], None]
    left: int
    started: float
    last: dict[int, float] = field(default_factory=dict)
    """When each output's newest token came."""


class EngineService:
    """Requests from coroutines of one event loop, to an engine in its own thread."""

    def __init__(self, engine: TextEngine, *, max_waiting: int = 1024) -> None:
        self.engine, self.max_waiting = engine, max_waiting
        self.timings = Timings()
        self.draining = False
        self.finished: dict[str, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._clients: dict[str, _Client] = {}
        self._numbers = itertools.count()
        self.open = 0
        """Requests that wait or run."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the engine's thread runs."""
        return self._thread.is_alive()

    async def stream(
        self, prompt_ids: list[int], params: SamplingParams, adapter: str | None = None
    ) -> AsyncIterator[TextOutput]:
        """Yield a request's outputs as they come. If the coroutine ends before, its blocks are freed at once."""
        if self.draining:
            raise Draining
        limits = self.engine.engine.limits
        if self.open >= self.max_waiting + limits.max_sequences:
            raise Overloaded(f"{self.open} requests are waiting or running", hint="try again in a moment")
        request_id = str(next(self._numbers))
        loop = asyncio.get_running_loop()
        outputs: asyncio.Queue[TextOutput | HeadwayError] = asyncio.Queue()

        def send(output: TextOutput | HeadwayError) -> None:
            loop.call_soon_threadsafe(outputs.put_nowait, output)

        self.open += 1
        try:
            self._commands.put(lambda: self._add(request_id, prompt_ids, params, adapter, send))
            left = params.n
            while left:
                output = await outputs.get()
                if isinstance(output, HeadwayError):
                    raise output
                left -= output.output.finish is not None
                yield output
        except asyncio.CancelledError:
            if self.draining:  # by the end of the server, which does not wait any longer
                raise Draining from None
            raise
        finally:
            self.open -= 1
            self._commands.put(lambda: self._abort(request_id))

    def close(self) -> None:
        """End the thread after the commands that were given."""
        self._commands.put(None)
        self._thread.join()

    # -- in the engine's thread

    def _run(self) -> None:
        with frozen_heap():
            self._serve()

    def _serve(self) -> None:
        while True:
            busy = self.engine.busy
            try:
                while True:
                    command = self._commands.get(block=not busy)
                    if command is None:
                        return
                    command()
                    busy = self.engine.busy
            except queue.Empty:
                pass
            self._step()

    def _step(self) -> None:
        try:
            parts = self.engine.step()
        except Exception as error:  # whatever a pass may raise, the server goes on
            self._fail_all(error)
            return
        now = time.monotonic()
        for part in parts:
            client = self._clients.get(part.output.request_id)
            if client is None:
                continue
            self._time(client, part.output.index, now)
            client.send(part)
            if part.output.finish is not None:
                self.finished[part.output.finish] += 1
                client.left -= 1
                if client.left == 0:
                    self.timings.request_s.append(now - client.started)
                    del self._clients[part.output.request_id]

    def _time(self, client: _Client, index: int, now: float) -> None:
        if index not in client.last:
            self.timings.first_token_s.append(now - client.started)
        else:
            self.timings.token_s.append(now - client.last[index])
        client.last[index] = now

    def _add(
        self,
        request_id: str,
        ids: list[int],
        params: SamplingParams,
        adapter: str | None,
        send: Callable[[TextOutput | HeadwayError], None],
    ) -> None:
        try:
            self.engine.add(request_id, ids, params, adapter)
        except HeadwayError as error:
            send(error)
            return
        self._clients[request_id] = _Client(send, params.n, time.monotonic())

    def _abort(self, request_id: str) -> None:
        if self._clients.pop(request_id, None) is not None:
            self.engine.abort(request_id)
            self.finished["abort"] += 1

    def _fail_all(self, error: Exception) -> None:
        """End all requests with an error; those that come later start from an empty cache."""
        memory = isinstance(error, torch.OutOfMemoryError)
        message = "the device ran out of memory" if memory else f"a pass failed: {type(error).__name__}: {error}"
        hint = "lower --memory-share or --max-batch-tokens" if memory else None
        for request_id, client in list(self._clients.items()):
            self.engine.abort(request_id)
            client.send(HeadwayError(message, hint=hint))
            self.finished["error"] += 1
        self._clients.clear()
        self.engine.engine.pool.forget_prefixes()
        if memory:
            torch.cuda.empty_cache()
