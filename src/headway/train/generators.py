"""A worker's generators: processes that sample answers with weights of one version while the worker trains on.

Weights are shared, and change only between two batches, when no generator samples. A generator that died, was stopped
or is silent for too long is replaced, and asked for what is not on disk yet; answers do not depend on who samples them.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from headway.errors import RunError, WorkerError
from headway.parallel import ParallelModel, World
from headway.parallel.shared_weights import share_weights
from headway.parallel.whole import refresh_whole
from headway.recipe import Recipe
from headway.rl.rollout_files import BatchHeader, RolloutFiles
from headway.state import Channel, ChannelClosed
from headway.track import RunFolder, user_log
from headway.track.process_state import process_state
from headway.train.answers import AnswerRequest
from headway.train.live_model import live_model

SILENT_S = 120.0
"""How long a generator that samples may say nothing: a pass of its engine, the first of which compiles."""
STARTUP_S = 600.0
"""How long one may take to import and load."""
MOST_DEATHS = 3
"""Replacements of a generator in a row without an answer from it."""
POLL_S = 0.05


@dataclass
class _Process:
    """A generator, and what it was asked for."""

    popen: subprocess.Popen[bytes]
    line: Channel
    last_message_s: float
    ready: bool = False
    requests: list[AnswerRequest] = field(default_factory=list)
    number: int = -1
    """Of the request that it works at; -1 for none."""


class Generators:
    """`rl.generators` processes of one worker; a batch at a time."""

    def __init__(
        self,
        recipe: Recipe,
        run: RunFolder,
        spread: ParallelModel,
        world: World,
        *,
        silent_s: float = SILENT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """All workers together: each gathers the whole weights for its own processes."""
        assert recipe.rl is not None
        self._recipe, self._run, self._spread, self._world = recipe, run, spread, world
        self._files, self._clock, self._silent_s = RolloutFiles(run), clock, silent_s
        self._plain = live_model(recipe, run, spread, world).module
        self._weights = share_weights(self._plain, world.device)
        self._header: BatchHeader | None = None
        self._asked = self._version = 0
        self._deaths = [0] * recipe.rl.generators
        self._processes = [self._started(place) for place in range(recipe.rl.generators)]

    def take_weights(self, version: int) -> None:
        """Share the weights of now, after the step `version`; all workers together, and while nothing is sampled."""
        assert not self.busy, "generators sample with the weights that are shared"
        refresh_whole(self._plain, self._spread, self._world)
        if self._world.device.type == "cuda":
            torch.cuda.synchronize()
        self._version = version

    @property
    def busy(self) -> bool:
        """Whether any of them samples, or is to sample."""
        return any(process.requests for process in self._processes)

    def ask(self, header: BatchHeader, requests: Sequence[AnswerRequest]) -> None:
        """Have answers sampled with the weights that are shared now; returns at once."""
        assert not self.busy, "one batch at a time"
        assert header.version == self._version, "a batch is sampled with the weights that its header names"
        self._header = header
        for place, process in enumerate(self._processes):
            process.requests = list(requests[place :: len(self._processes)])
            self._send(process)

    def wait(self, on_round: Callable[[], None]) -> None:
        """Wait until all that was asked for is on disk; `on_round` is called again and again meanwhile."""
        while self.busy:
            self.advance(POLL_S)
            on_round()

    def advance(self, timeout_s: float = 0.0) -> None:
        """Read what the processes say, and replace those that died or hang; raise if one failed."""
        for place, process in enumerate(self._processes):
            if not process.requests and process.ready:
                continue
            try:
                for message in process.line.receive(timeout_s):
                    process.last_message_s = self._clock()
                    self._note(place, process, message.kind, message.fields)
            except ChannelClosed:
                self._replace(place, "ended")
                continue
            silent = self._clock() - process.last_message_s
            if process.requests and process_state(process.popen.pid) == "T":
                self._replace(place, "was stopped")
            elif silent > (self._silent_s if process.ready else STARTUP_S):
                self._replace(place, f"said nothing for {silent:.0f} s")

    def sampling(self) -> list[int]:
        """Return the processes that sample, by pid."""
        return [process.popen.pid for process in self._processes if process.ready and process.requests]

    def close(self) -> None:
        """End all processes; what is on disk stays."""
        for process in self._processes:
            _kill(process)
        self._processes = []
        self._weights.close()

    def _note(self, place: int, process: _Process, kind: str, fields: dict[str, Any]) -> None:
        if kind == "ready":
            process.ready = True
            self._send(process)
        elif kind == "done" and fields["number"] == process.number:
            process.requests, process.number, self._deaths[place] = [], -1, 0
        elif kind == "failed":
            if fields["known"]:
                raise WorkerError(f"a generator failed: {fields['message']}", hint=fields["hint"])
            raise RunError(f"a generator failed: {fields['message']}", hint="the run's logs have the traceback")

    def _send(self, process: _Process) -> None:
        """Send a process its requests, if there are any and it is ready for them."""
        if not process.ready or not process.requests:
            return
        assert self._header is not None
        self._asked += 1
        process.number, process.last_message_s = self._asked, self._clock()
        requests = [[request.prompt.number, request.sample, request.answer] for request in process.requests]
        with suppress(ChannelClosed):  # noticed by the next `advance`
            process.line.send(
                "sample", header=asdict(self._header), version=self._version, requests=requests, number=process.number
            )

    def _replace(self, place: int, what: str) -> None:
        """Start another process for one of no more use, and have it sample what is missing."""
        old = self._processes[place]
        _kill(old)
        new = self._processes[place] = self._started(place)
        if self._header is not None:
            done = self._files.read_parts(self._header)
            new.requests = [request for request in old.requests if request.key not in done]
        progressed = len(new.requests) < len(old.requests)
        self._deaths[place] = 1 if progressed else self._deaths[place] + 1
        if self._deaths[place] > MOST_DEATHS:
            raise RunError(
                f"a generator {what}, {self._deaths[place]} times in a row without an answer",
                hint="the run's logs say more; does its memory suffice?",
            )

    def _started(self, place: int) -> _Process:
        end, child_end = Channel.pair()
        try:
            popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "headway.train.generator", str(child_end.fileno()), str(os.getpid())],
                pass_fds=[child_end.fileno()],
                start_new_session=True,  # Ctrl-C is for the run
            )
        except OSError as error:
            raise WorkerError(f"cannot start a generator: {error.strerror or error}") from error
        finally:
            child_end.close()
        end.send(
            "begin", self._weights.descriptors, path=sys.path, log=user_log.shared(), run=str(self._run.path),
            part=f"{self._world.rank}-{place}", device=str(self._world.device), threads=torch.get_num_threads(),
            weights=self._weights.handle(),
        )  # fmt: skip
        return _Process(popen, end, self._clock())


def _kill(process: _Process) -> None:
    with suppress(ProcessLookupError):
        process.popen.kill()  # its scorers die with it
    process.popen.wait()
    process.line.close()
