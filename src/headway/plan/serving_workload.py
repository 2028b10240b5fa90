"""Plans a closed workload: requests that all arrive at once, until the last of them ends.

The engine's schedule (`inference/scheduler.py`) by numbers of tokens: sequences that decode get a token each, prompts
the rest of a pass; without prompts, several passes make a round, which ends where a sequence does if others wait for
its place. As all requests are known, passes between two ends are one sum: each takes as long as that of mean length.
"""

import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from headway.plan.serving_latency import MOST_STEPS, PassModel
from headway.plan.serving_passes import Span, pass_operations


@dataclass(frozen=True)
class Request:
    """A prompt, and how many tokens are generated for it."""

    prompt: int
    output: int

    @property
    def length(self) -> int:
        """Tokens of the finished sequence."""
        return self.prompt + self.output


@dataclass(frozen=True)
class EngineLimits:
    """What a pass may hold."""

    max_sequences: int
    max_batch_tokens: int
    cache_tokens: int
    """Tokens that the KV cache holds: a request starts when all of its own fit."""


@dataclass(frozen=True)
class WorkloadForecast:
    """How long a closed workload takes, and where the time goes."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    prefill_s: float
    """In passes that have tokens of prompts."""
    decode_s: float
    """In other passes."""
    host_s: float
    """While the device waits for the host."""
    prefill_passes: int
    decode_passes: int
    decoded: int
    """Tokens of decoding passes."""
    first_tokens_s: tuple[float, ...]
    """When each request got its first token, in order."""

    @property
    def seconds(self) -> float:
        """From the first pass to the last token."""
        return self.prefill_s + self.decode_s + self.host_s

    @property
    def tokens_s(self) -> float:
        """Generated tokens per second."""
        return self.output_tokens / self.seconds

    @property
    def mean_batch(self) -> float:
        """Sequences of a decoding pass on average."""
        return self.decoded / self.decode_passes if self.decode_passes else 0.0

    def first_token_s(self, share: float) -> float:
        """Time to first token of the request at a share of all, the slowest being at 1."""
        return self.first_tokens_s[min(len(self.first_tokens_s) - 1, int(share * len(self.first_tokens_s)))]


def uniform_requests(count: int, prompts: tuple[int, int], outputs: tuple[int, int]) -> tuple[Request, ...]:
    """Return requests with lengths spread evenly from the first to the last of each range, in random order."""
    order = random.Random(0)

    def lengths(low: int, high: int) -> list[int]:
        between = max(1, count - 1)
        spread = [low + round((high - low) * i / between) for i in range(count)]
        order.shuffle(spread)
        return spread

    return tuple(map(Request, lengths(*prompts), lengths(*outputs)))


def prompt_flops(model: PassModel, requests: Sequence[Request]) -> float:
    """Return FLOPs of all prompts' layers, without the head."""

    def flops(prompt: int) -> float:
        whole = Span(1, 0, prompt, ends=False)
        return sum(layers * part.flops for _, layers, part in pass_operations(model.architecture, model.dtype, whole))

    return sum(count * flops(prompt) for prompt, count in Counter(request.prompt for request in requests).items())


def forecast(model: PassModel, requests: Sequence[Request], limits: EngineLimits) -> WorkloadForecast:
    """Plan the passes of a closed workload, and add up their times."""
    return _Schedule(model, limits).run(requests)


@dataclass
class _Prompt:
    request: Request
    computed: int = 0


class _Schedule:
    """The engine's state, in numbers of tokens."""

    def __init__(self, model: PassModel, limits: EngineLimits) -> None:
        self.model, self.limits = model, limits
        self.ends: list[tuple[int, int]] = []
        """A heap of the sequences that decode: the pass in which each ends, and its length then."""
        self.lengths = 0
        """Tokens of those in the cache."""
        self.prompts: deque[_Prompt] = deque()
        self.reserved = self.passes = self.mixed = self.decoded = 0
        self.prefill_s = self.decode_s = self.host_s = 0.0
        self.first: list[float] = []

    def run(self, requests: Sequence[Request]) -> WorkloadForecast:
        waiting = deque(requests)
        while waiting or self.prompts or self.ends:
            chunks = self._chunks(waiting)
            if chunks:
                self._mixed_pass(chunks)
            else:
                self._decoding_round(bool(waiting))
        return WorkloadForecast(
            requests=len(requests),
            prompt_tokens=sum(request.prompt for request in requests),
            output_tokens=sum(request.output for request in requests),
            prefill_s=self.prefill_s,
            decode_s=self.decode_s,
            host_s=self.host_s,
            prefill_passes=self.mixed,
            decode_passes=self.passes - self.mixed,
            decoded=self.decoded,
            first_tokens_s=tuple(self.first),
        )

    def _chunks(self, waiting: deque[Request]) -> list[tuple[_Prompt, int]]:
        """Return the tokens of prompts in the next pass: those begun, then as many others as may begin."""
        room, chunks = self.limits.max_batch_tokens - len(self.ends), list[tuple[_Prompt, int]]()
        for prompt in self.prompts:
            chunks.append((prompt, min(room, prompt.request.prompt - prompt.computed)))
            room -= chunks[-1][1]
        while waiting and room > 0 and len(self.ends) + len(self.prompts) < self.limits.max_sequences:
            if self.reserved + waiting[0].length > self.limits.cache_tokens:
                break
            prompt = _Prompt(waiting.popleft())
            self.reserved += prompt.request.length
            self.prompts.append(prompt)
            chunks.append((prompt, min(room, prompt.request.prompt)))
            room -= chunks[-1][1]
        return [(prompt, count) for prompt, count in chunks if count]

    def _mixed_pass(self, chunks: list[tuple[_Prompt, int]]) -> None:
        """Run a pass with tokens of prompts; those that are complete begin to decode."""
        decoding = len(self.ends)
        spans = [Span(decoding, self.lengths / decoding, 1)] if decoding else []
        shapes = [
            (prompt.computed, count, prompt.computed + count == prompt.request.prompt) for prompt, count in chunks
        ]
        spans += [
            Span(len(list(same)), start, count, ends)
            for (start, count, ends), same in itertools.groupby(sorted(shapes))
        ]
        self.prefill_s += self.model.seconds(*spans)
        self.host_s += self.model.host_s(decoding + len(chunks))
        self.mixed += 1
        self._advance(1)
        for prompt, count in chunks:
            prompt.computed += count
        while self.prompts and self.prompts[0].computed == self.prompts[0].request.prompt:
            self._begin_decoding(self.prompts.popleft().request)

    def _begin_decoding(self, request: Request) -> None:
        self.first.append(self.prefill_s + self.decode_s + self.host_s)
        if request.output == 1:
            self.reserved -= request.length
            return
        heapq.heappush(self.ends, (self.passes + request.output - 1, request.length))
        self.lengths += request.prompt

    def _decoding_round(self, awaited: bool) -> None:
        """Run rounds of passes until the next sequence ends, or one round in which some do, if nobody waits for their
        places."""
        until_end = self.ends[0][0] - self.passes
        whole = until_end // MOST_STEPS
        if awaited or whole:
            count = until_end if awaited else whole * MOST_STEPS
            self.host_s += -(-count // MOST_STEPS) * self.model.host_s(len(self.ends))
            self._decoding_passes(count)
            return
        self.host_s += self.model.host_s(len(self.ends))
        last = self.passes + MOST_STEPS
        while self.ends and self.passes < last:
            self._decoding_passes(min(last, self.ends[0][0]) - self.passes)

    def _decoding_passes(self, count: int) -> None:
        """Run so many passes, in which no sequence ends but with the last."""
        batch = len(self.ends)
        mean = self.lengths / batch + (count - 1) / 2
        self.decode_s += count * self.model.seconds(Span(batch, mean, 1))
        self.decoded += count * batch
        self._advance(count)

    def _advance(self, passes: int) -> None:
        """Give every decoding sequence a token per pass; those that end free their cache."""
        self.passes += passes
        self.lengths += passes * len(self.ends)
        while self.ends and self.ends[0][0] == self.passes:
            _, length = heapq.heappop(self.ends)
            self.lengths -= length - 1  # the last token is never computed
            self.reserved -= length
