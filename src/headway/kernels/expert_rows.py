"""What a mixture of experts does between its grouped GEMMs: rows out, weighted SwiGLU, rows back.

    spread      rows[back[t, x]] = x[t]                              a row for each expert that a token chose
    activation  h[n] = w[n] * silu(gate[n]) * up[n]                  w[n]: the weight of row n's token and expert
    combined    y[t] = sum over x of rows[back[t, x]]                in the order of x, in float32

The weight multiplies what goes into the down projection instead of what comes out: without biases that is the same sum,
of rows half as wide, and the gradient of a weight needs no output of an expert: it is the inner product of dh[n] with
silu(gate[n]) * up[n], which the activation's backward pass has at hand. Spreading and combining are each other's
gradients, and every number is written by one program: no atomics, and bits repeat.

All are memory-bound. Spreading reads a token's row once and writes X copies; combining reads X rows, twice as many
where two products' gradients are added on the way, and writes one. The activation reads two numbers per element and
writes one, its backward pass reads three and writes three, of which one is h again: cheaper than keeping it.

Shapes: T tokens, X experts per token, N = T * X rows sorted by expert, D width, H hidden width.
"""

import torch
from torch import Tensor
from torch.library import wrap_triton

from headway.kernels.compile_ahead import LaunchSpec
from headway.kernels.dispatch import fused, uses_triton
from headway.kernels.triton_compat import tl, triton, triton_op

MOST_BLOCK = 2048
"""Elements of a row at a time."""
WARPS = 4


# -- in PyTorch


def reference_spread(x_TD: Tensor, back_TX: Tensor, places: int | None = None) -> Tensor:
    """Return rows [N, D]."""
    rows_ND = _rows_of(x_TD, back_TX, places)
    rows_ND[back_TX.flatten()] = x_TD.repeat_interleave(back_TX.shape[1], dim=0)
    return rows_ND


def reference_combined(rows_ND: Tensor, back_TX: Tensor, others_ND: Tensor | None = None) -> Tensor:
    """Return the sums [T, D] of each token's rows."""
    rows = rows_ND.float() if others_ND is None else rows_ND.float() + others_ND.float()
    return rows[back_TX].sum(dim=1).to(rows_ND.dtype)


def reference_activation(gate_NH: Tensor, up_NH: Tensor, weights_TX: Tensor, back_TX: Tensor) -> Tensor:
    """Return h [N, H]."""
    weights_N1 = _by_row(weights_TX, back_TX, len(gate_NH)).unsqueeze(1)
    gate = gate_NH.float()
    return (gate * torch.sigmoid(gate) * up_NH.float() * weights_N1).to(gate_NH.dtype)


def reference_activation_backward(
    dh_NH: Tensor, gate_NH: Tensor, up_NH: Tensor, weights_TX: Tensor, back_TX: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of gate, up and weights, and h."""
    weights_N1 = _by_row(weights_TX, back_TX, len(gate_NH)).unsqueeze(1)
    dh, gate, up = (x.float() for x in (dh_NH, gate_NH, up_NH))
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    dweights_N = (dh * silu * up).sum(dim=1)
    dgate = dh * weights_N1 * up * (sigmoid + silu * (1 - sigmoid))
    dgate_NH, dup_NH, h_NH = (x.to(gate_NH.dtype) for x in (dgate, dh * weights_N1 * silu, silu * up * weights_N1))
    return dgate_NH, dup_NH, dweights_N[back_TX], h_NH


def _by_row(weights_TX: Tensor, back_TX: Tensor, rows: int) -> Tensor:
    return weights_TX.new_zeros(rows).scatter(0, back_TX.flatten().long(), weights_TX.flatten())


# -- whichever kernel


def spread(x_TD: Tensor, back_TX: Tensor, places: int | None = None) -> Tensor:
    """Return a row for each expert of each token, at the places that `back` has; with more places than rows, other
    places are left as they are in memory."""
    if fused("experts", x_TD.device.type, torch.bfloat16).kernel == "triton":
        rows: Tensor = _spread(x_TD, back_TX, places)
        return rows
    return reference_spread(x_TD, back_TX, places)


def combined(rows_ND: Tensor, back_TX: Tensor, others_ND: Tensor | None = None) -> Tensor:
    """Return the sum of each token's rows, and of the same rows of `others`."""
    if uses_triton("experts", rows_ND):
        sums: Tensor = _combined(rows_ND, back_TX, others_ND)
        return sums
    return reference_combined(rows_ND, back_TX, others_ND)


def activation(gate_NH: Tensor, up_NH: Tensor, weights_TX: Tensor, back_TX: Tensor) -> Tensor:
    """Return SwiGLU, weighted."""
    if uses_triton("experts", gate_NH):
        h_NH: Tensor = _activation(gate_NH, up_NH, weights_TX, back_TX)
        return h_NH
    return reference_activation(gate_NH, up_NH, weights_TX, back_TX)


def activation_backward(
    dh_NH: Tensor, gate_NH: Tensor, up_NH: Tensor, weights_TX: Tensor, back_TX: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of gate, up and weights, and SwiGLU again."""
    if uses_triton("experts", gate_NH):
        gradients: tuple[Tensor, Tensor, Tensor, Tensor] = _activation_backward(
            dh_NH, gate_NH, up_NH, weights_TX, back_TX
        )
        return gradients
    return reference_activation_backward(dh_NH, gate_NH, up_NH, weights_TX, back_TX)


# -- kernels


@triton.jit
def _spread_kernel(x_ptr, back_ptr, rows_ptr, width, x_stride, X: tl.constexpr, BLOCK: tl.constexpr):
    blocks = tl.cdiv(width, BLOCK)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(x_ptr + token * x_stride + column, mask=inside, other=0)
    for i in tl.static_range(X):
        row = tl.load(back_ptr + token * X + i).to(tl.int64)
        tl.store(rows_ptr + row * width + column, x, mask=inside)


@triton.jit
def _combined_kernel(
    rows_ptr, others_ptr, back_ptr, sums_ptr, width, X: tl.constexpr, OTHERS: tl.constexpr, BLOCK: tl.constexpr
):
    blocks = tl.cdiv(width, BLOCK)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for i in tl.static_range(X):
        row = tl.load(back_ptr + token * X + i).to(tl.int64)
        part = tl.load(rows_ptr + row * width + column, mask=inside, other=0).to(tl.float32)
        if OTHERS:
            part += tl.load(others_ptr + row * width + column, mask=inside, other=0).to(tl.float32)
        total += part
    tl.store(sums_ptr + token * width + column, total.to(sums_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _activation_kernel(gate_ptr, up_ptr, weights_ptr, back_ptr, h_ptr, width, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(back_ptr + place).to(tl.int64)
    weight = tl.load(weights_ptr + place).to(tl.float32)
    for begin in range(0, width, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < width
        gate = tl.load(gate_ptr + row * width + column, mask=inside, other=0).to(tl.float32)
        up = tl.load(up_ptr + row * width + column, mask=inside, other=0).to(tl.float32)
        h = gate * tl.sigmoid(gate) * up * weight
        tl.store(h_ptr + row * width + column, h.to(h_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _activation_backward_kernel(
    dh_ptr,
    gate_ptr,
    up_ptr,
    weights_ptr,
    back_ptr,
    dgate_ptr,
    dup_ptr,
    dweights_ptr,
    h_ptr,
    width,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(back_ptr + place).to(tl.int64)
    weight = tl.load(weights_ptr + place).to(tl.float32)
    dweight = tl.zeros([BLOCK], dtype=tl.float32)
    for begin in range(0, width, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < width
        dh = tl.load(dh_ptr + row * width + column, mask=inside, other=0).to(tl.float32)
        gate = tl.load(gate_ptr + row * width + column, mask=inside, other=0).to(tl.float32)
        up = tl.load(up_ptr + row * width + column, mask=inside, other=0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        dweight += dh * silu * up
        slope = dh * weight
        dgate = slope * up * (sigmoid + silu * (1 - sigmoid))
        tl.store(dgate_ptr + row * width + column, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
        tl.store(dup_ptr + row * width + column, (slope * silu).to(dup_ptr.dtype.element_ty), mask=inside)
        tl.store(h_ptr + row * width + column, (silu * up * weight).to(h_ptr.dtype.element_ty), mask=inside)
    tl.store(dweights_ptr + place, tl.sum(dweight, axis=0))


# -- operators


def _block(width: int) -> int:
    return min(MOST_BLOCK, max(16, 1 << (width - 1).bit_length()))


def _rows_of(x_TD: Tensor, back_TX: Tensor, places: int | None) -> Tensor:
    return x_TD.new_empty(back_TX.numel() if places is None else places, x_TD.shape[1])


@triton_op("headway::experts_spread", mutates_args=())
def _spread(x_TD: Tensor, back_TX: Tensor, places: int | None) -> Tensor:
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    rows_ND, (tokens, width) = _rows_of(x_TD, back_TX, places), x_TD.shape
    if back_TX.numel():
        block = _block(width)
        wrap_triton(_spread_kernel)[(tokens * -(-width // block),)](
            x_TD, back_TX.contiguous(), rows_ND, width, x_TD.stride(0), X=back_TX.shape[1], BLOCK=block, num_warps=WARPS
        )
    return rows_ND


@_spread.register_fake
def _(x_TD: Tensor, back_TX: Tensor, places: int | None) -> Tensor:
    return _rows_of(x_TD, back_TX, places)


@triton_op("headway::experts_combined", mutates_args=())
def _combined(rows_ND: Tensor, back_TX: Tensor, others_ND: Tensor | None) -> Tensor:
    tokens, width = back_TX.shape[0], rows_ND.shape[1]
    sums_TD, block = rows_ND.new_empty(tokens, width), _block(width)
    if sums_TD.numel():
        rows_ND = rows_ND.contiguous()
        others = rows_ND if others_ND is None else others_ND.contiguous()
        wrap_triton(_combined_kernel)[(tokens * -(-width // block),)](
            rows_ND,
            others,
            back_TX.contiguous(),
            sums_TD,
            width,
            X=back_TX.shape[1],
            OTHERS=others_ND is not None,
            BLOCK=block,
            num_warps=WARPS,
        )
    return sums_TD


@_combined.register_fake
def _(rows_ND: Tensor, back_TX: Tensor, _others_ND: Tensor | None) -> Tensor:
    return rows_ND.new_empty(back_TX.shape[0], rows_ND.shape[1])


@triton_op("headway::experts_activation", mutates_args=())
def _activation(gate_NH: Tensor, up_NH: Tensor, weights_TX: Tensor, back_TX: Tensor) -> Tensor:
    (count, width), h_NH = gate_NH.shape, torch.empty(gate_NH.shape, dtype=gate_NH.dtype, device=gate_NH.device)
    if h_NH.numel():
        wrap_triton(_activation_kernel)[(count,)](
            gate_NH.contiguous(),
            up_NH.contiguous(),
            weights_TX.contiguous(),
            back_TX.contiguous(),
            h_NH,
            width,
            BLOCK=_block(width),
            num_warps=WARPS,
        )
    return h_NH


@_activation.register_fake
def _(gate_NH: Tensor, _up_NH: Tensor, _weights_TX: Tensor, _back_TX: Tensor) -> Tensor:
    return torch.empty(gate_NH.shape, dtype=gate_NH.dtype, device=gate_NH.device)


def _slopes(gate_NH: Tensor, back_TX: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dgate, dup, h = (torch.empty(gate_NH.shape, dtype=gate_NH.dtype, device=gate_NH.device) for _ in range(3))
    return dgate, dup, torch.empty(back_TX.shape, dtype=torch.float32, device=gate_NH.device), h


@triton_op("headway::experts_activation_backward", mutates_args=())
def _activation_backward(
    dh_NH: Tensor, gate_NH: Tensor, up_NH: Tensor, weights_TX: Tensor, back_TX: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dgate_NH, dup_NH, dweights_TX, h_NH = _slopes(gate_NH, back_TX)
    count, width = gate_NH.shape
    if count:
        wrap_triton(_activation_backward_kernel)[(count,)](
            dh_NH.contiguous(),
            gate_NH.contiguous(),
            up_NH.contiguous(),
            weights_TX.contiguous(),
            back_TX.contiguous(),
            dgate_NH,
            dup_NH,
            dweights_TX,
            h_NH,
            width,
            BLOCK=_block(width),
            num_warps=WARPS,
        )
    return dgate_NH, dup_NH, dweights_TX, h_NH


@_activation_backward.register_fake
def _(
    _dh_NH: Tensor, gate_NH: Tensor, _up_NH: Tensor, _weights_TX: Tensor, back_TX: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _slopes(gate_NH, back_TX)


# -- launches to compile ahead of time


def _ahead(name: str, kernel: object, numbers: dict[str, str], **constants: object) -> LaunchSpec:
    return LaunchSpec(f"experts_{name}", kernel, numbers | {"width": "i32"}, constants | {"BLOCK": 1024}, warps=WARPS)


_PLACES = {"weights_ptr": "*fp32", "back_ptr": "*i32"}
AHEAD: tuple[LaunchSpec, ...] = (
    _ahead(
        "spread", _spread_kernel,
        {"x_ptr": "*bf16", "back_ptr": "*i32", "rows_ptr": "*bf16", "x_stride": "i32"}, X=8,
    ),
    *(
        _ahead(
            name, _combined_kernel,
            {"rows_ptr": "*bf16", "others_ptr": "*bf16", "back_ptr": "*i32", "sums_ptr": "*bf16"}, X=8, OTHERS=others,
        )
        for name, others in (("combined", False), ("combined_twice", True))
    ),
    _ahead("activation", _activation_kernel, _PLACES | dict.fromkeys(("gate_ptr", "up_ptr", "h_ptr"), "*bf16")),
    _ahead(
        "activation_backward", _activation_backward_kernel,
        _PLACES | dict.fromkeys(("dh_ptr", "gate_ptr", "up_ptr", "dgate_ptr", "dup_ptr", "h_ptr"), "*bf16")
        | {"dweights_ptr": "*fp32"},
    ),
)  # fmt: skip
