"""The engine with text: prompts are encoded, outputs decoded as they come, and stop texts end them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import psutil
import torch

from headway.data.tokenizer import TextTokenizer
from headway.errors import ModelError, RequestError
from headway.inference.blocks import BlockPool
from headway.inference.decode_graphs import DecodeGraphs
from headway.inference.engine import EngineModel, InferenceEngine
from headway.inference.kv_cache import PagedKvCache, Widths, bytes_per_token
from headway.inference.load import LoadedModel
from headway.inference.outputs import Output
from headway.inference.params import SamplingParams
from headway.inference.runner import PagedRunner, Runner, WholeRunner
from headway.inference.scheduler import Limits
from headway.inference.sequence import FinishReason
from headway.inference.text import WINDOW, TextStream, text_after
from headway.kernels.paged_triton import takes_heads
from headway.models import Decoder
from headway.models.exact import make_exact
from headway.models.experts import Experts

CPU_SHARE, GPU_SHARE = 0.25, 0.9
"""Share of the free memory that the KV cache takes by default; on a GPU, of all that is free after loading."""


@dataclass(frozen=True)
class EngineOptions:
    """How much a model may take and do at once."""

    max_length: int | None = None
    """Tokens of a sequence at most; by default as many as the model takes."""
    memory_share: float | None = None
    """Share of the free memory for the KV cache."""
    cache_tokens: int | None = None
    """Size of the KV cache in tokens, instead of a share of memory."""
    block_size: int | None = None
    """Tokens of a block; by default 64 on a GPU, whose kernels read so many at a time, and 16 elsewhere."""
    max_sequences: int = 256
    """Sequences that run at the same time."""
    max_batch_tokens: int = 2048
    """Tokens of a pass."""
    shares_prefixes: bool = True
    """Whether requests share the cache of equal beginnings."""
    graphs: bool = True
    """Whether decoding on a GPU uses CUDA graphs, where the model can be captured."""
    overlaps: bool | None = None
    """Whether a pass starts before the last one is recorded; by default on GPUs."""
    counts_padding: bool = False
    """Whether log-probabilities count the padding of the vocabulary, which is never sampled, as a trainer does."""
    exact: bool = False
    """Whether log-probabilities of tokens have the bits of the trainer's forward pass: `models.exact`. It changes the
    model in place, so that a trainer that shares it computes the same."""

    def tokens_per_block(self, device: torch.device) -> int:
        """Return the size of a block on a device."""
        return self.block_size or (64 if device.type == "cuda" else 16)


class TextOutput(NamedTuple):
    """A token's output, and the text that it completes."""

    output: Output
    text: str


def make_engine(loaded: LoadedModel, options: EngineOptions) -> InferenceEngine:
    """Return an engine for a model, with a KV cache of the memory that it may take."""
    max_length = options.max_length or loaded.max_length
    if max_length > loaded.max_length:
        raise ModelError(
            f"{loaded.name} takes sequences of {loaded.max_length:,} tokens, not of {max_length:,}",
            hint=f"--max-model-len {loaded.max_length} or less",
        )
    if options.exact:
        make_exact(loaded.module, loaded.device)
    block_size = options.tokens_per_block(loaded.device)
    pages_wanted = options.max_sequences * -(-max_length // block_size)
    if loaded.takes_cache:
        layers, widths = _cache_shape(loaded)
        dtype = next(loaded.module.parameters()).dtype
        pages = min(pages_wanted, _pages(options, bytes_per_token(layers, widths, dtype), loaded.device))
        if pages < 1:
            raise ModelError("no memory is left for the KV cache", hint="raise --memory-share, or use a smaller model")
        cache = PagedKvCache(layers, widths, pages, block_size, dtype, loaded.device, exact=options.exact)
        graphs = None
        if options.graphs and capturable(loaded, widths):
            graphs = DecodeGraphs(
                cache, options.max_sequences, max_length, loaded.device, loaded.vocabulary,
                counts_padding=options.counts_padding or options.exact,
            )  # fmt: skip
        runner: Runner = PagedRunner(loaded.module, cache, loaded.device, graphs, loaded.adapters, max_length)
    else:
        pages = pages_wanted
        runner = WholeRunner(loaded.module, loaded.device)
    model = EngineModel(loaded.vocabulary, max_length, loaded.end_ids, loaded.switch_length)
    pool = BlockPool(pages, block_size, shares_prefixes=options.shares_prefixes and loaded.takes_cache)
    limits = Limits(max(options.max_batch_tokens, options.max_sequences + 1), options.max_sequences)
    padding = options.counts_padding or options.exact
    return InferenceEngine(
        runner, model, pool, limits, loaded.device, overlaps=options.overlaps, counts_padding=padding
    )  # fmt: skip


def capturable(loaded: LoadedModel, widths: Widths) -> bool:
    """Whether decoding can be a CUDA graph: on a GPU, with kernels that need nothing of the host."""
    (_, key_dim), (_, value_dim) = widths
    if loaded.device.type != "cuda" or not isinstance(loaded.module, Decoder) or loaded.switch_length is not None:
        return False
    experts = [module for module in loaded.module.modules() if isinstance(module, Experts)]
    return takes_heads(loaded.device, key_dim, value_dim) and all(module.needs_no_host() for module in experts)


def _cache_shape(loaded: LoadedModel) -> tuple[int, Widths]:
    """Return the number of layers, and what each caches of a token."""
    module: Any = loaded.module
    if isinstance(module, Decoder):
        return module.model.layers, module.cache_widths()
    layers, heads, size = module.cache_shape()
    return layers, ((heads, size), (heads, size))


def _pages(options: EngineOptions, token_bytes: int, device: torch.device) -> int:
    block_size = options.tokens_per_block(device)
    if options.cache_tokens is not None:
        return options.cache_tokens // block_size
    if device.type == "cuda":
        free, share = torch.cuda.mem_get_info(device)[0], options.memory_share or GPU_SHARE
    else:
        free, share = psutil.virtual_memory().available, options.memory_share or CPU_SHARE
    return int(free * share) // (token_bytes * block_size)


class TextEngine:
    """An engine whose outputs have text. Like the engine, it belongs to one thread."""

    def __init__(self, loaded: LoadedModel, options: EngineOptions | None = None) -> None:
        self.loaded = loaded
        self.engine = make_engine(loaded, options or EngineOptions())
        self._streams: dict[tuple[str, int], TextStream] = {}
        self._texts: dict[tuple[str, int], Callable[[Sequence[int]], str]] = {}
        """From all tokens to their text, of requests whose output comes whole."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt; an empty one starts a document."""
        ids = self.encode_part(text)
        if self.loaded.begin_id is not None and ids[:1] != [self.loaded.begin_id]:
            ids = [self.loaded.begin_id, *ids]
        if not ids and self.loaded.end_ids:
            ids = [self.loaded.end_ids[0]]
        return [int(token) for token in ids]

    def encode_part(self, text: str) -> list[int]:
        """Return the tokens of a text that follows other tokens."""
        tokenizer = self.loaded.tokenizer
        if tokenizer is None:
            raise RequestError(f"{self.loaded.name} has no tokenizer", hint="send token ids instead of text")
        return encoded(tokenizer, text)

    def fitting(self, prompt_ids: list[int], max_tokens: int) -> int:
        """Return a default of max_tokens, or as many as the context has room for after a prompt."""
        return max(1, min(max_tokens, self.engine.context - len(prompt_ids)))

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of tokens; without a tokenizer, nothing."""
        tokenizer = self.loaded.tokenizer
        return "" if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def add(
        self,
        request_id: str,
        prompt_ids: list[int],
        params: SamplingParams,
        adapter: str | None = None,
        *,
        whole: bool = False,
    ) -> None:
        """Queue a request, for the model with one of its adapters. If `whole`, it has one output, at its end, with all
        tokens and the text, and no stop texts: decoding twice per token, as a stream does, and an output for each take
        the host longer than a GPU takes to sample hundreds of sequences."""
        assert not (whole and params.stop), "stop texts are looked for in a stream"
        if params.stop and self.loaded.tokenizer is None:
            raise RequestError(f"{self.loaded.name} has no tokenizer", hint="use stop_token_ids instead of stop")
        self.engine.add(request_id, prompt_ids, params, self._number(adapter), whole=whole)
        decode = partial(self.decode, skip_special_tokens=params.skip_special_tokens)
        for index in range(params.n):
            if whole:
                self._texts[request_id, index] = partial(text_after, prompt_ids[-WINDOW:], decode=decode)
            else:
                stream = TextStream(decode, prompt_ids, params.stop, params.include_stop)
                self._streams[request_id, index] = stream

    def _number(self, adapter: str | None) -> int:
        adapters = self.loaded.adapters
        if adapter is not None and (adapters is None or adapter not in adapters.names):
            raise RequestError(f"{self.loaded.name} has no adapter {adapter!r}", hint="--lora NAME=PATH adds one")
        return 0 if adapters is None else adapters.number(adapter)

    def abort(self, request_id: str) -> None:
        """End a request; nothing more comes of it."""
        self.engine.abort(request_id)
        for kept in (self._streams, self._texts):
            for key in [key for key in kept if key[0] == request_id]:
                del kept[key]

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return self.engine.busy

    def step(self) -> list[TextOutput]:
        """Run one pass; return what came out of it."""
        outputs = []
        for output in self.engine.step():
            key = (output.request_id, output.index)
            if output.whole is not None:
                outputs.append(TextOutput(output, self._whole_text(key, output.whole.token_ids, output.finish)))
                continue
            stream = self._streams.get(key)
            if stream is None:  # aborted
                continue
            ends = output.finish == "stop"  # the token that ended it is no part of the text
            silent = output.token_id is None or ends or self.loaded.tokenizer is None
            text = "" if silent else stream.add(output.token_id)  # type: ignore[arg-type]
            if stream.stopped:
                self.engine.end(output.request_id, output.index)
                output = output._replace(finish="stop")
            elif output.finish is not None:
                text += stream.end()
            if output.finish is not None:
                del self._streams[key]
            outputs.append(TextOutput(output, text))
        return outputs

    def _whole_text(self, key: tuple[str, int], ids: Sequence[int], finish: FinishReason | None) -> str:
        """Return the text of all tokens of an output; one that ended it is no part of it."""
        text = self._texts.pop(key)
        return "" if self.loaded.tokenizer is None else text(ids[:-1] if finish == "stop" else ids)


def encoded(tokenizer: TextTokenizer, text: str) -> list[int]:
    """Return the tokens of a text; raise RequestError for half a surrogate pair, which JSON can hold and is no text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError("the text holds half a surrogate pair, which is no character") from None
    return [int(token) for token in tokenizer.encode(text).tolist()]
