"""Adapters on one process: merged weights, PEFT's files, and `peft` itself."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from headway.errors import ModelError, RecipeError
from headway.models import empty_decoder, init_weights, load_into, write_folder
from headway.models.lora import add_adapters, initial_adapter
from headway.parallel.recompute import recompute
from headway.recipe import Lora, Model
from headway.recipe.load import parse_recipe
from headway.recipe.lora import A, B, adapted_layers, adapter_tensors
from headway.state.base_weights import base_digest, base_weights, check_base
from headway.state.huggingface import write_folder as write_lazily
from headway.state.peft import (
    Adapter,
    LayerAdapter,
    check_same_base,
    lora_of,
    merged_weights,
    read_adapter,
    write_adapter,
)
from own_environment import python_with

SMALL = {"layers": 2, "dim": 32, "heads": 4, "kv_heads": 2, "hidden": 48, "vocab_size": 96}
EQUAL_HEADS = SMALL | {"kv_heads": 4}
FAMILIES = {
    "llama": SMALL,
    "llama-biased": SMALL | {"family": "llama", "qkv_bias": True, "tie_embeddings": False},
    "phi3": SMALL | {"tie_embeddings": False},
    "gpt_neox": EQUAL_HEADS | {"tie_embeddings": False},
    "gpt2": EQUAL_HEADS,
    "gemma2": SMALL,
    "mixtral": SMALL | {"tie_embeddings": False},
}
"""phi3 packs rows, gpt_neox interleaves heads, gpt2 transposes; mixtral has experts, which get no adapters."""


def model_of(name: str) -> Model:
    settings = FAMILIES[name]
    return Model(**({"family": name} | settings))


def random_adapter(model: Model, lora: Lora, seed: int = 0) -> Adapter:
    generator = np.random.default_rng(seed)
    shapes = adapter_tensors(model, lora)
    layers = {
        layer: LayerAdapter(
            *(generator.normal(0, 0.3, shapes[f"{layer}.{key}"]).astype(np.float32) for key in (A, B)), lora.scale
        )
        for layer in adapted_layers(model, lora.targets)
    }
    return Adapter("test", layers, lora.rslora)


def base_folder(folder: Path, model: Model, seed: int = 1) -> Path:
    decoder = empty_decoder(model)
    init_weights(decoder, seed)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(5 if parameter.ndim > 1 else 1)  # so that every part matters
    write_folder(folder, model, decoder.state_dict())
    return folder


def with_adapter(folder: Path, model: Model, lora: Lora, adapter: Adapter) -> torch.nn.Module:
    decoder = empty_decoder(model)
    load_into(decoder, folder)
    add_adapters(decoder, lora)
    with torch.no_grad():
        for name, value in adapter.tensors().items():
            decoder.get_parameter(name).copy_(torch.from_numpy(value))
    return decoder


@pytest.mark.parametrize(
    ("name", "rslora"),
    [
        ("llama", True),
        *((name, False) for name in FAMILIES if name != "mixtral"),
        pytest.param("mixtral", False, marks=pytest.mark.slow),
    ],
)
def test_merged_weights_compute_what_adapters_do(tmp_path, name: str, rslora: bool) -> None:
    """The adapters go through PEFT's files, and the merged folder is loaded as any other."""
    model = model_of(name)
    lora = Lora(rank=3, alpha=4.0, rslora=rslora)
    adapter = random_adapter(model, lora)
    base = base_folder(tmp_path / "base", model)
    write_adapter(tmp_path / "adapter", model, adapter)
    stored = read_adapter(tmp_path / "adapter", model)
    write_lazily(tmp_path / "merged", model, merged_weights(base_weights(str(base), model), stored))

    merged = empty_decoder(model)
    load_into(merged, tmp_path / "merged")
    tokens = torch.arange(40).view(2, 20) * 7 % 96
    with torch.no_grad():
        expected = with_adapter(base, model, lora, adapter)(tokens)
        plain = empty_decoder(model)
        load_into(plain, base)
        assert (plain(tokens) - expected).abs().max() > 0.1
        difference = (merged(tokens) - expected).abs().max() / expected.abs().max()
    assert difference < 1e-5


def test_bfloat16_base_is_rounded_once_when_merged(tmp_path) -> None:
    model, lora = model_of("llama"), Lora(rank=2, alpha=2.0)
    decoder = empty_decoder(model)
    init_weights(decoder, 0)
    write_folder(tmp_path / "base", model, {name: t.bfloat16() for name, t in decoder.state_dict().items()})
    adapter = random_adapter(model, lora)
    weights = merged_weights(base_weights(str(tmp_path / "base"), model), adapter)
    write_lazily(tmp_path / "merged", model, weights)
    layer, merged = "layers.1.mlp.down", load_file(tmp_path / "merged" / "model.safetensors")
    x = adapter.layers[layer]
    exact = decoder.get_parameter(f"{layer}.weight").bfloat16().double()
    exact = exact + lora.scale * torch.from_numpy(x.b).double() @ torch.from_numpy(x.a).double()
    assert torch.equal(merged["model.layers.1.mlp.down_proj.weight"], exact.float().bfloat16())


def test_first_adapters_are_within_the_bound_of_their_inputs_and_change_nothing() -> None:
    a = initial_adapter(f"layers.0.mlp.up.{A}", (8, 64), seed=1)
    assert a.abs().max() <= 1 / 8
    assert a.std().item() == pytest.approx(1 / 8 / 3**0.5, rel=0.1)
    assert torch.equal(a, initial_adapter(f"layers.0.mlp.up.{A}", (8, 64), seed=1))
    assert not torch.equal(a, initial_adapter(f"layers.1.mlp.up.{A}", (8, 64), seed=1))
    assert not initial_adapter(f"layers.0.mlp.up.{B}", (64, 8), seed=1).any()


def test_dropout_zeroes_a_share_of_the_inputs_and_scales_the_others() -> None:
    """With identities as adapter, on a base of zeros, the layer's output is the input after dropout."""
    model = Model(layers=1, dim=64, heads=2, vocab_size=64)
    decoder = empty_decoder(model)
    add_adapters(decoder, Lora(rank=64, alpha=64.0, dropout=0.25, targets=("layers.0.attention.q",)))
    layer = decoder.layers[0].attention.q
    with torch.no_grad():
        layer.weight.zero_()
        layer.lora_a.copy_(torch.eye(64))
        layer.lora_b.copy_(torch.eye(64))
    x = torch.rand(500, 64) + 1
    torch.manual_seed(5)
    out = layer.train()(x)
    dropped = out == 0
    assert dropped.float().mean().item() == pytest.approx(0.25, abs=0.01)
    torch.testing.assert_close(out[~dropped], (x / 0.75)[~dropped])
    assert out.mean().item() == pytest.approx(x.mean().item(), rel=0.02)
    torch.manual_seed(5)
    assert torch.equal(layer(x), out)
    torch.testing.assert_close(layer.eval()(x), x)


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_recomputed_activations_are_dropped_alike(kind) -> None:
    gradients = []
    for recomputed in ("none", kind):
        decoder = empty_decoder(model_of("llama"))
        init_weights(decoder, 0)
        add_adapters(decoder, Lora(rank=3, dropout=0.3))
        for name, parameter in decoder.named_parameters():
            if parameter.requires_grad:
                generator = torch.Generator().manual_seed(len(name))
                parameter.data.normal_(0, 0.2, generator=generator)
        recompute(list(decoder.layers), recomputed, None)
        torch.manual_seed(3)
        tokens = torch.arange(40).view(2, 20) * 7 % 96
        decoder.train()(tokens, tokens.roll(-1, 1)).backward()
        gradients.append({name: p.grad for name, p in decoder.named_parameters() if p.requires_grad})
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


def test_dropout_is_in_pefts_settings_both_ways(tmp_path) -> None:
    model, lora = model_of("llama"), Lora(rank=3, dropout=0.05)
    adapter = replace(random_adapter(model, lora), dropout=lora.dropout)
    write_adapter(tmp_path / "adapter", model, adapter)
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["lora_dropout"] == 0.05
    stored = lora_of(read_adapter(tmp_path / "adapter", model), model)
    assert Lora(init="x").starting_from(stored).dropout == 0.05
    assert Lora(init="x", dropout=0.1).starting_from(stored).dropout == 0.1


@pytest.mark.parametrize(
    ("targets", "layers"),
    [
        ((), 14),
        (("layers.*.attention.q", "layers.*.attention.v"), 4),
        (("layers.1.**",), 7),
    ],
)
def test_targets_choose_layers(targets: tuple[str, ...], layers: int) -> None:
    assert len(adapted_layers(model_of("llama"), targets)) == layers


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("q_proj", "no layer of the model matches 'q_proj'"),
        ("layers.*.attention_norm", r"matches layers\.0\.attention_norm, which is not a linear layer"),
        ("embed", "matches embed, which is not a linear layer"),
    ],
)
def test_targets_without_a_linear_layer_are_refused(target: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        adapted_layers(model_of("llama"), [target])


def test_experts_are_refused_as_targets() -> None:
    with pytest.raises(RecipeError, match="not a linear layer of a block"):
        adapted_layers(model_of("mixtral"), ["layers.*.mlp.experts"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": {}}, r"model\.init is not set"),
        ({"train": {"freeze": ["embed.*"]}}, r"train\.freeze has no effect"),
        ({"lora": {"quantize": "nf4"}, "parallel": {"tensor": 2}}, "replicate and shard axes only"),
    ],
)
def test_settings_that_adapters_exclude_are_refused(values: dict, message: str) -> None:
    recipe = {"model": {"init": "folder"}, "data": {"path": "data"}, "lora": {}} | values
    with pytest.raises(RecipeError, match=message):
        parse_recipe(recipe, {}, "test")


def test_adapter_for_another_base_is_named(tmp_path) -> None:
    model, lora = model_of("llama"), Lora(rank=2)
    first, second = (base_folder(tmp_path / f"base-{seed}", model, seed) for seed in (1, 2))
    digest = base_digest(str(first), model)
    pinned = model.model_copy(update={"init": str(second)})
    with pytest.raises(ModelError, match=f"another base: its base has digest {digest}, but {second}"):
        check_base(lora.model_copy(update={"base": digest}), pinned)
    adapter = Adapter("a", random_adapter(model, lora).layers, base=digest, base_name=str(first))
    write_adapter(tmp_path / "adapter", model, adapter)
    stored = read_adapter(tmp_path / "adapter", model)
    check_same_base(stored, digest, str(first))
    with pytest.raises(ModelError, match="adapter for another base"):
        check_same_base(stored, base_digest(str(second), model), str(second))
    wider = Model(**SMALL | {"hidden": 64})
    with pytest.raises(ModelError, match=r"for a layer of 32 x 48, the model's is 32 x 64"):
        read_adapter(tmp_path / "adapter", wider)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "adapters of type IA3"),
        ({"use_dora": True}, "sets use_dora"),
        ({"modules_to_save": ["lm_head"]}, "sets modules_to_save"),
        ({"bias": "all"}, "sets bias"),
        ({"r": 5}, r"has rank 2, but adapter_config\.json says 5"),
    ],
)
def test_unsupported_adapters_of_peft_are_refused(tmp_path, change: dict, message: str) -> None:
    model = model_of("llama")
    write_adapter(tmp_path / "adapter", model, random_adapter(model, Lora(rank=2)))
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ModelError, match=message):
        read_adapter(tmp_path / "adapter", model)


PEFT = """
import sys, torch, transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
base, ours, theirs, logits, targets = sys.argv[1:]
tokens = torch.arange(40).view(2, 20) * 7 % 96
load = lambda: transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
with torch.no_grad():
    first = PeftModel.from_pretrained(load(), ours)(tokens).logits
    config = LoraConfig(
        r=5, lora_alpha=7, use_rslora=True, target_modules=targets.split(","), task_type="CAUSAL_LM",
        rank_pattern={targets.split(",")[0]: 3}, alpha_pattern={targets.split(",")[-1]: 9},
    )
    torch.manual_seed(0)
    model = get_peft_model(load(), config).eval()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.normal_(0, 0.3)
    model.save_pretrained(theirs)
    save_file({"ours": first.contiguous(), "theirs": model(tokens).logits.contiguous()}, logits)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("llama", "q_proj,o_proj,down_proj"),
        ("llama-biased", "k_proj,gate_proj"),
        ("phi3", "qkv_proj,o_proj,gate_up_proj"),
        ("gpt_neox", "query_key_value,dense_h_to_4h"),
        ("gpt2", "c_attn,c_fc"),
        ("gemma2", "v_proj,up_proj"),
        ("mixtral", "q_proj,o_proj"),
    ],
)
def test_peft_loads_our_adapters_and_we_load_its(tmp_path, name: str, targets: str) -> None:
    python = python_with("peft==0.21.2", "accelerate==1.15.0")
    model, lora = model_of(name), Lora(rank=4, alpha=6.0)
    adapter = random_adapter(model, lora, seed=3)
    base = base_folder(tmp_path / "base", model)
    write_adapter(tmp_path / "ours", model, adapter)
    arguments = [str(base), str(tmp_path / "ours"), str(tmp_path / "theirs"), str(tmp_path / "logits"), targets]
    done = subprocess.run([str(python), "-c", PEFT, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    logits = load_file(tmp_path / "logits")
    tokens = torch.arange(40).view(2, 20) * 7 % 96
    with torch.no_grad():
        ours = with_adapter(base, model, lora, adapter)(tokens)
        assert (ours - logits["ours"]).abs().max() / ours.abs().max() < 1e-5
        stored = read_adapter(tmp_path / "theirs", model)
        write_lazily(tmp_path / "merged", model, merged_weights(base_weights(str(base), model), stored))
        merged = empty_decoder(model)
        load_into(merged, tmp_path / "merged")
        theirs = merged(tokens)
        assert (theirs - logits["theirs"]).abs().max() / theirs.abs().max() < 1e-5
        assert (theirs - ours).abs().max() / ours.abs().max() > 0.1
