"""Adapters on a GPU: compiled blocks, a base in bfloat16 or NF4, and CUDA graphs with several adapters."""

from typing import Any

import numpy as np
import pytest
import torch

from headway.inference import LLM, EngineOptions, LoadedModel, SamplingParams
from headway.inference.adapters import merge_into, stack
from headway.models import empty_decoder, init_weights, initial_weight
from headway.models.lora import CODES, add_adapters, fill_quantized, initial_adapter, is_adapter
from headway.parallel import World, parallelize_model
from headway.parallel.objective import DeviceBatch, SumScale
from headway.recipe import Lora, Model, Recipe
from headway.recipe.lora import A, B, adapted_layers, adapter_tensors
from headway.state.peft import Adapter, LayerAdapter
from headway.train.optim import build_optimizer, lower, set_step

pytestmark = pytest.mark.gpu
MODEL = {"layers": 2, "dim": 256, "heads": 4, "kv_heads": 2, "hidden": 512, "vocab_size": 512, "init_std": 0.05}
PROMPT = [5, 17, 3, 99, 42, 7, 7, 120, 250, 31, 8, 64, 2, 90, 11, 19, 23, 77, 101, 6]


def losses(device: str, lora: dict[str, Any], train: dict[str, Any]) -> list[float]:
    """The losses of a few steps on one batch."""
    values = {
        "model": MODEL | {"init": "a folder"},
        "data": {"path": "nowhere", "seq": 128},
        "train": {"batch": 4, "lr": 1e-2, "optimizer": "adamw"} | train,
        "lora": {"rank": 8} | lora,
    }
    recipe = Recipe.model_validate(values)
    assert recipe.lora is not None
    model = empty_decoder(recipe.model, "meta")
    lower(model, recipe.train)
    add_adapters(model, recipe.lora)
    spread = parallelize_model(model, recipe, World(0, 1, torch.device(device)))
    named = dict((*spread.model.named_parameters(), *spread.model.named_buffers()))
    with torch.no_grad():
        for name, shape in recipe.model.tensors().items():
            weight, layer = initial_weight(recipe.model, name, shape, 0), name.removesuffix(".weight")
            if name in named:
                named[name].copy_(weight)
            else:
                assert f"{layer}.{CODES}" in named
                fill_quantized(spread.model.get_submodule(layer), weight)
        for name, parameter in spread.model.named_parameters():
            if is_adapter(name):
                parameter.copy_(initial_adapter(name, tuple(parameter.shape), 0))
    optimizer = build_optimizer(spread.model, recipe.train)
    tokens = torch.randint(0, 512, (4, 129), generator=torch.Generator().manual_seed(0)).to(device)
    batch, results = DeviceBatch(tokens[:, :-1], tokens[:, 1:], None), list[float]()
    for step in range(1, 7):
        set_step(optimizer.param_groups, step, 1e-2)
        results.append(float(spread.passes(batch, SumScale.per_label(4 * 128))))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return results


@pytest.mark.parametrize("quantize", [None, "nf4"])
@pytest.mark.parametrize("train", [{"weights": "bfloat16"}, {"weights": "bfloat16", "recompute": "selective"}, {}])
def test_compiled_adapters_have_the_losses_of_the_cpu(quantize: str | None, train: dict[str, Any]) -> None:
    expected = losses("cpu", {"quantize": quantize}, {})
    assert expected[-1] < expected[0] - 0.05
    half = losses("cuda", {"quantize": quantize}, train | {"dtype": "bfloat16"})
    assert half == pytest.approx(expected, rel=1e-2)


def test_cuda_graphs_decode_with_the_adapter_of_each_request() -> None:
    model = Model(**MODEL | {"init_std": 0.2})
    generator, adapters = np.random.default_rng(0), {}
    for name, lora in (("sql", Lora(rank=3)), ("prose", Lora(rank=8, targets=("layers.*.attention.*",)))):
        shapes = adapter_tensors(model, lora)
        layers = {
            layer: LayerAdapter(
                *(generator.normal(0, 0.2, shapes[f"{layer}.{key}"]).astype(np.float32) for key in (A, B)), lora.scale
            )
            for layer in adapted_layers(model, lora.targets)
        }
        adapters[name] = Adapter(name, layers)

    def load(merged: str | None = None) -> LoadedModel:
        decoder = empty_decoder(model)
        init_weights(decoder, 0)
        if merged is not None:
            merge_into(decoder, adapters[merged])
        return LoadedModel("tiny", decoder.cuda().eval(), torch.device("cuda"), 512, 128)

    params, options = SamplingParams(max_tokens=16, temperature=0), EngineOptions(cache_tokens=2048, max_sequences=8)
    expected = {name: LLM(load(name), options=options).generate(PROMPT, params)[0] for name in (None, *adapters)}
    loaded = load()
    loaded.adapters = stack(loaded.module, adapters)
    llm = LLM(loaded, options=options)
    assert llm.engine.engine.runner.graphs is not None
    names = ["sql", None, "prose", "sql", "prose"]
    for name, result in zip(names, llm.generate([PROMPT] * 5, params, adapter=names), strict=True):
        assert result.outputs[0].token_ids == expected[name].outputs[0].token_ids, name
    assert len({tuple(result.outputs[0].token_ids) for result in expected.values()}) == 3
