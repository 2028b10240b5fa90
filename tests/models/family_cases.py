"""How every family is held against `transformers`: its small random models, and what must be equal.

A family's test file makes `Case`s of it and calls the functions here; `docs/families_table.py` prints the differences.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.inference.blocks import BlockPool
from headway.inference.engine import EngineModel, InferenceEngine
from headway.inference.kv_cache import PagedKvCache
from headway.inference.params import SamplingParams
from headway.inference.runner import PagedRunner
from headway.inference.scheduler import Chunk, Limits
from headway.inference.sequence import Sequence
from headway.models import Decoder, empty_decoder, load_into, write_folder
from headway.plan import parameters
from headway.recipe.huggingface import read_model
from headway.recipe.rope import RotaryModel
from lazy_imports import transformers

SIZES = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
"""What most families call their sizes."""


@dataclass(frozen=True)
class Case:
    """A small model of `transformers`: the name of its config class, and its settings."""

    name: str
    config: str
    settings: dict[str, Any]
    family: str
    """What Headway takes it for."""
    features: str = ""
    """What it shows, for the table in the docs."""
    position_ids: bool = True
    """Whether it counts positions (for packed documents)."""
    ignored: tuple[str, ...] = ()
    """Keys of a config that may come back otherwise."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Arguments of its forward pass."""


def make(case: Case, folder: Path, seed: int = 0, **save: Any) -> Any:
    """A random model of `transformers`, saved; its weights are large enough for every part to matter."""
    config = getattr(transformers, case.config)(**case.settings)
    torch.manual_seed(seed)
    hf_model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    saved = hf_model.state_dict()
    with torch.no_grad():
        for name, tensor in (*hf_model.named_parameters(), *hf_model.named_buffers()):
            if name not in saved or not tensor.is_floating_point():
                continue  # what follows from the config is as it is
            if tensor.ndim > 1:
                tensor.normal_(0, 0.15)
            else:
                tensor.add_(torch.randn_like(tensor) * 0.1)
    hf_model.save_pretrained(folder, **save)
    return hf_model


def load(folder: Path) -> Decoder:
    """Headway's decoder of a folder."""
    decoder = empty_decoder(read_model(folder))
    load_into(decoder, folder)
    return decoder.eval()


def tokens(rows: int = 2, length: int = 40, seed: int = 1) -> Tensor:
    return torch.randint(5, 200, (rows, length), generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Difference:
    """The largest difference of any logit, and of any tensor's gradient by norm."""

    what: str
    logits: float
    gradients: float = 0.0


def differences(case: Case, folder: Path, hf_model: Any = None) -> Iterator[Difference]:
    """Every comparison of one family: plain, padded, packed, far from the first position.

    `hf_model`, here and below, is what `make` has saved in the folder, where it has.
    """
    hf_model = hf_model or make(case, folder)
    decoder = load(folder)
    assert decoder.model.family == case.family
    yield _plain(case, decoder, hf_model)
    yield _padded(case, decoder, hf_model)
    yield _packed(case, decoder, hf_model)
    yield _long(case, decoder, hf_model)


def _plain(case: Case, decoder: Decoder, hf_model: Any) -> Difference:
    ids = tokens()
    labels = tokens(seed=2)
    expected = hf_model(ids, **case.extra).logits
    logits = decoder(ids)
    loss = torch.nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten(), reduction="sum")
    hf_model.zero_grad()
    loss.backward()
    decoder.zero_grad()
    summed = decoder(ids, labels)
    summed.backward()
    torch.testing.assert_close(summed, loss.detach(), rtol=1e-4, atol=1e-3)
    return Difference("plain", _apart(logits, expected), _gradients(decoder, hf_model))


def _apart(actual: Tensor, expected: Tensor) -> float:
    assert expected.abs().max() > 0.3, "else equality would say little"
    return float((actual - expected).detach().abs().max())


def _gradients(decoder: Decoder, hf_model: Any) -> float:
    """The norm of the difference by the norm of the expected gradient, for the worst tensor.

    Gradients of `hf_model` go through the same mapping as weights: by a folder's names, into a decoder.
    """
    import tempfile

    shadow = copy.deepcopy(hf_model)
    with torch.no_grad():
        for (_, tensor), (_, source) in zip(shadow.named_parameters(), hf_model.named_parameters(), strict=True):
            tensor.copy_(torch.zeros_like(tensor) if source.grad is None else source.grad)
    with tempfile.TemporaryDirectory() as folder:
        shadow.save_pretrained(folder)
        wanted = empty_decoder(decoder.model)
        load_into(wanted, Path(folder))
    worst = 0.0
    for (name, parameter), (_, want) in zip(decoder.named_parameters(), wanted.named_parameters(), strict=True):
        assert parameter.grad is not None, name
        scale = float(want.detach().norm())
        off = float((parameter.grad - want.detach()).norm())
        worst = max(worst, off / scale if scale > 1e-6 else off)
    return worst


def _padded(case: Case, decoder: Decoder, hf_model: Any) -> Difference:
    """A short row beside a long one: what is padding is a document of its own, and its logits are nobody's."""
    ids = tokens()
    real = torch.ones_like(ids)
    real[1, 25:] = 0
    with torch.no_grad():
        expected = hf_model(ids, attention_mask=real, **case.extra).logits
        logits = decoder(ids, documents=(1 - real).int())
    return Difference("padded", _apart(logits[real.bool()], expected[real.bool()]))


def _packed(case: Case, decoder: Decoder, hf_model: Any) -> Difference:
    """Three documents in a row: each as if it were alone."""
    ids = tokens(rows=1)
    ends = (0, 11, 12, 40)
    documents = torch.zeros_like(ids).int()
    for begin in ends[1:-1]:
        documents[:, begin:] += 1
    with torch.no_grad():
        logits = decoder(ids, documents=documents)
        alone = [hf_model(ids[:, low:high], **case.extra).logits for low, high in pairwise(ends)]
    return Difference("packed", _apart(logits, torch.cat(alone, dim=1)))


def _long(case: Case, decoder: Decoder, hf_model: Any) -> Difference:
    """A sequence several times as long as windows and scaled positions are."""
    ids = tokens(rows=1, length=300, seed=3)
    with torch.no_grad():
        return Difference("long", _apart(decoder(ids), hf_model(ids, **case.extra).logits))


def assert_equal(case: Case, folder: Path, hf_model: Any = None) -> None:
    """Logits within 1e-4, gradients within 1e-3 by norm; the plan counts the parameters of both modules."""
    for difference in differences(case, folder, hf_model):
        assert difference.logits < 1e-4, difference
        assert difference.gradients < 1e-3, difference


def assert_counts(case: Case, folder: Path, hf_model: Any = None) -> None:
    """What the recipe says of tensors, and the plan of parameters, is what the module has."""
    hf_model = hf_model or make(case, folder)
    model = read_model(folder)
    module = empty_decoder(model, "meta")
    assert {name: tuple(p.shape) for name, p in module.named_parameters()} == model.tensors()
    assert [name for name, _ in module.named_parameters()] == list(model.tensors())
    persistent = {name: tuple(t.shape) for name, t in module.state_dict().items() if name not in model.tensors()}
    assert persistent == model.buffers()
    count = sum(p.numel() for p in module.parameters())
    assert count == parameters(model.architecture())
    assert count == sum(p.numel() for p in hf_model.parameters())


def assert_round_trip(case: Case, folder: Path, **save: Any) -> None:
    """Into Headway and back to a folder that `transformers` reads: the same tensors bit for bit, model and logits."""
    assert_comes_back(case, folder / "theirs", make(case, folder / "theirs", **save), folder / "ours")


def assert_comes_back(case: Case, source: Path, hf_model: Any, target: Path) -> None:
    decoder = load(source)
    tensors = {name: tensor.detach() for name, tensor in decoder.state_dict().items()}
    write_folder(target, decoder.model, tensors, seq=case.settings.get("max_position_embeddings", 2048))
    back, report = transformers.AutoModelForCausalLM.from_pretrained(
        target, output_loading_info=True, attn_implementation="eager", dtype=torch.float32
    )
    assert not report["missing_keys"], report
    assert not report["unexpected_keys"], report
    state = back.state_dict()
    for name, tensor in hf_model.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    with torch.no_grad():
        assert torch.equal(back(tokens(), **case.extra).logits, hf_model(tokens(), **case.extra).logits)
    assert read_model(target) == decoder.model


def assert_cache(case: Case, folder: Path, hf_model: Any = None) -> None:
    """In pieces, over the end of a window and far from it, beside another sequence: the logits of all at once."""
    hf_model or make(case, folder)
    decoder = load(folder)
    ids = tokens(rows=2)
    with torch.no_grad():
        wanted = decoder(ids)
        for ends in ((0, 5, *range(6, 15)), (0, 17, 37, 38, 39, 40)):
            engine = make_engine(decoder, blocks=40)
            rows = [Sequence("", 0, i, row.tolist(), SamplingParams(), 99, 0, blocks=list(range(i, 40, 2)))
                    for i, row in enumerate(ids)]  # fmt: skip
            for low, high in pairwise(ends):
                chunks = [Chunk(rows[0], low, high - low), Chunk(rows[1], low, high - low)]
                logits = engine.runner.logits(engine.runner.run(chunks)).unflatten(0, (2, -1))
                torch.testing.assert_close(logits, wanted[:, low:high], rtol=1e-4, atol=1e-4)


def make_engine(decoder: Decoder, blocks: int, limits: Limits | None = None) -> InferenceEngine:
    """An engine with small blocks."""
    device = torch.device("cpu")
    pages = PagedKvCache(decoder.model.layers, decoder.cache_widths(), blocks, 4, torch.float32, device)
    switch = decoder.model.switch_length if isinstance(decoder.model, RotaryModel) else None
    model = EngineModel(200, 4096, (), switch)
    return InferenceEngine(PagedRunner(decoder, pages, device), model, BlockPool(blocks, 4), limits)


def assert_generates(case: Case, folder: Path, hf_model: Any = None) -> None:
    """Ten requests at once, in a cache too small for all: the tokens of `transformers` for each alone.

    From where its best two logits are within 1e-4 of each other on, tokens may differ.
    """
    hf_model = hf_model or make(case, folder)
    engine = make_engine(load(folder), blocks=44, limits=Limits(max_batch_tokens=40, max_sequences=9))
    lengths = (1, 3, 9, 14, 30, 57, 60, 63, 30, 66)  # longrope switches at 64
    prompts = [tokens(rows=1, length=length, seed=20 + length)[0].tolist() for length in lengths]
    made: list[list[int]] = [[] for _ in prompts]
    for number, prompt in enumerate(prompts):
        engine.add(str(number), prompt, SamplingParams(max_tokens=14, temperature=0))
    while engine.busy:
        for output in engine.step():
            assert output.token_id is not None
            made[int(output.request_id)].append(output.token_id)
    assert engine.counts.preemptions, "else nothing was short"
    assert engine.counts.shared_tokens, "two prompts are the same"
    assert engine.pool.free == engine.pool.count, "all blocks are back"
    for prompt, ids in zip(prompts, made, strict=True):
        theirs, margins = greedy(hf_model, prompt, 14, case.extra)
        clear = next((i for i, margin in enumerate(margins) if margin < 1e-4), len(theirs))
        assert ids[:clear] == theirs[:clear], (len(prompt), ids, theirs, margins)
        assert len(ids) == 14


def greedy(hf_model: Any, prompt: list[int], count: int, extra: dict[str, Any]) -> tuple[list[int], list[float]]:
    """What `transformers` takes for the likeliest tokens, and by how much; ids from 200 on are left out."""
    hf_model.generation_config.suppress_tokens = list(range(200, hf_model.config.get_text_config().vocab_size))
    with torch.no_grad():
        made = hf_model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), max_new_tokens=count,
            do_sample=False, return_dict_in_generate=True, output_scores=True, pad_token_id=0, **extra
        )  # fmt: skip
    best = [scores[0].topk(2).values for scores in made.scores]
    return made.sequences[0, len(prompt) :].tolist(), [float(first - second) for first, second in best]
