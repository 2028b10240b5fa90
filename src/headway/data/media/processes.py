"""Processes that decode, replaced when they die, hang or outgrow their memory."""

import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from headway.data.media.decode import Pixels
from headway.data.media.examiner import Examined
from headway.data.media.manifest import Kind
from headway.data.media.sources import MediaSource
from headway.errors import DamagedData

TRIES = 3
"""A request that ends this many processes fails."""
AHEAD = 4
"""Files to examine that are handed out per process."""


@dataclass(frozen=True)
class DecoderLimits:
    """What a decoder process may use."""

    memory_mb: int = 4096
    """Address space."""
    request_s: float = 120.0
    """Time for one request."""


class RequestFailed(DamagedData):
    """A request that no process could answer."""


class _Ended(Exception):
    """A process ended, or was silent for too long."""


class DecoderProcesses:
    """A fixed number of processes that answer requests in any order; close it, or use it as a context."""

    def __init__(
        self, count: int, limits: DecoderLimits | None = None, on_replaced: Callable[[str], None] | None = None
    ) -> None:
        self.limits = limits or DecoderLimits()
        self.replaced = 0
        """Processes that ended and were replaced."""
        self._on_replaced = on_replaced or (lambda _: None)
        self._requests: queue.SimpleQueue[tuple[dict[str, Any], Future[Any]] | None] = queue.SimpleQueue()
        self._workers: list[subprocess.Popen[bytes] | None] = [None] * count
        self._closed = False
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._serve, args=(index,), daemon=True) for index in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, request: dict[str, Any]) -> "Future[Any]":
        """Have a request answered: the answer's JSON, or for samples their pixels."""
        result: Future[Any] = Future()
        self._requests.put((request, result))
        return result

    def __enter__(self) -> "DecoderProcesses":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """The processes that run."""
        return [worker.pid for worker in self._workers if worker is not None and worker.poll() is None]

    def close(self) -> None:
        """End all processes; requests that are not answered fail."""
        with self._lock:
            self._closed = True
            for worker in self._workers:
                if worker is not None:
                    worker.kill()
        for _ in self._threads:
            self._requests.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self, index: int) -> None:
        """Answer requests with process `index`; runs in a thread."""
        # Processes inherit the mask: Ctrl-C goes to all processes of a terminal, and the parent ends these.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        while (item := self._requests.get()) is not None:
            request, result = item
            if result.cancelled() or self._closed:
                result.cancel()
                continue
            try:
                result.set_result(self._answer(index, request))
            except Exception as error:  # it belongs to whoever waits for the answer
                result.set_exception(error)
        self._end(index)

    def _answer(self, index: int, request: dict[str, Any]) -> Any:
        why = ""
        for _ in range(TRIES):
            try:
                return _exchange(self._worker(index), request, time.monotonic() + self.limits.request_s)
            except (_Ended, OSError) as error:
                why = str(error) or type(error).__name__
                status = self._end(index)
                if self._closed:
                    break
                if status is not None and why == "ended":
                    why = f"ended with status {status}"
                self.replaced += 1
                self._on_replaced(why)
        raise RequestFailed(f"{TRIES} decoder processes in turn {why} on it")

    def _worker(self, index: int) -> subprocess.Popen[bytes]:
        with self._lock:
            worker = self._workers[index]
            if self._closed:
                raise _Ended("were closed")
            if worker is None:
                command = [
                    sys.executable,
                    "-m",
                    "headway.data.media.worker",
                    str(self.limits.memory_mb),
                    str(os.getpid()),
                ]
                # A process has one core: more threads would compete with the other processes.
                environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
                worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
                self._workers[index] = worker
            return worker

    def _end(self, index: int) -> int | None:
        worker = self._workers[index]
        if worker is None:
            return None
        status = worker.poll()
        worker.kill()
        for pipe in (worker.stdin, worker.stdout):
            assert pipe is not None
            with suppress(OSError):  # what was not written yet cannot be
                pipe.close()
        worker.wait()
        self._workers[index] = None
        return worker.returncode if status is None else status


def _exchange(worker: subprocess.Popen[bytes], request: dict[str, Any], deadline: float) -> Any:
    """Send a request and return its answer; raise _Ended."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(json.dumps(request).encode() + b"\n")
    worker.stdin.flush()
    head = bytearray()
    while b"\n" not in head:
        head += _read(worker, 1 << 16, deadline)
    line, _, rest = bytes(head).partition(b"\n")
    answer = json.loads(line)
    if "failed" in answer:
        raise RequestFailed(answer["failed"])
    if "shapes" not in answer:
        return answer
    return _read_pixels(worker, answer["shapes"], rest, deadline)


def _read_pixels(
    worker: subprocess.Popen[bytes], shapes: list[list[int]], rest: bytes, deadline: float
) -> list[Pixels]:
    """Read the pixels that follow an answer, of which `rest` has been read."""
    sizes = [int(np.prod(shape)) for shape in shapes]
    content = np.empty(sum(sizes), dtype=np.uint8)
    content[: len(rest)] = np.frombuffer(rest, dtype=np.uint8)
    filled = len(rest)
    while filled < len(content):
        part = _read(worker, min(len(content) - filled, 1 << 20), deadline)
        content[filled : filled + len(part)] = np.frombuffer(part, dtype=np.uint8)
        filled += len(part)
    ends = np.cumsum(sizes).tolist()
    return [content[end - size : end].reshape(shape) for shape, size, end in zip(shapes, sizes, ends, strict=True)]


def _read(worker: subprocess.Popen[bytes], most: int, deadline: float) -> bytes:
    """Read what is there, as soon as there is something."""
    assert worker.stdout is not None
    descriptor = worker.stdout.fileno()
    ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
    if not ready:
        raise _Ended("gave no answer in time")
    part = os.read(descriptor, most)
    if not part:
        raise _Ended("ended")
    return part


def in_processes(
    count: int, limits: DecoderLimits | None = None
) -> Callable[[Kind, Sequence[MediaSource]], Iterator[Examined]]:
    """Return what examines files in so many processes, for `build_media`."""

    def examine(kind: Kind, sources: Sequence[MediaSource]) -> Iterator[Examined]:
        waiting = iter(sources)
        with DecoderProcesses(min(count, max(len(sources), 1)), limits) as decoders:
            pending: dict[Future[Any], MediaSource] = {}
            while True:
                for source in islice(waiting, AHEAD * count - len(pending)):
                    file = {"name": source.name, "root": str(source.root)}
                    stamp = {"bytes": source.bytes, "mtime_ns": source.mtime_ns}
                    pending[decoders.submit({"examine": file | stamp, "kind": kind})] = source
                if not pending:
                    return
                done, _ = wait(pending, return_when=FIRST_COMPLETED)
                for answer in done:
                    yield _examined(pending.pop(answer), answer)

    return examine


def _examined(source: MediaSource, answer: "Future[Any]") -> Examined:
    try:
        return Examined.from_json(answer.result())
    except RequestFailed as error:
        return Examined(source.name, refused=error.message)
