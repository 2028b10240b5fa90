"""Products of exact mode on GPUs: the bits of `sequential_linear.py`, by cuBLAS where it has them.

A sum over K in order has the same bits for every number of rows and every tiling. cuBLAS adds up so, too, where rows
are many, and splits sums up where they are few. So of many rows, as in training, the largest multiple of `WHOLE` goes
to cuBLAS, if it agrees for this shape and number: that is tried when both are seen first, with noise, of which another
order of sums changes some elements in a thousand. All other rows go to the sequential kernel.
"""

import logging
from functools import cache

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from headway.kernels import sequential_linear
from headway.kernels.sequential_linear import DEPTHS, MOST_ROWS, LinearTiling

LOG = logging.getLogger(__name__)
WHOLE = 1024
"""Rows from which cuBLAS has been found to add up in order."""
MULTIPLE = DEPTHS[-1]
"""Inputs of a matrix are a multiple of this."""
_verdicts: dict[tuple[int, int, int, bool, torch.dtype, torch.dtype], bool] = {}
"""Whether cuBLAS agrees: by rows, outputs, inputs, bias, the dtype of factors and that of the result."""


def product(x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Return x @ weight.T + bias, added up in float32 and rounded once, without gradients; by default in x's dtype."""
    x_TD, weight_OD, dtype = _even(x_TD), weight_OD.contiguous(), dtype or x_TD.dtype
    rows = len(x_TD) // WHOLE * WHOLE
    if rows == 0 or not library_agrees(x_TD, weight_OD, bias_O is not None, dtype, rows):
        return sequential(x_TD, weight_OD, bias_O, dtype)
    if rows == len(x_TD):
        return _library(x_TD, weight_OD, bias_O, dtype)
    y_TO = torch.empty(len(x_TD), len(weight_OD), dtype=dtype, device=x_TD.device)
    _library(x_TD[:rows], weight_OD, bias_O, dtype, out=y_TO[:rows])
    sequential(x_TD[rows:], weight_OD, bias_O, dtype, out=y_TO[rows:])
    return y_TO


def _even(x_TD: Tensor) -> Tensor:
    """Return rows that lie next to each other and aligned, by which cuBLAS chooses, too."""
    aligned = x_TD.is_contiguous() and x_TD.data_ptr() % 16 == 0
    return x_TD if aligned else x_TD.clone(memory_format=torch.contiguous_format)


def sequential(
    x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """The same by the kernel that adds up in order."""
    biases = None if bias_O is None else (bias_O.contiguous(),)
    tiling = many_rows(weight_OD.shape[1]) if len(x_TD) > MOST_ROWS else None
    return sequential_linear.linear(x_TD, (weight_OD,), biases, dtype=dtype, tiling=tiling, out=out)


def many_rows(inputs: int) -> LinearTiling:
    """Return the tiling of more rows than decoding has."""
    return LinearTiling(128, 128, next(depth for depth in DEPTHS if depth <= 64 and inputs % depth == 0), 8, 3)


def _library(
    x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    with torch.autocast(x_TD.device.type, enabled=False):
        if bias_O is None and dtype == x_TD.dtype:
            return torch.mm(x_TD, weight_OD.t(), out=out)
        if bias_O is not None:
            y_TO = torch.nn.functional.linear(x_TD, weight_OD, bias_O)
        else:
            y_TO = torch.mm(x_TD, weight_OD.t(), out_dtype=dtype)
        return y_TO if out is None else out.copy_(y_TO)


def library_agrees(x_TD: Tensor, weight_OD: Tensor, biased: bool, dtype: torch.dtype, rows: int) -> bool:
    """Whether cuBLAS has the sequential kernel's bits for so many rows with matrices of this shape, by trying it."""
    if not x_TD.is_cuda or weight_OD.data_ptr() % 16 or (biased and dtype != x_TD.dtype):
        return False
    outputs, inputs = weight_OD.shape
    key = rows, outputs, inputs, biased, x_TD.dtype, dtype
    if key not in _verdicts:
        if torch.cuda.is_current_stream_capturing():  # the host could not read the verdict
            return False
        _verdicts[key] = _compared(key, x_TD.device)
        if not _verdicts[key]:
            _tell(outputs, inputs, biased, rows)
    return _verdicts[key]


def _compared(key: tuple[int, int, int, bool, torch.dtype, torch.dtype], device: torch.device) -> bool:
    rows, outputs, inputs, biased, taken, dtype = key
    # Recomputation stores the products of a pass by their order, and this one is made in the first pass only.
    with _disable_current_modes(), torch.random.fork_rng(devices=[device]), torch.no_grad():
        torch.manual_seed(0)
        x_TD, weight_OD = (torch.randn(n, inputs, dtype=taken, device=device) for n in (rows, outputs))
        weight_OD *= inputs**-0.5
        bias_O = torch.randn(outputs, dtype=taken, device=device) if biased else None
        own_TO = sequential(x_TD, weight_OD, bias_O, dtype)
        return torch.equal(_library(x_TD, weight_OD, bias_O, dtype), own_TO)


@cache
def _tell(outputs: int, inputs: int, biased: bool, rows: int) -> None:
    LOG.warning(
        "exact mode: cuBLAS adds up a product with a matrix of %d x %d%s in another order for %d rows; "
        "Headway's own kernel does it",
        outputs, inputs, " and a bias" if biased else "", rows,
    )  # fmt: skip


def verdicts() -> list[tuple[str, bool]]:
    """Return what was tried so far, as a name of each, and whether cuBLAS agreed."""
    return [
        (f"{rows} x {inputs} x {outputs}{' + bias' if biased else ''} -> {str(dtype).removeprefix('torch.')}", agrees)
        for (rows, outputs, inputs, biased, _, dtype), agrees in sorted(_verdicts.items(), key=str)
    ]


@cache
def grouped_agrees(experts: int, outputs: int, inputs: int, device: torch.device) -> bool:
    """Whether the grouped product over experts has the sequential kernel's bits, by trying few and many rows."""
    with torch.random.fork_rng(devices=[device]), torch.no_grad():
        torch.manual_seed(0)
        weights_EOD = torch.randn(experts, outputs, inputs, dtype=torch.bfloat16, device=device)
        for rows in (1, 7, 64, 2048):
            x_ND = torch.randn(rows, inputs, dtype=torch.bfloat16, device=device)
            of_N = torch.randint(experts, (rows,), device=device).sort().values
            ends_E = torch.searchsorted(of_N, torch.arange(experts, device=device), right=True, out_int32=True)
            y_NO = torch.nn.functional.grouped_mm(x_ND, weights_EOD.transpose(1, 2), offs=ends_E)
            first = 0
            for expert, end in enumerate(ends_E.tolist()):
                own = sequential(x_ND[first:end], weights_EOD[expert], None, torch.bfloat16)
                if not torch.equal(own, y_NO[first:end]):
                    return False
                first = end
    return True
