"""A generator: a process that samples answers while a worker trains, `python -m headway.train.generator FD PARENT`.

It has the worker's weights in shared memory, and changes nothing there. Asked for a batch's answers, it samples those
that are missing, has them scored by processes of its own, and appends them to its own part of the batch on disk, where
the worker reads them. What an answer is depends on the weights, the prompt and its seed alone.
"""

import ctypes
import os
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from headway.data.corpus import Corpus, open_corpus
from headway.errors import HeadwayError
from headway.inference.load import live_run
from headway.kernels.dispatch import make_plain
from headway.parallel.shared_weights import open_weights
from headway.recipe import Recipe
from headway.rl.rollout import Rollout
from headway.rl.rollout_files import BatchHeader, RolloutFiles
from headway.rl.scorer import Scorer
from headway.state import Channel, ChannelClosed
from headway.track import RunFolder, read_recipe, user_log
from headway.train.answers import AnswerRequest, AnswerSampler, sampler_of
from headway.train.live_model import compute_dtype, plain_model
from headway.train.scored_answers import ScoredAnswers

PR_SET_PDEATHSIG = 1
ALIVE_S = 1.0
"""Between messages that say that it works."""


class GeneratorProcess:
    """Samples what it is asked for."""

    def __init__(self, line: Channel, start: dict[str, Any], descriptors: list[int]) -> None:
        recipe, self._line, self._part = read_recipe(RunFolder(Path(start["run"]))), line, start["part"]
        assert recipe.rl is not None
        run, device = RunFolder(Path(start["run"])), torch.device(start["device"])
        if device.type == "cuda":
            torch.cuda.set_device(device)
        torch.set_num_threads(start["threads"])
        torch.use_deterministic_algorithms(recipe.train.deterministic)
        make_plain(recipe.train.plain)
        corpus = open_corpus(recipe)
        assert isinstance(corpus, Corpus)
        self._prompts, self._files, self._scorer = corpus.prompt_reader(), RolloutFiles(run), Scorer(recipe.rl)
        self._sampler = _sampler(recipe, run, device, start["weights"], descriptors)
        self._reported_s = 0.0

    def sample(self, header: BatchHeader, version: int, requests: list[list[int]]) -> None:
        """Sample and score answers; each is in the part of this process once it is scored."""
        wanted = [AnswerRequest(self._prompts.prompt(number), sample, answer) for number, sample, answer in requests]
        self._sampler.take_weights(version)
        with self._files.open_part(header, self._part) as part:

            def store(rollout: Rollout) -> None:
                part.add(rollout)
                self._say_alive()

            work = ScoredAnswers(self._sampler, self._scorer, wanted, store, self._say_alive)
            user_log.set_step(header.step)
            work.sample()
            work.wait()

    def _say_alive(self) -> None:
        now = time.monotonic()
        if now - self._reported_s >= ALIVE_S:
            self._reported_s = now
            self._line.send("alive")


def _sampler(
    recipe: Recipe, run: RunFolder, device: torch.device, weights: dict[str, Any], descriptors: list[int]
) -> AnswerSampler:
    """Return a sampler of the worker's weights, which are in place once the worker says so."""
    plain = plain_model(recipe)
    open_weights(plain, compute_dtype(recipe, device), weights, descriptors, device)
    return sampler_of(recipe, live_run(plain.eval(), recipe, run, device), lambda: None)


def main() -> int:
    """Sample until the worker closes the channel; return the exit status."""
    _end_with(int(sys.argv[2]))
    line = Channel(socket.socket(fileno=int(sys.argv[1])))
    generator: GeneratorProcess | None = None
    try:
        while True:
            for message in line.receive(None):
                if generator is None:
                    sys.path[:] = message.fields["path"]
                    if (log := message.fields["log"]) is not None:
                        user_log.open_log(Path(log["run"]), log["attempt"], f"{log['process']}-generate-{os.getpid()}")
                    generator = GeneratorProcess(line, message.fields, message.descriptors)
                    line.send("ready")
                else:
                    header = BatchHeader(**message.fields["header"])
                    generator.sample(header, message.fields["version"], message.fields["requests"])
                    line.send("done", number=message.fields["number"])
    except ChannelClosed:
        return 0
    except Exception as error:
        traceback.print_exc()
        known = isinstance(error, HeadwayError)
        with suppress(ChannelClosed):
            line.send(
                "failed",
                message=error.message if isinstance(error, HeadwayError) else f"{type(error).__name__}: {error}",
                hint=error.hint if isinstance(error, HeadwayError) else None,
                known=known,
            )
        return 1


def _end_with(parent: int) -> None:
    """Die with the worker; Ctrl-C is for the run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
