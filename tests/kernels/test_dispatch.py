"""The table of kernels: what it says, and that what runs by it is what plain PyTorch would have made."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from headway.kernels import dispatch as table
from headway.kernels.dispatch import OPERATIONS, attention, experts, fused, make_plain, rows
from headway.models import empty_decoder, init_weights
from headway.recipe import Model

HALF, FULL = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(table, "_latest", lambda: True)
    yield
    make_plain(())


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the CPU count as a device of Triton's, which its interpreter makes it."""
    monkeypatch.setattr(table, "devices", ("cuda", "cpu"))
    monkeypatch.setattr(table, "LEAST_ELEMENTS", 0)


@pytest.mark.parametrize(
    ("device", "dtype", "asked", "kernel"),
    [
        ("cpu", HALF, "", "sdpa"),
        ("cuda", HALF, "", "cudnn"),
        ("cuda", FULL, "", "sdpa"),
        ("cuda", HALF, "exact", "sdpa"),
        ("cuda", HALF, "masked", "flex"),
        ("cuda", FULL, "masked", "flex"),
        ("cuda", HALF, "capped", "flex"),
        ("cuda", HALF, "sinks", "flex"),
        ("cuda", HALF, "masked exact", "flex"),
        ("cpu", FULL, "masked", "masked"),
        ("cpu", FULL, "capped", "plain"),
        ("cpu", FULL, "masked sinks", "plain"),
    ],
)
def test_attention(device: str, dtype: torch.dtype, asked: str, kernel: str) -> None:
    flags = {name: name in asked.split() for name in ("masked", "capped", "sinks", "exact")}
    assert attention(device, dtype, 64, **flags).kernel == kernel


def test_a_recipe_switches_attention_off() -> None:
    make_plain(["attention"])
    assert attention("cuda", HALF, 64, masked=False, capped=False, sinks=False, exact=False).kernel == "sdpa"
    assert attention("cuda", HALF, 64, masked=True, capped=False, sinks=False, exact=False).kernel == "masked"
    assert attention("cuda", HALF, 64, masked=True, capped=True, sinks=False, exact=False).kernel == "plain"


def test_before_hopper_flash_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_latest", lambda: False)
    assert attention("cuda", HALF, 64, masked=False, capped=False, sinks=False, exact=False).kernel == "sdpa"


@pytest.mark.parametrize(
    ("device", "dtype", "dim", "hidden", "kernel"),
    [
        ("cpu", HALF, 8, 8, "loop"),
        ("cuda", FULL, 8, 8, "loop"),
        ("cuda", HALF, 64, 128, "grouped"),
        ("cuda", HALF, 64, 100, "loop"),
        ("cuda", HALF, 12, 128, "loop"),
    ],
)
def test_experts(device: str, dtype: torch.dtype, dim: int, hidden: int, kernel: str) -> None:
    assert experts(device, dtype, dim, hidden).kernel == kernel


@pytest.mark.parametrize(
    ("operation", "device", "compiled", "kernel"),
    [
        ("loss", "cuda", True, "triton"),
        ("loss", "cpu", False, "pytorch"),
        ("rope", "cuda", False, "triton"),
        ("rope", "cuda", True, "compiler"),
        ("gated", "cuda", True, "compiler"),
        ("rms_norm", "cuda", False, "triton"),
        ("rms_norm", "cuda", True, "compiler"),
        ("adamw", "cuda", False, "triton"),
        ("norm", "cuda", False, "triton"),
    ],
)
def test_what_is_triton_s(operation: Any, device: str, compiled: bool, kernel: str) -> None:
    assert fused(operation, device, HALF, compiled=compiled).kernel == kernel
    make_plain([operation])
    assert fused(operation, device, HALF, compiled=compiled).kernel == "pytorch"


def test_small_tensors_and_small_heads_are_pytorch_s() -> None:
    assert fused("gated", "cuda", HALF, elements=1000).kernel == "pytorch"
    assert fused("loss", "cuda", HALF, elements=1000).kernel == "triton"
    assert attention("cuda", HALF, 8, masked=True, capped=False, sinks=False, exact=False).kernel == "masked"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_operation_has_a_row_with_a_reason(device: str) -> None:
    table = rows(device, HALF, compiled=False, exact=False)
    assert {row.operation for row in table} == set(OPERATIONS)
    assert all(row.choice.why for row in table)


# -- what runs by it, in Triton's interpreter


@pytest.mark.usefixtures("interpreted")
def test_a_model_is_what_plain_pytorch_makes_of_it() -> None:
    """Loss and gradients of a small Llama, with rotary positions, gates and loss by kernels, and without."""
    model = Model(layers=2, dim=32, heads=2, kv_heads=1, vocab_size=97)
    tokens = torch.randint(97, (2, 9), generator=torch.Generator().manual_seed(1))
    results = []
    for plain in ((), OPERATIONS):
        make_plain(plain)
        decoder = empty_decoder(model)
        init_weights(decoder, 0)
        loss = decoder(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in decoder.parameters())])
    assert not torch.equal(results[0][1], results[1][1])  # or nothing else ran
    for actual, other in zip(*results, strict=True):
        assert (actual - other).norm() <= 1e-5 * other.norm()
