"""Adapters of diffusion transformers: what they compute, and files that a pipeline of diffusers loads."""

import importlib.util
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_diffusion_models import randomize, run_wan, wan, wan_inputs

from headway.models import init_weights, load_into
from headway.models.diffusion import empty_transformer
from headway.models.lora import add_adapters, read_adapters
from headway.recipe import Lora
from headway.recipe.families.dit import DiT
from headway.recipe.huggingface import read_model
from headway.recipe.lora import A, B, adapted_layers
from headway.state.peft import Adapter, LayerAdapter, read_adapter, write_adapter
from lazy_imports import diffusers

LORA = Lora(rank=3, alpha=5.0, targets=("layers.*.attention.*", "layers.*.cross.*", "layers.0.mlp.up"))


def adapter_of(model: torch.nn.Module) -> Adapter:
    layers = {
        name: LayerAdapter(*(model.get_parameter(f"{name}.{side}").detach().numpy() for side in (A, B)), LORA.scale)
        for name in adapted_layers(model.model, LORA.targets)
    }
    return Adapter("here", layers)


def test_adapter_files_merge_into_diffusers_to_what_the_adapted_model_computes(tmp_path: Path) -> None:
    theirs = wan("image to video")
    theirs.save_pretrained(tmp_path / "base")
    ours = empty_transformer(read_model(tmp_path / "base"))
    add_adapters(ours, LORA)
    load_into_base(ours, tmp_path / "base")
    x, t, conditioning = wan_inputs("image to video")
    with torch.no_grad():
        got, plain = ours(x, t, conditioning), run_wan(theirs, x, t, conditioning)
    write_adapter(tmp_path / "adapter", ours.model, adapter_of(ours))

    # as a pipeline does: the prefix names the part, and without settings alpha is the rank
    stored = load_file(tmp_path / "adapter" / "pytorch_lora_weights.safetensors")
    modules = dict(theirs.named_modules())
    pairs = {name.removesuffix(".lora_A.weight") for name in stored if name.endswith(".lora_A.weight")}
    assert len(stored) == 2 * len(pairs) == 2 * (2 * (4 + 6) + 1)
    for pair in pairs:
        module = modules[pair.removeprefix("transformer.")]
        assert isinstance(module, torch.nn.Linear)
        with torch.no_grad():
            module.weight += stored[f"{pair}.lora_B.weight"] @ stored[f"{pair}.lora_A.weight"]
    with torch.no_grad():
        want = run_wan(theirs, x, t, conditioning)
    assert (got - want).abs().max() < 1e-4
    assert (got - plain).abs().max() > 0.1

    again = read_adapter(tmp_path / "adapter", ours.model)
    for name, layer in adapter_of(ours).layers.items():
        assert (again.layers[name].a == layer.a).all()
        assert (again.layers[name].b == layer.b).all()
        assert math.isclose(again.layers[name].scale, LORA.scale)
    assert read_adapters(tmp_path / "adapter", ours.model).keys() == adapter_of(ours).tensors().keys()


@pytest.mark.skipif(not all(map(importlib.util.find_spec, ("peft", "accelerate"))), reason="needs peft and accelerate")
def test_diffusers_loads_adapter_files_itself(tmp_path: Path) -> None:
    wan("text to video").save_pretrained(tmp_path / "base")
    theirs = diffusers.WanTransformer3DModel.from_pretrained(tmp_path / "base")
    ours = empty_transformer(read_model(tmp_path / "base"))
    add_adapters(ours, LORA)
    load_into_base(ours, tmp_path / "base")
    write_adapter(tmp_path / "adapter", ours.model, adapter_of(ours))
    theirs.load_lora_adapter(load_file(tmp_path / "adapter" / "pytorch_lora_weights.safetensors"), prefix="transformer")
    x, t, conditioning = wan_inputs("text to video")
    with torch.no_grad():
        got, want = ours(x, t, conditioning), run_wan(theirs, x, t, conditioning)
    assert (got - want).abs().max() < 1e-4


def load_into_base(ours: torch.nn.Module, folder: Path) -> None:
    """Random adapters on a folder's weights."""
    plain = empty_transformer(ours.model)
    load_into(plain, folder)
    randomize(ours)
    missing, unexpected = ours.load_state_dict(plain.state_dict(), strict=False)
    assert not unexpected
    assert all(name.endswith((A, B)) for name in missing)


def test_every_linear_layer_of_a_block_can_have_an_adapter() -> None:
    section = DiT(conditioning="text", layers=1, dim=16, heads=2)
    assert adapted_layers(section) == (
        "layers.0.modulation",
        *(f"layers.0.attention.{part}" for part in "qkvo"),
        *(f"layers.0.cross.{part}" for part in "qkvo"),
        "layers.0.mlp.up",
        "layers.0.mlp.down",
    )
    model = empty_transformer(section)
    add_adapters(model, Lora(rank=2))
    init_weights_of_base(model)
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == {
        f"{layer}.{side}" for layer in adapted_layers(section) for side in (A, B)
    }


def init_weights_of_base(model: torch.nn.Module) -> None:
    """First weights are by name, whether there are adapters or not."""
    plain = empty_transformer(model.model)
    init_weights(plain, 0)
    model.load_state_dict(plain.state_dict(), strict=False)
