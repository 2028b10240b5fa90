"""Memory against a published formula, against what a GPU allocated, and as properties."""

from dataclasses import replace

import pytest

from headway.hardware import parse_on
from headway.plan.architecture import Architecture
from headway.plan.memory import activation_bytes, local_parameters, memory
from headway.plan.settings import Mesh, Settings, Software

GPT = Architecture(
    96, 12288, 96, 96, 128, 49152, 51200, gated=False, rotary=False, positions=2048, layer_norm=True, qkv_bias=True,
    output_bias=True, mlp_bias=True,
)  # fmt: skip
LLAMA = Architecture(32, 4096, 32, 8, 128, 14336, 128256, tied=False)
MEGATRON = Software(fusion="fused", attention="unfused", dropout=True, sequence_parallel=True)
H100 = parse_on("h100x8x4")


@pytest.mark.parametrize("tensor", [1, 8])
def test_activations_are_the_published_formula(tensor: int) -> None:
    """Korthikanti et al. 2022, table 2: sbh (34 + 5 a s / h) / t bytes a layer with tensor and sequence parallelism."""
    settings = Settings(Mesh(tensor=tensor), seq=2048, microbatch=1, batch=1, software=MEGATRON)
    whole, kept = activation_bytes(GPT, False, settings.shape, settings)
    assert whole == kept == pytest.approx(2048 * 12288 * (34 + 5 * 96 * 2048 / 12288) / tensor, rel=1e-3)


def test_recomputing_attention_drops_its_term_and_full_recomputation_keeps_inputs() -> None:
    settings = Settings(Mesh(), seq=2048, microbatch=1, batch=1, software=MEGATRON)
    _, selective = activation_bytes(GPT, False, settings.shape, settings.but(recompute="attention"))
    assert selective == pytest.approx(34 * 2048 * 12288, rel=1e-3)
    _, full = activation_bytes(GPT, False, settings.shape, settings.but(recompute="full"))
    assert full == 2 * 2048 * 12288


def test_states_by_hand() -> None:
    """ZeRO 3 over 32 devices: sixteen bytes a parameter are spread, but for what is gathered."""
    own = Software(weight_bytes=4, master_bytes=0, moment_bytes=4, gradient_bytes=4)
    settings = Settings(Mesh(shard=32), seq=1024, microbatch=1, batch=32, zero=3, software=own)
    needed = memory(LLAMA, settings, H100)
    _, count = local_parameters(LLAMA, settings)
    assert count == pytest.approx(8.03e9, rel=1e-3)
    assert needed.weights == count * 4 / 32
    assert needed.optimizer == count * 8 / 32


def test_each_stage_of_zero_spreads_more() -> None:
    def total(zero: int) -> float:
        return memory(LLAMA, Settings(Mesh(shard=32), 1024, 1, 64, zero=zero), H100).total

    assert total(0) > total(1) > total(2)
    assert total(1) > total(3)


@pytest.mark.parametrize("axis", ["shard", "tensor", "pipeline", "context"])
def test_a_larger_axis_never_needs_more(axis: str) -> None:
    sizes = [1, 2, 4, 8]
    totals = []
    for size in sizes:
        settings = Settings(Mesh(**{axis: size}), 8192, 1, 64, zero=3, recompute="full")
        totals.append(memory(LLAMA, settings, H100, in_flight=size if axis == "pipeline" else 1.0).allocated)
    assert totals == sorted(totals, reverse=True)


def test_recomputation_needs_less_than_none() -> None:
    settings = Settings(Mesh(shard=32), 8192, 2, 64, zero=3)
    none, selective, full = (
        memory(LLAMA, settings.but(recompute=way), H100).total for way in ("none", "selective", "full")
    )
    assert none > selective > full


def test_a_pipeline_s_last_stage_holds_the_loss() -> None:
    """With a large vocabulary and one microbatch at work the last stage needs more than the first."""
    wide = replace(LLAMA, layers=4, vocab=512 * 1024)
    settings = Settings(Mesh(pipeline=4), 8192, 1, 4, zero=0, software=Software(loss="eager"))
    needed = memory(wide, settings, H100, in_flight=4)
    assert needed.logits == 14 * 8192 * 512 * 1024


def test_the_parts_are_the_whole() -> None:
    needed = memory(LLAMA, Settings(Mesh(shard=32), 8192, 1, 32), H100)
    parts = needed.weights + needed.gradients + needed.optimizer + needed.activations + needed.gathered + needed.logits
    assert needed.allocated == pytest.approx(parts)
    assert needed.total == pytest.approx(parts + needed.overhead)
    assert needed.fits == (needed.total <= 80 * 2**30)
