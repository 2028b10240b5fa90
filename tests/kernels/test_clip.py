"""The norm of many gradients, and their scaling, against sums in float64."""

import pytest
import torch
from torch import Tensor

from headway.kernels.clip import (
    BLOCK,
    LOOPS,
    clip_factor,
    gradient_norm,
    map_of,
    reference,
    reference_scale,
    scale,
    sum_of_squares,
    table_of,
)
from thinned import thinned

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-6, torch.bfloat16: 1e-6}
"""Of the norm, as a share of it: numbers of all types are added up in float32."""
SHAPES = [(1,), (7,), (129, 3), (3, 5, 16), (1000,), (0,), (4, 0), (2 * BLOCK * LOOPS + 16,), (BLOCK,)]


def some(dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def norm64(tensors: list[Tensor]) -> float:
    return float(sum(tensor.double().square().sum() for tensor in tensors).sqrt())


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_norm_is_that_of_float64(dtype: torch.dtype) -> None:
    tensors = some(dtype)
    norm = gradient_norm(table_of(tensors))
    assert (norm.dtype, norm.shape) == (torch.float32, ())
    assert float(norm) == pytest.approx(norm64(tensors), rel=TOLERANCE[dtype])
    # some CPUs add up one after the other there
    assert float(reference(tensors)) == pytest.approx(norm64(tensors), rel=2e-5)


def test_dtypes_and_strides_may_be_mixed() -> None:
    tensors = some(torch.float32) + some(torch.bfloat16, 1) + some(torch.float16, 2)
    tensors.append(torch.randn(33, 17, generator=torch.Generator().manual_seed(3)).t())
    tensors.append(torch.randn(101, generator=torch.Generator().manual_seed(4))[1:])  # no multiple of 16 bytes
    assert float(gradient_norm(table_of(tensors))) == pytest.approx(norm64(tensors), rel=1e-6)


def test_norm_of_no_tensors_is_zero() -> None:
    assert float(gradient_norm(table_of([]))) == 0.0
    assert float(gradient_norm(table_of([torch.empty(0, 3)]))) == 0.0
    assert float(reference([])) == 0.0


@pytest.mark.parametrize(
    ("wrong", "place"), thinned([torch.nan, torch.inf, -torch.inf], [0, 5000, 2 * BLOCK * LOOPS + 15])
)
def test_non_finite_values_propagate_to_the_norm(wrong: float, place: int) -> None:
    tensors = some(torch.float32)
    tensors[7][place] = wrong
    norm = gradient_norm(table_of(tensors))
    assert not norm.isfinite()
    assert norm.isnan() == (wrong != wrong)


def test_the_norm_of_multiples_is_the_multiple() -> None:
    """By powers of two, to the bit."""
    tensors = some(torch.float32)
    norm = gradient_norm(table_of(tensors))
    assert torch.equal(gradient_norm(table_of([4 * tensor for tensor in tensors])), 4 * norm)


def test_sums_over_workers_add_up() -> None:
    tensors = some(torch.float32)
    apart = sum_of_squares(table_of(tensors[:4])) + sum_of_squares(table_of(tensors[4:]))
    assert float(apart) == pytest.approx(float(sum_of_squares(table_of(tensors))), rel=1e-12)


@pytest.mark.parametrize(("dtype", "clip"), thinned(TOLERANCE, [0.5, 1e9]))
def test_scaling_is_that_of_torch(dtype: torch.dtype, clip: float) -> None:
    tensors, others = some(dtype), some(dtype)
    table = table_of(tensors)
    norm = gradient_norm(table)
    parameters = [torch.nn.Parameter(other) for other in others]
    for parameter, other in zip(parameters, others, strict=True):
        parameter.grad = other.clone()
    torch.nn.utils.clip_grads_with_norm_(parameters, clip, norm)
    factor = clip_factor(norm, clip)
    assert (float(factor) == 1.0) == (clip > 1)
    reference_scale(others, factor)
    scale(table, factor)
    for scaled, plain, parameter in zip(tensors, others, parameters, strict=True):
        # the interpreter cuts bfloat16 off where a GPU rounds it to the nearest
        torch.testing.assert_close(scaled, plain, rtol=torch.finfo(dtype).eps, atol=0)
        torch.testing.assert_close(scaled, parameter.grad, rtol=2 * torch.finfo(dtype).eps, atol=0)


def test_nan_factor_propagates() -> None:
    tensors = some(torch.float32)
    scale(table_of(tensors), clip_factor(torch.tensor(torch.nan), 1.0))
    assert all(bool(tensor.isnan().all()) for tensor in tensors)


def test_a_table_is_kept_while_tensors_stay() -> None:
    tensors = some(torch.float32)
    table = table_of(tensors)
    assert table_of(tensors, table) is table
    assert table_of([tensors[0].clone(), *tensors[1:]], table) is not table


def test_pieces_are_counted_from_zero_in_each_tensor() -> None:
    assert map_of([2, 1, 3]).tolist() == [[0, 0], [0, 1], [1, 0], [2, 0], [2, 1], [2, 2]]


def test_unsupported_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match="expected dense tensors"):
        table_of([torch.zeros(4, 4)[:, :2]])
    with pytest.raises(ValueError, match="float32, bfloat16 or float16"):
        gradient_norm(table_of([torch.zeros(3, dtype=torch.float64)]))
    with pytest.raises(ValueError, match="one float32 factor"):
        scale(table_of([torch.zeros(3)]), torch.zeros((), dtype=torch.float64))


@pytest.mark.gpu
def test_on_a_gpu_it_is_the_same_twice_and_near_float64() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(4096, 14336), (14336, 4096), (4096,), (128256, 2048), (1001, 37)]
    for dtype in (torch.bfloat16, torch.float32):
        tensors = [torch.randn(shape, generator=generator, device="cuda").to(dtype) for shape in shapes]
        table = table_of(tensors)
        norm = gradient_norm(table)
        assert torch.equal(norm, gradient_norm(table))
        assert float(norm) == pytest.approx(norm64(tensors), rel=1e-6)
        factor = clip_factor(norm, 1.0)
        wanted = [tensor.float() * factor for tensor in tensors]
        scale(table, factor)
        for tensor, other in zip(tensors, wanted, strict=True):
            assert torch.equal(tensor, other.to(dtype))


@pytest.mark.gpu
def test_on_a_gpu_the_host_never_waits() -> None:
    tensors = [torch.randn(1000, 128, device="cuda") for _ in range(3)]
    table = table_of(tensors)
    scale(table, clip_factor(gradient_norm(table), 1.0))
    torch.cuda.set_sync_debug_mode("error")
    try:
        table = table_of([tensor.clone() for tensor in tensors])
        scale(table, clip_factor(gradient_norm(table), 1.0))
    finally:
        torch.cuda.set_sync_debug_mode("default")
