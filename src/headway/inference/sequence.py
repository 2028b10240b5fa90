"""A sequence in the engine: its tokens, where their keys and values are, and how it ended."""

import hashlib
from array import array
from dataclasses import dataclass, field
from typing import Literal

from headway.inference.params import SamplingParams

FinishReason = Literal["stop", "length", "abort"]
UNKNOWN = -1
"""In place of a token that was sampled but has not reached the host yet."""


@dataclass(eq=False, slots=True)
class Sequence:
    """One output of a request, from its prompt on."""

    request_id: str
    index: int
    """Which of the request's n outputs."""
    arrival: int
    """Place in the order of arrival, unique in the engine."""
    prompt_ids: list[int]
    params: SamplingParams
    max_length: int
    """Prompt and output together end at this many tokens."""
    seed: int
    token_ids: list[int] = field(default_factory=list)
    """Prompt and output; UNKNOWN where a sampled token is still on the device."""
    unknown: int = 0
    """How many tokens at the end are unknown."""
    computed: int = 0
    """Tokens whose keys and values are in the cache."""
    blocks: list[int] = field(default_factory=list)
    """Blocks of the cache that it holds, in order."""
    published: int = 0
    """Blocks, from the first, that others may share."""
    hashes: list[bytes] = field(default_factory=list)
    """Hash of each full block and all before it."""
    long: bool = False
    """Whether it is past LongRoPE's switch: keys and values of shorter sequences do not fit."""
    version: int | None = None
    """Of the weights that it began to run with."""
    stale: bool = False
    """Whether keys and values in its blocks are of earlier weights: none of them can be shared."""
    finish: FinishReason | None = None
    adapter: int = 0
    """Number of the adapter that the request uses; 0 for none."""
    whole: bool = False
    """Whether all of it is one output, at its end."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probabilities of its output, if that comes whole."""

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_ids)

    @property
    def length(self) -> int:
        """All tokens."""
        return len(self.token_ids)

    @property
    def generated(self) -> int:
        """Tokens of the output."""
        return self.length - len(self.prompt_ids)

    @property
    def shareable(self) -> bool:
        """Whether it may use blocks of others: not if every prompt token must be computed for its log-probability."""
        return self.params.prompt_logprobs is None

    def block_hashes(self, size: int) -> list[bytes]:
        """Return the hashes of its full blocks of known tokens, chained from the start."""
        while (len(self.hashes) + 1) * size <= self.length - self.unknown:
            first = len(self.hashes) * size
            before = self.hashes[-1] if self.hashes else b"%d/%d" % (self.long, self.adapter)
            ids = array("q", self.token_ids[first : first + size]).tobytes()
            self.hashes.append(hashlib.blake2b(before + ids, digest_size=16).digest())
        return self.hashes

    def forget(self) -> None:
        """Start over: nothing of it is in the cache."""
        self.computed, self.published, self.blocks, self.stale = 0, 0, [], False
