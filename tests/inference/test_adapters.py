"""Adapters in the engine and the server: each request gets what the merged model would answer."""

from pathlib import Path

import numpy as np
import pytest
from served_model import MODEL, load

from headway.errors import ModelError, RequestError
from headway.inference import LLM, EngineOptions, LoadedModel, SamplingParams
from headway.inference.adapters import merge_into, stack
from headway.inference.load import load_model
from headway.models import write_folder
from headway.recipe import Lora
from headway.recipe.lora import A, B, adapted_layers, adapter_tensors
from headway.state.base_weights import base_digest
from headway.state.peft import Adapter, LayerAdapter, write_adapter

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
PROMPT = [5, 17, 3, 99, 42, 7, 7, 120, 250, 31, 8, 64, 2, 90, 11, 19, 23, 77, 101, 6]


def random_adapter(rank: int, targets: tuple[str, ...], seed: int, base: str | None = None) -> Adapter:
    lora = Lora(rank=rank, alpha=3.0, targets=targets)
    generator, shapes = np.random.default_rng(seed), adapter_tensors(MODEL, lora)
    layers = {
        layer: LayerAdapter(
            *(generator.normal(0, 0.4, shapes[f"{layer}.{key}"]).astype(np.float32) for key in (A, B)), lora.scale
        )
        for layer in adapted_layers(MODEL, targets)
    }
    return Adapter(f"adapter {seed}", layers, base=base)


ADAPTERS = {"sql": random_adapter(3, (), 1), "prose": random_adapter(8, ("layers.*.attention.*", "layers.1.**"), 2)}


def merged(name: str | None) -> LoadedModel:
    loaded = load()
    if name is not None:
        merge_into(loaded.module, ADAPTERS[name])
    return loaded


@pytest.fixture(scope="module")
def expected() -> dict[str | None, list[int]]:
    """Each merged model's own answer to the same prompt."""
    return {name: LLM(merged(name)).generate(PROMPT, GREEDY)[0].outputs[0].token_ids for name in (None, *ADAPTERS)}


def adapted() -> LoadedModel:
    loaded = load()
    loaded.adapters = stack(loaded.module, ADAPTERS)
    return loaded


@pytest.mark.parametrize("block_size", [4, 64])
def test_requests_in_one_batch_get_their_own_adapter(expected, block_size: int) -> None:
    """All prompts are equal, so that a prefix shared across adapters would show; with small blocks some are shared."""
    assert len({tuple(ids) for ids in expected.values()}) == 3
    llm = LLM(adapted(), options=EngineOptions(cache_tokens=1024, block_size=block_size, max_batch_tokens=300))
    names = ["sql", None, "prose", "sql", None, "prose"]
    for _ in range(2):
        results = llm.generate([PROMPT] * len(names), GREEDY, adapter=names)
        for name, result in zip(names, results, strict=True):
            assert result.outputs[0].token_ids == expected[name], name
    assert (llm.engine.engine.counts.shared_tokens > 0) == (block_size == 4)


def test_unknown_adapter_is_refused() -> None:
    with pytest.raises(RequestError, match="has no adapter 'code'"):
        LLM(adapted()).generate(PROMPT, GREEDY, adapter="code")
    with pytest.raises(RequestError, match="has no adapter 'sql'"):
        LLM(load()).generate(PROMPT, GREEDY, adapter="sql")


def test_adapters_load_from_folders_and_only_for_their_base(tmp_path: Path, expected) -> None:
    weights = load().module.state_dict()
    write_folder(tmp_path / "base", MODEL, weights)
    digest = base_digest(str(tmp_path / "base"), MODEL)
    for name, adapter in ADAPTERS.items():
        write_adapter(tmp_path / name, MODEL, Adapter(name, adapter.layers, base=digest))
    loaded = load_model(tmp_path / "base", device="cpu")
    loaded.vocabulary = 300  # as the tokenizer of the others
    llm = LLM(loaded, adapters={name: tmp_path / name for name in ADAPTERS})
    results = llm.generate([PROMPT] * 3, GREEDY, adapter=["sql", "prose", None])
    assert [result.outputs[0].token_ids for result in results] == [expected[name] for name in ("sql", "prose", None)]

    other = {name: tensor + 1e-3 for name, tensor in weights.items()}
    write_folder(tmp_path / "other", MODEL, other)
    with pytest.raises(ModelError, match="is an adapter for another base"):
        LLM(tmp_path / "other", device="cpu", adapters={"sql": tmp_path / "sql"})
