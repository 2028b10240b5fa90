"""The inference engine: requests in, tokens out, one pass of the model per step.

schedule   which tokens of which sequences the pass computes (`scheduler.py`, pure)
run        the model over them, with the paged KV cache (`runner.py`)
sample     a token for every sequence whose end is reached (`sampler.py`)
record     tokens, ends and shareable blocks

Where all sequences decode and none needs the host for sampling, several passes follow each other on a GPU before the
tokens of all are recorded.

On a GPU passes overlap: the next one is scheduled and started while the device still computes, with sampled tokens
that the host does not know yet, and recorded one step later. A sequence whose last token turns out to end it has then
been run once more; what that gave is dropped. Blocks can be reused at once, since the device runs passes in order.
"""

import itertools
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from headway.errors import RequestError
from headway.inference.blocks import BlockPool
from headway.inference.outputs import Output, WholeOutput
from headway.inference.params import SamplingParams
from headway.inference.prompt_logprobs import PromptLogprobs
from headway.inference.runner import Runner, SampledTokens
from headway.inference.sampled_pass import SampledPass, noted_logprobs
from headway.inference.sampler import Sampled, Sampler
from headway.inference.scheduler import Limits, ScheduledBatch, schedule, shared_blocks
from headway.inference.sequence import FinishReason, Sequence
from headway.kernels.pointer_table import uploaded

RequestsAtSwap = Literal["finish", "continue"]
"""What requests that run do when weights are swapped: finish on theirs first, or continue on the new ones."""


@dataclass
class EngineModel:
    """What the engine must know of a model besides how to run it."""

    vocabulary: int
    """Tokens that may be sampled."""
    max_length: int
    """Tokens that a sequence may have."""
    end_ids: tuple[int, ...] = ()
    """Tokens that end a text."""
    switch_length: int | None = None
    """LongRoPE: length beyond which a sequence has other rotary frequencies."""


@dataclass
class EngineCounts:
    """Counted since the start."""

    steps: int = 0
    prompt_tokens: int = 0
    shared_tokens: int = 0
    """Of the prompts' tokens, those whose keys and values were in the cache already."""
    output_tokens: int = 0
    preemptions: int = 0


@dataclass(frozen=True)
class _Swap:
    """A change of weights that waits for running requests."""

    version: int
    change: Callable[[], None]


class InferenceEngine:
    """Runs requests in continuous batches. Not thread-safe: one thread adds, steps and aborts."""

    def __init__(
        self,
        runner: Runner,
        model: EngineModel,
        pool: BlockPool,
        limits: Limits | None = None,
        device: torch.device | str = "cpu",
        *,
        overlaps: bool | None = None,
        counts_padding: bool = False,
    ) -> None:
        """`overlaps`: whether a pass starts before the last one is recorded; by default on GPUs. `counts_padding`:
        whether log-probabilities count tokens of the vocabulary that are never sampled, as a trainer does."""
        self.model, self.pool, self.limits = model, pool, limits or Limits()
        self.runner = runner
        self.sampler = Sampler(model.vocabulary, torch.device(device), model.end_ids, counts_padding=counts_padding)
        self.device = torch.device(device)
        # LongRoPE has sequences start over at some length, for which all their tokens must be known.
        self.overlaps = (self.device.type == "cuda" if overlaps is None else overlaps) and model.switch_length is None
        self.waiting: dict[int, Sequence] = {}
        self.running: dict[int, Sequence] = {}
        """Both by arrival."""
        self.counts = EngineCounts()
        self.version = 0
        """Of the weights."""
        self._swap: _Swap | None = None
        self._arrivals = itertools.count()
        self._prompts = PromptLogprobs(runner.logits, self.sampler)
        self._outputs: list[Output] = []
        self._passed: SampledPass | None = None
        """The last pass, while passes overlap."""

    # -- requests

    def add(
        self,
        request_id: str,
        prompt_ids: list[int],
        params: SamplingParams | None = None,
        adapter: int = 0,
        *,
        whole: bool = False,
    ) -> None:
        """Queue a request; raises RequestError if it can never run. `adapter` is a number of the model's adapters.
        If `whole`, its only output is at its end, with all tokens."""
        params = params or SamplingParams()
        assert not whole or (not params.logprobs and params.prompt_logprobs is None), "of sampled tokens only"
        self.check(prompt_ids, params)
        longest = self.context
        if params.max_tokens is not None:
            longest = min(longest, len(prompt_ids) + params.max_tokens)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        for index in range(params.n):
            arrival = next(self._arrivals)
            self.waiting[arrival] = Sequence(
                request_id, index, arrival, list(prompt_ids), params, longest, seed + index, adapter=adapter,
                whole=whole,
            )  # fmt: skip
            self._switch(self.waiting[arrival])

    @property
    def context(self) -> int:
        """Tokens that a sequence may have: as many as the model takes, and its KV cache holds."""
        return min(self.model.max_length, self.pool.count * self.pool.size)

    def check(self, prompt_ids: list[int], params: SamplingParams) -> None:
        """Raise RequestError for a request that can never run."""
        if not prompt_ids:
            raise RequestError("the prompt is empty", hint="send at least one token")
        for name, ids in (
            ("token id", prompt_ids),
            ("logit_bias: token id", params.logit_bias),
            ("stop_token_ids: token id", params.stop_token_ids),
        ):
            wrong = next((token for token in ids if not 0 <= token < self.model.vocabulary), None)
            if wrong is not None:
                raise RequestError(f"{name} {wrong} is not in the vocabulary of {self.model.vocabulary:,}")
        length, context = len(prompt_ids), self.context
        prompt = f"the prompt has {length:,} token{'s' * (length != 1)}"
        of_cache = context < self.model.max_length
        limit = f"the KV cache has room for {context:,}" if of_cache else f"the model takes {context:,} in all"
        if length >= context:
            hint = "shorten it, or give the cache more memory" if of_cache else "shorten it"
            raise RequestError(f"{prompt}, but {limit}", hint=hint)
        if params.max_tokens is not None and length + params.max_tokens > context:
            raise RequestError(
                f"{prompt} and max_tokens is {params.max_tokens:,}, but {limit}",
                hint=f"ask for {context - length:,} tokens or fewer, or leave max_tokens out",
            )

    def abort(self, request_id: str) -> None:
        """End a request's sequences; their blocks are free at once."""
        for sequence in [*self.waiting.values(), *self.running.values()]:
            if sequence.request_id == request_id:
                self._finish(sequence, "abort")

    def end(self, request_id: str, index: int) -> None:
        """End one output of a request, whose text has come to a stop."""
        for sequence in [*self.waiting.values(), *self.running.values()]:
            if (sequence.request_id, sequence.index) == (request_id, index):
                self._finish(sequence, "stop", tells=False)

    def swap(self, version: int, change: Callable[[], None], requests: RequestsAtSwap = "finish") -> bool:
        """Change the weights by calling `change`, now or once running requests have finished; return whether now.

        Requests that have not begun to run get the new weights. Those that `continue` do so with what is in their
        cache. Nothing that earlier weights computed is shared with others. A second swap takes the place of one that
        waits.
        """
        self._swap = _Swap(version, change)
        if requests == "continue":
            self._outputs = self._settled()
            self._change_weights()
        else:
            self._change_weights_if_due()
        return self._swap is None

    def would_wait(self, requests: RequestsAtSwap) -> bool:
        """Whether a swap would wait for running requests."""
        return requests == "finish" and bool(self._begun())

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.waiting or self.running or self._outputs or self._passed)

    # -- a step

    def step(self) -> list[Output]:
        """Run one pass; return what came out of it, or, where passes overlap, out of the one before."""
        planned = self._planned()
        if any(sequence.unknown > 1 for sequence in planned.preempted):  # they start over, from known tokens
            self._outputs = self._settled()
            planned = self._planned()
        batch = self._begin(planned)
        counts = self._counts(batch)
        if counts:
            sampled = self.runner.decode(batch.chunks, self._last_tokens(), counts)
            return self._record(SampledPass(batch.chunks, sampled, self.version, counts))
        x_TD = self.runner.run(batch.chunks, self._last_tokens()) if batch.chunks else None
        sampled = self._sample(x_TD, batch)
        return self._record(SampledPass(batch.chunks, sampled, self.version))

    def _planned(self) -> ScheduledBatch:
        return schedule(self._admissible(), self._continuing(), self.pool, self.limits)

    def _counts(self, batch: ScheduledBatch) -> list[int]:
        """Return how many tokens each sequence gets before the host records them, and take the blocks that they need;
        none if this pass needs the host."""
        most = self.runner.most_steps(batch.chunks) if batch.chunks and not batch.admitted else 0
        if not most or any(not chunk.samples for chunk in batch.chunks):
            return []
        sequences = [chunk.sequence for chunk in batch.chunks]
        left = [self._left(sequence) for sequence in sequences]
        # A sequence that ends before the others has its place until they are recorded: too long if some wait for it.
        steps = min(most, min(left) if self.waiting else max(left))
        while steps > 1 and self._more_blocks(sequences, left, steps) > self.pool.free:
            steps -= 1
        counts = [min(steps, most_of_sequence) for most_of_sequence in left]
        for sequence, count in zip(sequences, counts, strict=True):
            sequence.computed += count - 1
            sequence.blocks += self.pool.allocate(self.pool.blocks_for(sequence.computed) - len(sequence.blocks))
        return counts

    def _left(self, sequence: Sequence) -> int:
        """Return how many tokens more a sequence can have before it ends, or starts over with other frequencies."""
        switch = self.model.switch_length
        most = sequence.max_length if switch is None or sequence.long else min(sequence.max_length, switch + 1)
        return most - sequence.length

    def _more_blocks(self, sequences: list[Sequence], left: list[int], steps: int) -> int:
        """Return the blocks that sequences need for so many passes, or those that they have left, besides their own."""
        return sum(
            self.pool.blocks_for(sequence.computed + min(steps, most) - 1) - len(sequence.blocks)
            for sequence, most in zip(sequences, left, strict=True)
        )

    def _admissible(self) -> list[Sequence]:
        """Return the waiting sequences that may begin; before a swap only those that have begun once."""
        self._change_weights_if_due()
        return [s for s in self.waiting.values() if self._swap is None or s.version is not None]

    def _continuing(self) -> list[Sequence]:
        """Return the running sequences that need another token, with all tokens known where sampling reads them."""
        if any(sequence.unknown and sequence.params.penalized for sequence in self.running.values()):
            self._outputs = self._settled()
        return [sequence for sequence in self.running.values() if sequence.length < sequence.max_length]

    def _last_tokens(self) -> SampledTokens | None:
        return None if self._passed is None else self._passed.tokens

    def _begin(self, batch: ScheduledBatch) -> ScheduledBatch:
        """Give and take blocks as the batch says."""
        for sequence in batch.preempted:
            self.pool.release(sequence.blocks)
            sequence.forget()
            del self.running[sequence.arrival]
            self.waiting[sequence.arrival] = sequence
            self.counts.preemptions += 1
        if batch.preempted:
            self.waiting = dict(sorted(self.waiting.items()))
        for sequence in batch.admitted:
            shared = shared_blocks(sequence, self.pool)
            self.pool.share(shared)
            sequence.blocks, sequence.computed = shared, len(shared) * self.pool.size
            sequence.published = len(shared)
            sequence.version = self.version
            self.running[sequence.arrival] = self.waiting.pop(sequence.arrival)
            self.counts.prompt_tokens += len(sequence.token_ids)
            self.counts.shared_tokens += sequence.computed
        for chunk in batch.chunks:
            sequence = chunk.sequence
            assert chunk.first == sequence.computed, "what is shared was counted by the scheduler"
            sequence.computed += chunk.count
            sequence.blocks += self.pool.allocate(self.pool.blocks_for(sequence.computed) - len(sequence.blocks))
        self.counts.steps += 1
        return batch

    def _sample(self, x_TD: Tensor | None, batch: ScheduledBatch) -> Sampled | None:
        """Sample the sequences that the pass brought to their end, and note the log-probabilities of prompts."""
        if x_TD is None:
            return None
        ends = list(itertools.accumulate(chunk.count for chunk in batch.chunks))
        for chunk, end in zip(batch.chunks, ends, strict=True):
            if chunk.sequence.params.prompt_logprobs is not None and chunk.first < len(chunk.sequence.prompt_ids):
                self._prompts.note(chunk, x_TD[end - chunk.count : end])
        sampling = [(chunk, end - 1) for chunk, end in zip(batch.chunks, ends, strict=True) if chunk.samples]
        if not sampling:
            return None
        if len(sampling) < len(x_TD):
            x_TD = x_TD[uploaded(np.array([row for _, row in sampling]), x_TD.device)]
        return self.sampler.sample(self.runner.logits(x_TD), [chunk.sequence for chunk, _ in sampling])

    def _record(self, passed: SampledPass) -> list[Output]:
        """Note a pass, or while it runs the one before: tokens, ends, and full blocks that others may share."""
        outputs = self._settled()
        self._passed = passed if passed.sequences else None
        return outputs if self.overlaps else self._settled(outputs)

    def _settled(self, outputs: list[Output] | None = None) -> list[Output]:
        """Wait for the last pass and return its outputs, after those that there are already."""
        outputs = [*(outputs or []), *self._outputs]
        self._outputs = []
        passed, self._passed = self._passed, None
        if passed is None:
            return outputs
        values = passed.values()
        for row, (sequence, place, count) in enumerate(passed.places):
            sequence.token_ids[place : place + count] = values[0][row][:count]
            sequence.unknown -= count
        for sequence in passed.sequences:
            self._publish(sequence)
        for row, (sequence, place, count) in enumerate(passed.places):
            if sequence.whole:
                outputs += self._whole(sequence, place, values, row, count, passed.version)
                continue
            for step, token in enumerate(values[0][row][:count]):
                if sequence.finish is not None:  # aborted, or ended by a token before
                    break
                finish = self._end(sequence, token, place + step + 1)
                logprobs, kept = noted_logprobs(sequence.params.logprobs, values, row, step)
                prompt = self._prompts.take(sequence)
                outputs.append(
                    Output(
                        sequence.request_id, sequence.index, token, finish, logprobs, kept, prompt, passed.version
                    )
                )  # fmt: skip
                self.counts.output_tokens += 1
                if finish is not None:
                    self._finish(sequence, finish, tells=False)
                else:
                    self._switch(sequence)
        return outputs

    def _whole(
        self, sequence: Sequence, place: int, values: list[Any], row: int, count: int, version: int
    ) -> list[Output]:
        """Note the tokens of a request whose output comes whole; return that, if it ends with one of them."""
        if sequence.finish is not None:  # aborted, or ended by a token before
            return []
        finish = None
        for step, token in enumerate(values[0][row][:count]):
            finish = self._end(sequence, token, place + step + 1)
            if finish is not None:
                count = step + 1
                break
        if sequence.params.logprobs is not None:
            sequence.logprobs += values[1][row][:count]
        self.counts.output_tokens += count
        if finish is None:
            self._switch(sequence)
            return []
        self._finish(sequence, finish, tells=False)
        ids = sequence.token_ids[len(sequence.prompt_ids) : place + count]
        whole = WholeOutput(tuple(ids), tuple(sequence.logprobs))
        return [Output(sequence.request_id, sequence.index, None, finish, version=version, whole=whole)]

    # -- new weights

    def _begun(self) -> list[Sequence]:
        """Return the sequences that have begun to run; some wait again, after a preemption."""
        return [*self.running.values(), *(s for s in self.waiting.values() if s.version is not None)]

    def _change_weights_if_due(self) -> None:
        if self._swap is not None and not self._begun():
            self._change_weights()

    def _change_weights(self) -> None:
        """Change the weights between two passes; the device runs passes and changes in order."""
        assert self._swap is not None
        swap, self._swap = self._swap, None
        swap.change()
        self.version = swap.version
        self.pool.forget_prefixes()
        for sequence in self.running.values():
            sequence.stale = True

    # -- parts of a step

    def _end(self, sequence: Sequence, token: int, length: int) -> FinishReason | None:
        """Return why a sequence ends with a token that makes it so long, if it does."""
        params = sequence.params
        ends = token in params.stop_token_ids or (token in self.model.end_ids and not params.ignore_eos)
        if ends and length - len(sequence.prompt_ids) >= params.min_tokens:
            return "stop"
        return "length" if length >= sequence.max_length else None

    def _publish(self, sequence: Sequence) -> None:
        """Let others share the blocks that are full by now."""
        if not self.pool.shares_prefixes or sequence.stale:
            return
        hashes = sequence.block_hashes(self.pool.size)
        full = min(sequence.computed // self.pool.size, len(hashes), len(sequence.blocks))
        for place in range(sequence.published, full):
            self.pool.publish(sequence.blocks[place], hashes[place])
        sequence.published = max(sequence.published, full)

    def _switch(self, sequence: Sequence) -> None:
        """Have a sequence that passes LongRoPE's length start over with the other frequencies."""
        switch = self.model.switch_length
        if switch is None or sequence.long or sequence.length <= switch:
            return
        sequence.long, sequence.hashes = True, []
        if sequence.arrival in self.running:
            self.pool.release(sequence.blocks)
            sequence.forget()
            del self.running[sequence.arrival]
            self.waiting = dict(sorted({**self.waiting, sequence.arrival: sequence}.items()))

    def _finish(self, sequence: Sequence, reason: FinishReason, *, tells: bool = True) -> None:
        sequence.finish = reason
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        self.running.pop(sequence.arrival, None)
        self.waiting.pop(sequence.arrival, None)
        self._prompts.drop(sequence)
        if tells:
            self._outputs.append(Output(sequence.request_id, sequence.index, None, reason))
