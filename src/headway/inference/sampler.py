"""Sampling of one token per row of logits, on the device, for rows with parameters of their own.

On a GPU a kernel samples rows whose parameters need nothing of the host (`needs_host`), here and in CUDA graphs; the
others, and all on CPUs, are sampled by PyTorch.

Every row draws one number, a hash of its seed and position, and takes the token where the cumulative probability
passes it. So a token depends on its own logits, seed and position alone, whatever else is in the batch.

Shapes: R rows, V vocabulary, X the most log-probabilities asked for.
"""

from collections.abc import Sequence as Rows
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headway.inference.params import SamplingParams
from headway.inference.sequence import Sequence
from headway.kernels import dispatch
from headway.kernels.pointer_table import uploaded
from headway.kernels.sampling import draw, label_logprobs

UNIT = 2.0**-24
"""Random numbers have 24 bits: all that float32 holds below 1."""


class Sampled(NamedTuple):
    """What was sampled, row by row, on the device."""

    tokens_R: Tensor
    logprobs_R: Tensor | None = None
    """Of the sampled tokens, in the model's own distribution, at a temperature if asked for."""
    top_ids_RX: Tensor | None = None
    top_logprobs_RX: Tensor | None = None
    kept_R: Tensor | None = None
    """Probability that truncation kept, of the distribution at the row's temperature."""


class Sampler:
    """Samples rows of logits."""

    def __init__(
        self, vocabulary: int, device: torch.device, end_ids: Rows[int] = (), *, counts_padding: bool = False
    ) -> None:
        """Tokens from `vocabulary` on are padding, and never sampled; log-probabilities count them all the same if
        `counts_padding`, as a trainer does."""
        self.vocabulary, self.device, self.end_ids = vocabulary, device, tuple(end_ids)
        self.counts_padding = counts_padding
        self.fused = self.device.type in dispatch.devices
        """Whether kernels sample."""

    def sample(self, logits_RV: Tensor, rows: Rows[Sequence]) -> Sampled:
        """Sample the next token of each sequence from its row."""
        if self.fused:
            return self._sample_fused(logits_RV, rows)
        return self._sample_plain(logits_RV, rows)

    def _sample_fused(self, logits_RV: Tensor, rows: Rows[Sequence]) -> Sampled:
        """Sample by the kernel, and by PyTorch those rows that it does not take."""
        device, params = logits_RV.device, [sequence.params for sequence in rows]
        width = logits_RV.shape[1] if self.counts_padding else self.vocabulary
        seeds_R = uploaded(mixed_seeds([sequence.seed for sequence in rows]).view(np.int64), device)
        positions_R = uploaded(np.array([sequence.generated for sequence in rows], dtype=np.int32), device)
        numbers = np.array([(p.temperature, p.logprob_temperature) for p in params], dtype=np.float32)
        temperatures_R2 = uploaded(numbers, device)
        tokens_R = torch.empty(len(rows), dtype=torch.int64, device=device)
        logprobs_R = torch.empty(len(rows), dtype=torch.float32, device=device)
        draw(
            logits_RV, self.vocabulary, width, temperatures_R2, seeds_R, positions_R, tokens_R, logprobs_R
        )  # the same bits as in a graph
        hosted = [needs_host(sequence) for sequence in rows]
        most = max((p.logprobs for p in params if p.logprobs is not None), default=None)
        if not any(hosted) and not most:
            ones_R = torch.ones_like(logprobs_R)
            none_RX = logprobs_R.new_empty(len(rows), 0)
            return Sampled(tokens_R, logprobs_R, none_RX.long(), none_RX, None if most is None else ones_R)
        plain = self._sample_plain(logits_RV, rows)
        if any(hosted):
            tokens_R = torch.where(uploaded(np.array(hosted), device), plain.tokens_R, tokens_R)
        if most is None:
            return Sampled(tokens_R)
        logprobs_R = label_logprobs(logits_RV[:, :width], tokens_R, temperatures_R2[:, 1])
        return Sampled(tokens_R, logprobs_R, *plain[2:])

    def _sample_plain(self, logits_RV: Tensor, rows: Rows[Sequence]) -> Sampled:
        params = [sequence.params for sequence in rows]
        most = max((p.logprobs for p in params if p.logprobs is not None), default=None)
        logprobs_RV = None
        if most is not None:
            logprobs_RV = self.logprobs(logits_RV, [p.logprob_temperature for p in params])
        all_logits_RV = logits_RV
        logits_RV = self._adjusted(logits_RV[:, : self.vocabulary].float(), rows)
        tokens_R, kept_R = self._draw(logits_RV, rows, keeps=most is not None)
        if logprobs_RV is None or most is None:
            return Sampled(tokens_R)
        top = logprobs_RV.topk(min(most, self.vocabulary), dim=-1)
        if not self._as_trained(all_logits_RV):
            chosen_R = logprobs_RV.gather(1, tokens_R.unsqueeze(1)).squeeze(1)
            return Sampled(tokens_R, chosen_R, top.indices, top.values, kept_R)
        ids_RX = torch.cat((tokens_R.unsqueeze(1), top.indices), dim=1)
        scores_RX = self._label_logprobs(all_logits_RV, ids_RX, [p.logprob_temperature for p in params])
        return Sampled(tokens_R, scores_RX[:, 0].contiguous(), top.indices, scores_RX[:, 1:], kept_R)

    def _as_trained(self, logits_RV: Tensor) -> bool:
        """Whether log-probabilities are summed by the kernel of a trainer in exact mode."""
        return self.counts_padding and dispatch.exact_triton(logits_RV.device)

    def _label_logprobs(self, logits_RV: Tensor, ids_RX: Tensor, temperatures: Rows[float]) -> Tensor:
        """Return the log-probabilities of tokens, each row at its temperature, with a trainer's bits."""
        logits_RV, scores_RX = logits_RV.float(), torch.empty(ids_RX.shape, device=ids_RX.device)
        for temperature in sorted(set(temperatures)):
            rows = [row for row, other in enumerate(temperatures) if other == temperature]
            here: Any = slice(None) if len(rows) == len(ids_RX) else uploaded(np.array(rows), ids_RX.device)
            own_RV, ids = logits_RV[here], ids_RX[here]
            columns = [label_logprobs(own_RV, column.contiguous(), temperature) for column in ids.unbind(1)]
            scores_RX[here] = torch.stack(columns, dim=1)
        return scores_RX

    def logprobs(self, logits_RV: Tensor, temperatures: Rows[float]) -> Tensor:
        """Return the log-probabilities of tokens that may be sampled, each row at its temperature."""
        scores_RV = (logits_RV if self.counts_padding else logits_RV[:, : self.vocabulary]).float()
        if any(temperature != 1 for temperature in temperatures):
            scores_RV = scores_RV / _column(temperatures, scores_RV.device)
        return scores_RV.log_softmax(dim=-1)[:, : self.vocabulary]

    def prompt_logprobs(
        self, logits_RV: Tensor, tokens_R: Tensor, params: SamplingParams
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the log-probabilities of given tokens, and the ids and log-probabilities of the likeliest ones."""
        logprobs_RV = self.logprobs(logits_RV, [params.logprob_temperature] * len(logits_RV))
        best = logprobs_RV.topk(min(params.prompt_logprobs or 0, self.vocabulary), dim=-1)
        if self._as_trained(logits_RV):
            ids_RX = torch.cat((tokens_R.unsqueeze(1), best.indices), dim=1)
            scores_RX = self._label_logprobs(logits_RV, ids_RX, [params.logprob_temperature] * len(logits_RV))
            return scores_RX[:, 0], best.indices, scores_RX[:, 1:]
        return logprobs_RV.gather(1, tokens_R.unsqueeze(1)).squeeze(1), best.indices, best.values

    def _adjusted(self, logits_RV: Tensor, rows: Rows[Sequence]) -> Tensor:
        """Apply biases, minimum lengths and penalties; most requests have none."""
        changed = [
            (row, sequence)
            for row, sequence in enumerate(rows)
            if sequence.params.logit_bias
            or sequence.params.penalized
            or sequence.generated < sequence.params.min_tokens
        ]
        if changed:
            logits_RV = logits_RV.clone()
        for row, sequence in changed:
            params, logits_V = sequence.params, logits_RV[row]
            for token, bias in params.logit_bias.items():
                logits_V[token] += bias
            if sequence.generated < params.min_tokens:
                ends = [*self.end_ids, *params.stop_token_ids]
                logits_V[[token for token in ends if token < self.vocabulary]] = float("-inf")
            if params.penalized:
                counts_V = self._counts(sequence.token_ids[len(sequence.prompt_ids) :])
                seen_V = (counts_V > 0) | (self._counts(sequence.prompt_ids) > 0)
                penalty = params.repetition_penalty
                penalized_V = torch.where(logits_V > 0, logits_V / penalty, logits_V * penalty)
                logits_V.copy_(torch.where(seen_V, penalized_V, logits_V))
                logits_V -= params.frequency_penalty * counts_V
                logits_V -= params.presence_penalty * (counts_V > 0)
        return logits_RV

    def _counts(self, ids: Rows[int]) -> Tensor:
        """Return how often each token occurs."""
        return torch.bincount(torch.tensor(ids, dtype=torch.int64, device=self.device), minlength=self.vocabulary)

    def _draw(self, logits_RV: Tensor, rows: Rows[Sequence], *, keeps: bool) -> tuple[Tensor, Tensor | None]:
        """Return a token of each row, and the probability mass that truncation kept."""
        params = [sequence.params for sequence in rows]
        if all(p.temperature == 0 for p in params):
            return logits_RV.argmax(dim=-1), logits_RV.new_ones(len(rows)) if keeps else None
        device = logits_RV.device
        temperatures_R1 = _column([p.temperature or 1.0 for p in params], device)
        # The best logit is subtracted first, so that a tiny temperature cannot overflow.
        shifted_RV = logits_RV - logits_RV.amax(dim=-1, keepdim=True)
        probs_RV = (shifted_RV / temperatures_R1).softmax(dim=-1)
        if self._as_trained(logits_RV):  # sums over a row depend on the number of rows in their last bits
            probs_RV = probs_RV.double()
        numbers_R1 = uniform([s.seed for s in rows], [s.generated for s in rows], device).unsqueeze(1)
        kept_R = probs_RV.new_ones(len(rows))
        if any(p.top_k or p.top_p < 1 or p.min_p > 0 for p in params):
            sorted_RV, ids_RV = probs_RV.sort(dim=-1, descending=True, stable=True)
            sorted_RV = truncated(sorted_RV, *_truncation(rows, self.vocabulary, device))
            # Back in the order of the vocabulary, in which rows draw that others' truncation must not touch.
            probs_RV = torch.zeros_like(probs_RV).scatter_(1, ids_RV, sorted_RV)
            kept_R = sorted_RV.sum(dim=-1)
        drawn_R1 = _inverse(probs_RV, numbers_R1)
        greedy = [p.temperature == 0 for p in params]
        if any(greedy):
            greedy_R1 = uploaded(np.array(greedy), device).unsqueeze(1)
            drawn_R1 = torch.where(greedy_R1, logits_RV.argmax(dim=-1, keepdim=True), drawn_R1)
            kept_R = torch.where(greedy_R1[:, 0], 1.0, kept_R)
        return drawn_R1.squeeze(1), kept_R if keeps else None


def truncated(sorted_RV: Tensor, top_k_R1: Tensor, top_p_R1: Tensor, min_p_R1: Tensor) -> Tensor:
    """Zero the probabilities, sorted downwards, that top-k, then top-p, then min-p drop; the first always stays."""
    ranks_V = torch.arange(sorted_RV.shape[1], device=sorted_RV.device)
    kept_RV = sorted_RV.where(ranks_V < top_k_R1, 0.0)
    before_RV = kept_RV.cumsum(dim=-1) - kept_RV
    kept_RV = kept_RV.where((before_RV < top_p_R1 * kept_RV.sum(dim=-1, keepdim=True)) | (ranks_V == 0), 0.0)
    return kept_RV.where(sorted_RV >= min_p_R1 * sorted_RV[:, :1], 0.0)


def _truncation(rows: Rows[Sequence], vocabulary: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    params = [sequence.params for sequence in rows]
    top_k = _column([p.top_k or vocabulary for p in params], device)
    top_p = _column([p.top_p if p.top_p < 1 else 2.0 for p in params], device)  # 1 drops nothing
    return top_k, top_p, _column([p.min_p for p in params], device)


def _column(values: Rows[float], device: torch.device) -> Tensor:
    return uploaded(np.array(values, dtype=np.float32), device).unsqueeze(1)


def _inverse(weights_RV: Tensor, numbers_R1: Tensor) -> Tensor:
    """Return where the cumulative weight passes each number's share of the total; never a weight of 0."""
    ends_RV = weights_RV.cumsum(dim=-1)
    place_R1 = torch.searchsorted(ends_RV, numbers_R1 * ends_RV[:, -1:], right=True)
    # Rounding may lead past the last positive weight.
    zeros_R1 = (weights_RV > 0).flip(1).byte().argmax(dim=1, keepdim=True)
    return torch.minimum(place_R1, weights_RV.shape[1] - 1 - zeros_R1)


def needs_host(sequence: Sequence) -> bool:
    """Whether sampling a sequence's next token takes more than its temperature and a random number."""
    params = sequence.params
    return bool(
        params.top_k
        or params.top_p < 1
        or params.min_p > 0
        or params.penalized
        or params.logit_bias
        or params.logprobs
        or sequence.generated < params.min_tokens
    )


def mixed_seeds(seeds: Rows[int]) -> np.ndarray:
    """Return seeds as the kernel takes them, uint64."""
    return _mixed(np.array([seed & MASK for seed in seeds], dtype=np.uint64))


def uniform(seeds: Rows[int], positions: Rows[int], device: torch.device) -> Tensor:
    """Return a number in [0, 1) per seed and position: splitmix64 of both."""
    keys = mixed_seeds(seeds) + np.array(positions, dtype=np.uint64)
    return uploaded(((_mixed(keys) >> np.uint64(40)) * UNIT).astype(np.float32), device)


MASK = 2**64 - 1


def _mixed(numbers: np.ndarray) -> np.ndarray:
    numbers = numbers + np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
