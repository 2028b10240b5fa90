"""All weights cast together: in Triton's interpreter, against casts of each group by itself."""

import math

import pytest
import torch
from torch import Tensor

from headway.kernels.fp8 import E4M3, cast, inverse_of
from headway.kernels.fp8_weights import CastGroup, CastTable, cast_all, table_of

SHAPES = (((32, 48), (16, 48)), ((144, 272),), ((16, 16), (16, 16), (32, 16)))
"""Of the weights of each group."""


def rounded(x: Tensor) -> Tensor:
    """Numbers of bfloat16: the interpreter cuts off what it should round."""
    return x if x.is_cuda else x.bfloat16().to(x.dtype)


def drawn(dtype: torch.dtype, device: str = "cpu") -> list[CastGroup]:
    generator = torch.Generator().manual_seed(0)
    groups = []
    for shapes in SHAPES:
        outputs, inputs = sum(rows for rows, _ in shapes), shapes[0][1]
        weights = tuple(rounded(torch.randn(shape, generator=generator)).to(device, dtype) for shape in shapes)
        codes = torch.empty(outputs, inputs, dtype=E4M3, device=device)
        codes_t = torch.empty(inputs, outputs, dtype=E4M3, device=device)
        groups.append(CastGroup(weights, codes, codes_t))
    return groups


def check(groups: list[CastGroup], scales: Tensor, inverses: Tensor) -> None:
    for (weights, codes, codes_t), scale, inverse in zip(groups, scales, inverses, strict=True):
        right = cast(torch.cat(weights).bfloat16())
        torch.testing.assert_close(scale.reshape(1, 1), right.scale, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(inverse.reshape(1, 1), inverse_of(right.scale), rtol=0, atol=0, equal_nan=True)
        for made, wanted in ((codes, right.codes), (codes_t, right.codes_t)):
            torch.testing.assert_close(made.float(), wanted.float(), rtol=0, atol=0, equal_nan=True)


def run(groups: list[CastGroup], scales: Tensor, inverses: Tensor, before: CastTable | None = None) -> CastTable:
    table = table_of(groups, before)
    cast_all(table, scales, inverses)
    check(groups, scales, inverses)
    return table


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_codes_do_not_depend_on_the_last_scales(dtype: torch.dtype, device: str) -> None:
    groups = drawn(dtype, device)
    scales, inverses = torch.ones(3, 1, 4, device=device)[..., :1], torch.ones(3, device=device)
    table = run(groups, scales, inverses)
    for factor in (1, 1.01, 100, 1 / 300):  # scales stay, or change
        for weight in groups[1].weights:
            weight.copy_(rounded(weight * factor))
        assert run(groups, scales, inverses, table) is table
    groups[0].weights[1][3, 5] = math.nan
    cast_all(table, scales, inverses)
    assert scales[:, 0, 0].isnan().tolist() == [True, False, False]


def test_only_groups_whose_scale_changes_are_cast_again() -> None:
    groups = drawn(torch.bfloat16)
    scales, inverses = torch.ones(3, 1, 1), torch.ones(3)
    table = run(groups, scales, inverses)
    assert table.launches[0].changed.tolist() == [1, 1, 1]
    for weight in groups[2].weights:
        weight.mul_(4)
    run(groups, scales, inverses, table)
    assert table.launches[0].changed.tolist() == [0, 0, 1]


def test_a_table_is_made_anew_where_weights_have_moved_or_differ_in_dtype() -> None:
    groups, others = drawn(torch.bfloat16), drawn(torch.float32)
    scales, inverses = torch.ones(3, 1, 1), torch.ones(3)
    table = run(groups, scales, inverses)
    mixed = [groups[0], others[1], groups[2]]
    found = run(mixed, scales, inverses, table)
    assert found is not table
    assert [launch.dtype for launch in found.launches] == [torch.bfloat16, torch.float32]
