"""Memory against a published formula, against what a GPU allocated, and as properties."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from headway.hardware import parse_on
from headway.plan.architecture import Architecture
from headway.plan.costs import make_cost_model
from headway.plan.memory import activation_bytes, local_parameters, memory
from headway.plan.settings import Mesh, Settings, Software
from headway.plan.step import step
from headway.plan.trainer import headway_software

GPT = Architecture(
    96, 12288, 96, 96, 128, 49152, 51200, gated=False, rotary=False, positions=2048, layer_norm=True, qkv_bias=True,
    output_bias=True, mlp_bias=True,
)  # fmt: skip
LLAMA = Architecture(32, 4096, 32, 8, 128, 14336, 128256, tied=False)
MEGATRON = Software(fusion="fused", attention="unfused", dropout=True, sequence_parallel=True)
H100 = parse_on("h100x8x4")


@pytest.mark.parametrize("tensor", [1, 8])
def test_activations_match_the_published_formula(tensor: int) -> None:
    """Korthikanti et al. 2022, table 2: sbh (34 + 5 a s / h) / t bytes per layer with sequence parallelism."""
    settings = Settings(Mesh(tensor=tensor), seq=2048, microbatch=1, batch=1, software=MEGATRON)
    whole, kept = activation_bytes(GPT, False, settings.shape, settings)
    assert whole == kept == pytest.approx(2048 * 12288 * (34 + 5 * 96 * 2048 / 12288) / tensor, rel=1e-3)


def test_attention_recomputation_drops_its_term_and_full_keeps_inputs() -> None:
    settings = Settings(Mesh(), seq=2048, microbatch=1, batch=1, software=MEGATRON)
    _, selective = activation_bytes(GPT, False, settings.shape, replace(settings, recompute="attention"))
    assert selective == pytest.approx(34 * 2048 * 12288, rel=1e-3)
    _, full = activation_bytes(GPT, False, settings.shape, replace(settings, recompute="full"))
    assert full == 2 * 2048 * 12288


def test_states_by_hand() -> None:
    """ZeRO 3 over 32 devices: sixteen bytes per parameter are sharded, except gathered weights."""
    software = Software(weight_bytes=4, master_bytes=0, moment_bytes=4, gradient_bytes=4)
    settings = Settings(Mesh(shard=32), seq=1024, microbatch=1, batch=32, zero=3, software=software)
    needed = memory(LLAMA, settings, H100)
    _, count = local_parameters(LLAMA, settings)
    assert count == pytest.approx(8.03e9, rel=1e-3)
    assert needed.weights == count * 4 / 32
    assert needed.optimizer == count * 8 / 32


def test_each_zero_stage_shards_more() -> None:
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
    policies = ("none", "selective", "except-attention", "full")
    totals = [memory(LLAMA, replace(settings, recompute=policy), H100).total for policy in policies]
    assert totals == sorted(set(totals), reverse=True)


def test_a_pipeline_s_last_stage_holds_the_loss() -> None:
    """With a large vocabulary and one microbatch in flight the last stage needs more than the first."""
    wide = replace(LLAMA, layers=4, vocab=512 * 1024)
    settings = Settings(Mesh(pipeline=4), 8192, 1, 4, zero=0, software=Software(loss="eager"))
    needed = memory(wide, settings, H100, in_flight=4)
    assert needed.logits == 14 * 8192 * 512 * 1024


def test_parts_sum_to_the_total() -> None:
    needed = memory(LLAMA, Settings(Mesh(shard=32), 8192, 1, 32), H100)
    parts = needed.weights + needed.gradients + needed.optimizer + needed.activations + needed.gathered + needed.logits
    assert needed.allocated == pytest.approx(parts)
    assert needed.total == pytest.approx(parts + needed.overhead)
    assert needed.fits == (needed.total <= 80 * 2**30)


# -- our own trainer


def headway_settings(mesh: Mesh, microbatch: int, batch: int, *, offloads: bool = False, **changes: Any) -> Settings:
    software = headway_software(compiled=False, autocasts=True, older=False, offloads=offloads).on_mesh(mesh, passes=2)
    settings = Settings(mesh, 2048, microbatch, batch, 3 if mesh.shard > 1 else 0, software=software)
    return replace(settings, **changes)


PARAMETERS = 8_030_261_248
"""Of the published model."""


def test_gradients_are_held_unsharded_until_the_last_microbatch() -> None:
    """Four bytes per parameter on every device with several microbatches; with one, only its shard."""
    single = memory(LLAMA, headway_settings(Mesh(shard=32), 4, 128), H100)
    several = memory(LLAMA, headway_settings(Mesh(shard=32), 1, 128), H100)
    assert several.gradients == 4 * PARAMETERS
    assert single.gradients in (0.0, 4 * PARAMETERS / 32)
    assert (single.weights, single.optimizer) == (4 * PARAMETERS / 32, 8 * PARAMETERS / 32)


def test_offloaded_moments_trade_device_memory_for_transfer_time() -> None:
    on_device, on_host = (headway_settings(Mesh(shard=32), 4, 128, offloads=offloads) for offloads in (False, True))
    assert memory(LLAMA, on_host, H100).optimizer == 0.0
    saved = memory(LLAMA, on_device, H100).allocated - memory(LLAMA, on_host, H100).allocated
    assert saved == pytest.approx(8 * PARAMETERS / 32)
    costs = make_cost_model(H100)
    longer = step(LLAMA, on_host, costs).accounts["optimizer"] - step(LLAMA, on_device, costs).accounts["optimizer"]
    # eight bytes per parameter to the device and back, over PCIe 5.0 x16 at 55 of its 64 GB/s
    assert longer == pytest.approx(2 * 8 * PARAMETERS / 32 / 55e9)


def test_update_in_backward_holds_gradients_of_one_block() -> None:
    """And of parameters outside of blocks: embedding, head and final norm."""
    default = headway_settings(Mesh(), 1, 1, recompute="full")
    early = replace(default, software=replace(default.software, updates_in_backward=True))
    block = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    assert memory(LLAMA, default, H100).gradients == 4 * PARAMETERS
    peak = memory(LLAMA, early, H100)
    assert peak.gradients in (0.0, 4 * (PARAMETERS - 31 * block))
    # The peak moves to the end of the forward pass, with weights in two bytes and logits in four.
    whole = 4 * PARAMETERS + 8 * PARAMETERS + 2 * PARAMETERS + 4 * 2048 * 128256
    assert peak.allocated == pytest.approx(whole, rel=0.1)
    assert peak.allocated < memory(LLAMA, default, H100).allocated


def test_gathered_inputs_are_kept_under_tensor_parallelism() -> None:
    """The inputs of attention and feed-forward per layer: two bytes per element, on every device of the axis."""
    settings = headway_settings(Mesh(shard=4, tensor=8), 1, 16)
    again = replace(settings, software=replace(settings.software, regathers=True))
    kept, _ = activation_bytes(LLAMA, False, settings.shape, settings)
    shared, _ = activation_bytes(LLAMA, False, again.shape, again)
    assert kept - shared == pytest.approx(2 * 2 * 2048 * 4096 * (1 - 1 / 8))


def test_selective_recomputation_keeps_gemm_and_attention_outputs() -> None:
    """By hand, for one sequence: the input, queries, keys, values, attention, and the outputs of five more GEMMs."""
    settings = headway_settings(Mesh(shard=32), 1, 32, recompute="selective")
    _, kept = activation_bytes(LLAMA, False, settings.shape, settings)
    widths = 4096 + (4096 + 2 * 1024) + 4096 + 4096 + 2 * 14336 + 4096
    assert kept == 2 * 2048 * widths


def test_recomputing_all_but_attention_keeps_its_output_and_sums() -> None:
    """By hand, for one sequence: the input, attention, and 32 numbers in float32."""
    settings = headway_settings(Mesh(shard=32), 1, 32, recompute="except-attention")
    _, kept = activation_bytes(LLAMA, False, settings.shape, settings)
    assert kept == 2048 * (2 * (4096 + 4096) + 4 * 32)


@pytest.mark.parametrize("kind", ["selective", "except-attention", "full"])
def test_each_recomputed_layer_saves_the_same_memory(kind: str) -> None:
    needs = [
        memory(
            LLAMA, headway_settings(Mesh(shard=32), 1, 32, recompute=kind, recompute_blocks=blocks), H100
        ).activations
        for blocks in range(1, 33)
    ]
    assert needs[-1] == memory(LLAMA, headway_settings(Mesh(shard=32), 1, 32, recompute=kind), H100).activations
    whole, policy = activation_bytes(
        LLAMA, False, headway_settings(Mesh(), 1, 1).shape, headway_settings(Mesh(shard=32), 1, 32, recompute=kind)
    )
    saved = [before - after for before, after in pairwise(needs)]
    assert saved[:20] == pytest.approx([whole - policy] * 20)
    assert sorted(needs, reverse=True) == needs


def test_peak_is_that_of_the_pipeline_rank_that_needs_most() -> None:
    """The second of four has more blocks than the first: it holds three microbatches of them, the first four of its."""
    settings = headway_settings(Mesh(pipeline=4), 1, 16, stages=(2, 14, 8, 8))
    assert memory(LLAMA, settings, parse_on("h100x4")).rank == 1
    assert memory(LLAMA, replace(settings, stages=(14, 2, 8, 8)), parse_on("h100x4")).rank == 0


def test_replicas_keep_a_cast_copy_of_weights() -> None:
    """FSDP casts a replica's weights for GEMMs and keeps them; autocast on one device casts at each use."""
    assert memory(LLAMA, headway_settings(Mesh(replicate=32), 1, 32), H100).gathered == 2 * PARAMETERS


def test_gradients_reduced_per_microbatch_are_held_sharded() -> None:
    """Llama 3 8B over eight devices: 8.03e9 float32 gradients are held, or an eighth of them."""
    software = headway_software(compiled=False, autocasts=True, older=False)
    held = Settings(Mesh(shard=8), 8192, 1, 64, software=software)
    cluster = parse_on("h100x8")
    whole, sharded = (memory(LLAMA, replace(held, reduces_each=each), cluster).gradients for each in (False, True))
    assert whole == pytest.approx(4 * 8.030e9, rel=1e-3)
    assert sharded == pytest.approx(whole / 8)
