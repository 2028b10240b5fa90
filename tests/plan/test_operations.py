"""Operations against the counts of `flops`, against splits that must conserve work, and by hand."""

from dataclasses import replace

import pytest

from headway.plan.architecture import Architecture, ExpertShape, layer_kinds
from headway.plan.flops import flops_per_token, flops_per_token_full_attention
from headway.plan.operations import Operation, head_operations, layer_operations, optimizer_bytes
from headway.plan.settings import MicrobatchShape, Software

LLAMA = Architecture(32, 4096, 32, 8, 128, 14336, 128256, tied=False)
MIXTURE = Architecture(
    48, 2048, 32, 4, 128, 6144, 151936, tied=False, experts=ExpertShape(128, 8, 768, shared=1, dense_layers=2)
)
FUSED, UNFUSED = Software(), Software(attention="unfused")


def flops(arch: Architecture, shape: MicrobatchShape, software: Software) -> float:
    layers = sum(
        count * operation.flops
        for experts, count in layer_kinds(arch)
        for operation in layer_operations(arch, experts, shape, software)
    )
    return layers + sum(op.flops for part in head_operations(arch, shape, software) for op in part)


@pytest.mark.parametrize("arch", [LLAMA, MIXTURE], ids=["dense", "experts"])
def test_operations_sum_to_the_model_flops(arch: Architecture) -> None:
    shape = MicrobatchShape(sequences=3, seq=2048)
    assert flops(arch, shape, FUSED) == pytest.approx(flops_per_token(arch, 2048) * 3 * 2048)


def test_unfused_attention_computes_masked_pairs() -> None:
    shape = MicrobatchShape(sequences=2, seq=1024)
    assert flops(LLAMA, shape, UNFUSED) == pytest.approx(flops_per_token_full_attention(LLAMA, 1024) * 2 * 1024)


@pytest.mark.parametrize("split", [{"tensor": 4}, {"context": 2}, {"tensor": 2, "context": 4}], ids=str)
def test_splits_conserve_work(split: dict[str, int]) -> None:
    whole = MicrobatchShape(sequences=4, seq=4096)
    parts = split.get("tensor", 1) * split.get("context", 1)
    assert parts * flops(LLAMA, replace(whole, **split), FUSED) == pytest.approx(flops(LLAMA, whole, FUSED))


def test_expert_parallelism_splits_experts_and_tokens() -> None:
    """Eight devices hold sixteen experts each, and see as many tokens in all as if each held all experts."""
    alone, spread = (layer_operations(MIXTURE, True, MicrobatchShape(1, 4096, expert=e), FUSED) for e in (1, 8))

    def routed(part: tuple[Operation, ...]) -> list[Operation]:
        return [op for op in part if op.name == "experts.up" and op.phase == "forward"]

    (single,), (eight,) = routed(alone), routed(spread)
    assert (single.count, eight.count) == (128, 16)
    assert (single.m, eight.m) == (4096 * 8 / 128, 4096 * 8 / 16)
    assert single.flops == eight.flops


def test_three_gemms_of_a_matrix_by_hand() -> None:
    part = layer_operations(LLAMA, False, MicrobatchShape(1, 2048, tensor=2), FUSED)
    sizes = {op.phase: (op.m, op.n, op.k) for op in part if op.name == "mlp.down"}
    assert sizes == {
        "forward": (2048, 4096, 7168),
        "input_grad": (2048, 7168, 4096),
        "weight_grad": (4096, 7168, 2048),
    }
    forward = next(op for op in part if op.name == "mlp.down" and op.phase == "forward")
    assert forward.bytes == 2 * (2048 * 7168 + 7168 * 4096 + 2048 * 4096)


def test_low_precision_applies_to_linear_gemms_and_costs_casts() -> None:
    part = layer_operations(LLAMA, False, MicrobatchShape(1, 2048, precision="fp8"), FUSED)
    assert {op.precision for op in part if op.kind == "gemm"} == {"fp8"}
    assert {op.precision for op in part if op.kind == "attention"} == {"bf16"}
    assert sum(op.bytes for op in part if "quantize" in op.name) > 0
    _, head = head_operations(LLAMA, MicrobatchShape(1, 2048, precision="fp8"), FUSED)
    assert {op.precision for op in head if op.kind == "gemm"} == {"bf16"}


def test_fusion_moves_fewer_bytes() -> None:
    def moved(software: Software) -> float:
        part = layer_operations(LLAMA, False, MicrobatchShape(1, 2048), software)
        return sum(op.bytes for op in part if op.kind == "memory")

    eager = Software(fusion="eager", rotary_passes=24, separate_projections=True)
    assert moved(Software(fusion="compiled")) < moved(Software(fusion="fused")) < moved(eager)


def test_float32_moves_twice_the_bytes_of_bfloat16() -> None:
    def moved(precision: str) -> float:
        part = layer_operations(LLAMA, False, MicrobatchShape(1, 512, precision=precision), FUSED)
        return sum(op.bytes for op in part if op.kind in ("memory", "gemm"))

    assert moved("float32") == pytest.approx(2 * moved("bf16"))


def test_optimizer_bytes_by_hand() -> None:
    """AdamW on float32: weight, two moments and gradient read, the first three written, norm and clip over the
    gradient."""
    own = Software(weight_bytes=4, master_bytes=0, moment_bytes=4, gradient_bytes=4)
    assert optimizer_bytes(own) == (4 + 4 + 8 + 8) + 4 + (4 + 4 + 4)
    # beside bfloat16 weights: a master copy read and written, the weight written
    assert optimizer_bytes(Software(gradient_bytes=4)) == (4 + 4 + 2 + 8 + 8) + 4 + 12


def test_imbalance_adds_work_to_the_busiest_expert_device() -> None:
    even, skewed = (
        layer_operations(MIXTURE, True, MicrobatchShape(1, 4096, expert=8, imbalance=x), FUSED) for x in (1.0, 1.5)
    )

    def flops(part: tuple[Operation, ...], name: str) -> float:
        return sum(op.flops for op in part if op.name.startswith(name))

    assert flops(skewed, "experts") == pytest.approx(1.5 * flops(even, "experts"))
    assert flops(skewed, "attention") == flops(even, "attention")
