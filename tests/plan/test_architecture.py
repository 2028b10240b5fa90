"""Parameters of published models, dense and with experts, from their shapes alone."""

import pytest

from headway.plan.architecture import Architecture, ExpertShape, LatentAttention, layer_kinds, layer_matrices
from headway.plan.flops import active_parameters, flops_per_token, matmul_parameters, parameters, routed_parameters

LATENT = LatentAttention(q_rank=1536, kv_rank=512, rope_dim=64, value_dim=128)
DEEPSEEK_V3 = Architecture(
    61,
    7168,
    128,
    128,
    192,
    18432,
    129280,
    tied=False,
    experts=ExpertShape(256, 8, 2048, shared=1, dense_layers=3),
    latent=LATENT,
)
KIMI_K2 = Architecture(
    61,
    7168,
    64,
    64,
    192,
    18432,
    163840,
    tied=False,
    experts=ExpertShape(384, 8, 2048, shared=1, dense_layers=1),
    latent=LATENT,
)
QWEN3_30B = Architecture(48, 2048, 32, 4, 128, 6144, 151936, tied=False, qk_norm=True, experts=ExpertShape(128, 8, 768))
QWEN3_235B = Architecture(
    94, 4096, 64, 4, 128, 12288, 151936, tied=False, qk_norm=True, experts=ExpertShape(128, 8, 1536)
)
GPT3 = Architecture(
    96, 12288, 96, 96, 128, 49152, 50257, gated=False, rotary=False, positions=2048, layer_norm=True, qkv_bias=True,
    output_bias=True, mlp_bias=True,
)  # fmt: skip


@pytest.mark.parametrize(
    ("arch", "total", "active"),
    [
        (DEEPSEEK_V3, 671e9, 37.0e9),  # model card: 671B, 37B activated
        (KIMI_K2, 1.04e12, 32.6e9),  # technical report: 1.04T, 32.6B activated
        (QWEN3_30B, 30.5e9, 3.3e9),  # model card: 30.5B, 3.3B activated
        (QWEN3_235B, 235e9, 22e9),  # model card: 235B, 22B activated
        (GPT3, 175e9, 175e9),
    ],
    ids=["deepseek-v3", "kimi-k2", "qwen3-30b", "qwen3-235b", "gpt-3"],
)
def test_parameters_of_published_models(arch: Architecture, total: float, active: float) -> None:
    assert parameters(arch) == pytest.approx(total, rel=0.015)
    assert active_parameters(arch) == pytest.approx(active, rel=0.03)


def test_deepseek_matches_published_flops() -> None:
    """The V3 report: 14.8T tokens in 2.664M H800 hours; its community count is about 250 GFLOP a token at 4096."""
    assert flops_per_token(DEEPSEEK_V3, 4096) == pytest.approx(250e9, rel=0.05)


def test_layers_are_dense_first() -> None:
    assert list(layer_kinds(DEEPSEEK_V3)) == [(False, 3), (True, 58)]
    assert list(layer_kinds(GPT3)) == [(False, 96)]


def test_routed_parameters_by_hand() -> None:
    assert routed_parameters(QWEN3_30B) == 128 * 3 * 2048 * 768
    assert routed_parameters(GPT3) == 0


def test_active_parameters_count_only_used_experts() -> None:
    inside = sum(m.inputs * m.outputs * m.uses for m in layer_matrices(QWEN3_30B, with_experts=True))
    attention = 2048 * (32 + 2 * 4) * 128 + 32 * 128 * 2048
    assert inside == attention + 2048 * 128 + 8 * 3 * 2048 * 768
    assert matmul_parameters(QWEN3_30B) == 48 * inside + 151936 * 2048
