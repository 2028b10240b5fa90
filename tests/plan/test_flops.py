"""Counts against published models, and against what torch itself counts while a decoder trains."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from headway.models import empty_decoder, init_weights
from headway.plan import flops_per_token, flops_per_token_full_attention, matmul_parameters, parameters
from headway.plan.flops import attended_share
from headway.recipe import Model
from headway.recipe.architecture import Architecture
from thinned import examples

LLAMA3_8B = Model(vocab_size=128_256, layers=32, dim=4096, heads=32, kv_heads=8, hidden=14_336, tie_embeddings=False)
LLAMA32_1B = Model(vocab_size=128_256, layers=16, dim=2048, heads=32, kv_heads=8, hidden=8192)
QWEN3_06B = Model(
    vocab_size=151_936, layers=28, dim=1024, heads=16, kv_heads=8, head_dim=128, hidden=3072, qk_norm=True
)
QWEN25_05B = Model(vocab_size=151_936, layers=24, dim=896, heads=14, kv_heads=2, hidden=4864, qkv_bias=True)


@pytest.mark.parametrize(
    ("model", "published"),
    [
        (LLAMA3_8B, 8_030_261_248),
        (LLAMA32_1B, 1_235_814_400),
        (QWEN3_06B, 596_049_920),
        (QWEN25_05B, 494_032_768),
    ],
    ids=["llama-3-8b", "llama-3.2-1b", "qwen3-0.6b", "qwen2.5-0.5b"],
)
def test_parameters_of_published_models(model: Model, published: int) -> None:
    assert parameters(model.architecture()) == published


def test_flops_of_a_published_model_by_hand() -> None:
    layer = 4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14_336
    matrices = 32 * layer + 128_256 * 4096
    assert matmul_parameters(LLAMA3_8B.architecture()) == matrices
    assert flops_per_token(LLAMA3_8B.architecture(), 8192) == 6 * matrices + 6 * 32 * 4096 * 8192
    assert flops_per_token_full_attention(LLAMA3_8B.architecture(), 8192) == 6 * matrices + 12 * 32 * 4096 * 8192


@st.composite
def small_models(draw: st.DrawFn) -> Model:
    kv_heads = draw(st.integers(1, 3))
    switches = ("tie_embeddings", "qk_norm", "qkv_bias", "output_bias", "mlp_bias")
    return Model(
        vocab_size=draw(st.integers(2, 70)),
        layers=draw(st.integers(1, 3)),
        dim=draw(st.integers(4, 40)),
        kv_heads=kv_heads,
        heads=kv_heads * draw(st.integers(1, 3)),
        head_dim=2 * draw(st.integers(1, 6)),
        hidden=draw(st.integers(1, 50)),
        **{switch: draw(st.booleans()) for switch in switches},
    )


@settings(max_examples=examples(30), deadline=None)
@given(small_models())
def test_shapes_and_counts_match_the_module(model: Model) -> None:
    with torch.device("meta"):
        decoder = empty_decoder(model)
    shapes = {name: tuple(parameter.shape) for name, parameter in decoder.named_parameters()}
    assert list(model.tensors().items()) == list(shapes.items())
    assert parameters(model.architecture()) == sum(parameter.numel() for parameter in decoder.parameters())


@settings(max_examples=examples(15), deadline=None)
@given(small_models(), st.integers(1, 3), st.integers(1, 9))
def test_a_training_step_executes_the_model_flops(model: Model, rows: int, length: int) -> None:
    decoder = empty_decoder(model)
    init_weights(decoder, seed=0)
    tokens = torch.zeros(rows, length, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        decoder(tokens, tokens).backward()
    # torch's counter leaves out the GEMMs of attention on a CPU.
    linear = {op: n for op, n in counter.get_flop_counts()["Global"].items() if "attention" not in str(op)}
    assert sum(linear.values()) == 6 * matmul_parameters(model.architecture()) * rows * length


def test_causal_attention_counts_half() -> None:
    """Causal attention has seq * (seq + 1) / 2 scores, each computed and used with head_dim multiply-adds."""
    model, seq = Model(vocab_size=10, layers=3, heads=4, head_dim=16), 1000
    scores = seq * (seq + 1) // 2
    exact = 3 * 2 * (2 * model.layers * model.heads * scores * model.head_dim)
    counted = (flops_per_token(model.architecture(), seq) - 6 * matmul_parameters(model.architecture())) * seq
    assert counted == pytest.approx(exact, rel=2 / seq)


@pytest.mark.parametrize(("window", "seq"), [(1, 7), (3, 7), (7, 7), (50, 7), (4, 64)])
def test_attended_share_of_sliding_windows(window: int, seq: int) -> None:
    """Pairs counted by brute force, in a model with three sliding-window layers of five."""
    pairs = sum(1 for i in range(seq) for j in range(seq) if 0 <= i - j < window)
    arch = Architecture(5, 32, 4, 2, 8, 64, 100, window=window, windowed_layers=3)
    assert attended_share(arch, seq) == pytest.approx((2 + 3 * pairs / (seq * (seq + 1) / 2)) / 5)
    plain = replace(arch, window=None, windowed_layers=0)
    share = (flops_per_token(arch, seq) - 6 * matmul_parameters(arch)) / (
        flops_per_token(plain, seq) - 6 * matmul_parameters(plain)
    )
    assert share == pytest.approx(attended_share(arch, seq), rel=0.01)
