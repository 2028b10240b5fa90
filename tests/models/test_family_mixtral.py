"""Mixtral against `transformers`, and what of a config.json is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from family_cases import SIZES, Case, assert_round_trip, load, make, tokens
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from headway.errors import ModelError
from headway.models import Decoder, empty_decoder, init_weights
from headway.models.experts import set_loss_scale
from headway.recipe import Model
from headway.recipe.huggingface import model_from_config
from lazy_imports import transformers

EXPERTS = SIZES | {"num_local_experts": 5, "num_experts_per_tok": 2, "num_hidden_layers": 3}
CASES = [
    Case("Mixtral", "MixtralConfig", EXPERTS, "mixtral", "2 of 5 experts"),
    Case("Mixtral, window", "MixtralConfig", EXPERTS | {"sliding_window": 9, "num_experts_per_tok": 3,
         "tie_word_embeddings": True}, "mixtral", "3 of 5 experts, sliding window, tied"),
]  # fmt: skip


def test_experts_spread_over_several_files(tmp_path: Path) -> None:
    assert_round_trip(CASES[0], tmp_path, max_shard_size="60KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 4


def test_the_auxiliary_loss_is_theirs(tmp_path: Path) -> None:
    """Of one layer: they take several together, of which one may be uneven where another makes up for it."""
    case = Case("", "MixtralConfig", EXPERTS | {"num_hidden_layers": 1, "router_aux_loss_coef": 0.5}, "mixtral")
    hf_model, decoder = make(case, tmp_path), load(tmp_path)
    ids = tokens(length=20)
    labels = torch.cat((ids[:, 1:], torch.full((2, 1), -100)), dim=1)
    output = hf_model(ids, labels=ids, output_router_logits=True)
    output.loss.backward()
    set_loss_scale(decoder, 1 / 38)
    loss = decoder(ids, labels) / 38
    loss.backward()
    assert output.loss.item() == pytest.approx(loss.item() + 0.5 * output.aux_loss.item(), rel=1e-5)
    # Tokens that nobody is trained on are routed all the same, and count: two of forty.
    want = hf_model.model.layers[0].mlp.gate.weight.grad
    without = load(tmp_path)
    (without(ids, labels) / 38).backward()
    plain = without.layers[0].mlp.router.weight.grad
    torch.testing.assert_close(decoder.layers[0].mlp.router.weight.grad - plain, (want - plain) * 40 / 38)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"hidden_act": "gelu"}, "gelu"),
        ({"router_jitter_noise": 0.1}, "router_jitter_noise"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized"),
        ({"num_experts_per_tok": 6}, "top_k"),
        ({"partial_rotary_factor": 0.5}, "rotates 0.5"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"intermediate_size": None}, "intermediate_size"),
    ],
)
def test_refusals(settings: dict[str, Any], words: str) -> None:
    config = transformers.MixtralConfig(**EXPERTS).to_dict() | {"rope_parameters": None}
    with pytest.raises(ModelError, match=words):
        model_from_config(config | settings)


def test_config_defaults_match_transformers() -> None:
    default = transformers.MixtralConfig()
    needed = {"model_type": "mixtral", "vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2,
              "num_attention_heads": 8, "intermediate_size": 32}  # fmt: skip
    model = model_from_config(needed)
    assert (model.experts, model.top_k, model.balance) == (
        default.num_local_experts, default.num_experts_per_tok, default.router_aux_loss_coef,
    )  # fmt: skip
    assert (model.kv_heads, model.norm_eps, model.window) == (
        default.num_key_value_heads, default.rms_norm_eps, default.sliding_window,
    )  # fmt: skip
    assert model.rope_theta == default.rope_parameters["rope_theta"]
    assert model.tie_embeddings == default.tie_word_embeddings


def test_more_of_all_than_there_are() -> None:
    with pytest.raises(ValueError, match="top_k"):
        Model(family="mixtral", experts=2, top_k=3)


def test_fresh_experts_are_drawn_like_a_feed_forward() -> None:
    model = Model(family="mixtral", vocab_size=97, layers=8, dim=64, hidden=96, experts=4, init_std=0.05)
    decoder = empty_decoder(model)
    init_weights(decoder, seed=3)
    experts = decoder.layers[5].mlp.experts
    for name, std in {"gate": 0.05, "up": 0.05, "down": 0.05 / 4}.items():
        assert getattr(experts, name).std().item() == pytest.approx(std, rel=0.03)
    assert not torch.equal(experts.gate[0], experts.gate[1])


def test_shards_equal_the_whole(tmp_path: Path) -> None:
    """With the auxiliary loss, and each block gathered by itself."""
    model = Model(family="mixtral", vocab_size=211, layers=2, dim=32, heads=4, hidden=48, experts=5, balance=0.3)
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        plain, sharded = (empty_decoder(model) for _ in range(2))
        losses = []
        for decoder in (plain, sharded):
            init_weights(decoder, seed=1)
            if decoder is sharded:
                for block in decoder.layers:
                    fully_shard(block, mesh=mesh)
                fully_shard(decoder, mesh=mesh)
            set_loss_scale(decoder, 1 / 80)
            losses.append(decoder(tokens(), tokens(seed=2)))
            (losses[-1] / 80).backward()
        assert torch.equal(losses[0], losses[1])
        assert all(torch.equal(grad.full_tensor(), grads(plain)[name]) for name, grad in grads(sharded).items())
    finally:
        dist.destroy_process_group()


def grads(decoder: Decoder) -> dict[str, Any]:
    return {name: parameter.grad for name, parameter in decoder.named_parameters()}
