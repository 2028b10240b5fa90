"""The symmetric products of a Newton-Schulz step against float64, and their mirror images against each other."""

import pytest
import torch
from torch import Tensor

from headway.kernels.newton_schulz import polynomial, reference_polynomial, reference_symmetric, step, symmetric, worth
from thinned import thinned

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Of the largest element: results are rounded to their type once, after a sum in float32."""
QUINTIC = (3.4445, -4.7750, 2.0315)
SHAPES = [(1, 1), (1, 7), (7, 1), (129, 5), (16, 1000), (130, 129), (2, 3, 17, 40), (144, 64), (300, 16)]


def matrices(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator(device).manual_seed(0), device=device)
    return (drawn / torch.linalg.matrix_norm(drawn, keepdim=True)).to(dtype)


def assert_near(actual: Tensor, truth: Tensor) -> None:
    atol = TOLERANCE[actual.dtype] * float(truth.abs().max()) if truth.numel() else 0.0
    torch.testing.assert_close(actual.double(), truth, rtol=0, atol=atol)


@pytest.mark.parametrize(("shape", "dtype"), thinned(SHAPES, [torch.float32, torch.float16]))
def test_products_are_those_of_float64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = matrices(shape, dtype)
    wide = x.double()
    square = symmetric(x)
    assert_near(square, wide @ wide.mT)
    assert_near(reference_symmetric(x), wide @ wide.mT)
    wide = square.double()
    truth = -4.775 * wide + 2.0315 * (wide @ wide)
    assert_near(polynomial(square, -4.775, 2.0315), truth)
    assert_near(reference_polynomial(square, -4.775, 2.0315), truth)


def test_mirror_images_are_the_same_bits() -> None:
    square = symmetric(matrices((300, 70), torch.float32))
    assert torch.equal(square, square.mT)
    result = polynomial(square, 0.5, 2.0)
    assert torch.equal(result, result.mT)


def test_rows_that_do_not_follow_each_other_may_come() -> None:
    x = matrices((40, 140), torch.float32)
    assert_near(symmetric(x.mT), x.double().mT @ x.double())
    assert_near(symmetric(x[:, :100]), x[:, :100].double() @ x[:, :100].double().mT)
    assert_near(symmetric(x[3:, 5:]), x[3:, 5:].double() @ x[3:, 5:].double().mT)


def test_no_matrices_have_no_products() -> None:
    assert symmetric(torch.zeros(0, 3, 4)).shape == (0, 3, 3)
    assert symmetric(torch.zeros(0, 4)).shape == (0, 0)
    assert torch.equal(symmetric(torch.zeros(3, 0)), torch.zeros(3, 3))


@pytest.mark.parametrize("shape", [(5, 9), (2, 16, 16)])
def test_a_step_moves_singular_values_by_the_quintic(shape: tuple[int, ...]) -> None:
    x = matrices(shape, torch.float32)
    a, b, c = QUINTIC
    after = torch.linalg.svdvals(step(x, a, b, c).double())
    before = torch.linalg.svdvals(x.double())
    wanted = (a * before + b * before**3 + c * before**5).abs().sort(descending=True).values
    torch.testing.assert_close(after, wanted, rtol=0, atol=1e-5)


def test_half_of_the_tiles_must_be_enough() -> None:
    def of(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(1, dtype=dtype).expand(shape)

    assert worth(of(2048, 8192))
    assert worth(of(64, 256, 1024))
    assert not worth(of(1024, 4096))
    assert not worth(of(2048, 8191))
    assert not worth(of(2048, 8192, dtype=torch.float32))


def test_unsupported_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match="floating-point"):
        symmetric(torch.zeros(3, dtype=torch.float32))
    with pytest.raises(ValueError, match="floating-point"):
        symmetric(torch.zeros(3, 3, dtype=torch.int32))
    with pytest.raises(ValueError, match="symmetric"):
        polynomial(torch.zeros(3, 4), 1.0, 1.0)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_the_operation_is_well_made(share: float) -> None:
    """The other checks trace it, which the interpreter is not for."""
    checks = ("test_schema", "test_autograd_registration")
    operation = torch.ops.headway.symmetric_product.default
    torch.library.opcheck(operation, (torch.randn(2, 20, 20), 2.0, share), test_utils=checks)


@pytest.mark.gpu
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_on_a_gpu_the_operation_is_well_made(share: float) -> None:
    x = torch.randn(2, 64, 64, device="cuda", dtype=torch.bfloat16)
    torch.library.opcheck(torch.ops.headway.symmetric_product.default, (x, 2.0, share))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(2048, 8192), (4096, 14336), (4096, 4096), (16, 768, 2048), (2049, 1001), (1, 7)])
def test_on_a_gpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = matrices(shape, dtype, "cuda")
    square = symmetric(x)
    assert_near(square, x.double() @ x.double().mT)
    assert torch.equal(square, square.mT)
    wide = square.double()
    result = polynomial(square, QUINTIC[1], QUINTIC[2])
    assert_near(result, QUINTIC[1] * wide + QUINTIC[2] * (wide @ wide))
    assert torch.equal(result, result.mT)
    assert torch.equal(result, polynomial(symmetric(x), QUINTIC[1], QUINTIC[2]))


@pytest.mark.gpu
def test_on_a_gpu_compiled_graphs_take_it() -> None:
    x = matrices((2048, 4096), torch.bfloat16, "cuda")
    compiled = torch.compile(lambda x: step(x, *QUINTIC), fullgraph=True)(x)
    assert_near(compiled, step(x, *QUINTIC).double())
