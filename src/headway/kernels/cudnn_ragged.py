"""cuDNN's causal attention over ragged rows: plans by shape, kept for the life of the process.

All tokens of a batch lie one after another, [T, N, H]. `starts_S1` (int32) has where each sequence begins; at the end,
all tokens. There may be more places than sequences: those at the end are empty. Needs `nvidia-cudnn-frontend`, since
PyTorch's own call of these kernels builds their plan anew every time, and its backward pass writes out of bounds.

S places    T tokens    N heads    K key and value heads    H head size
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

TOKENS_MULTIPLE = 64
"""What the tokens are rounded up to, for the workspace of the backward pass."""


@dataclass(frozen=True)
class RaggedShape:
    """What a plan is built for."""

    places: int
    longest: int
    """The most tokens that a sequence may have."""
    tokens: int
    heads: int
    kv_heads: int
    head: int
    dtype: torch.dtype
    scale: float
    deterministic: bool

    def layout(self, name: str) -> tuple[list[int], list[int]]:
        """Return the sizes and strides of a tensor [S, N or K, longest, H], as a plan has them."""
        heads = self.kv_heads if name.removeprefix("d") in ("k", "v") else self.heads
        step = heads * self.head
        return [self.places, heads, self.longest, self.head], [self.longest * step, self.head, step, 1]

    @property
    def sums_layout(self) -> tuple[list[int], list[int]]:
        """The sizes and strides of the log-sum-exps, which are [T, N]."""
        return [self.places, self.heads, self.longest, 1], [self.longest * self.heads, 1, self.heads, 1]


def shape_of(
    q_TNH: Tensor, k_TKH: Tensor, starts_S1: Tensor, longest: int, scale: float, deterministic: bool
) -> RaggedShape:
    """Return the shape of tensors, all contiguous."""
    tokens, heads, head = q_TNH.shape
    kv_heads = k_TKH.shape[1]
    return RaggedShape(len(starts_S1) - 1, longest, tokens, heads, kv_heads, head, q_TNH.dtype, scale, deterministic)


def forward_pass(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, starts_S1: Tensor, shape: RaggedShape
) -> tuple[Tensor, Tensor]:
    """Return the output [T, N, H] and the log-sum-exps of the scores [T, N]."""
    out_TNH = torch.empty_like(q_TNH)
    sums_TN = torch.empty(shape.tokens, shape.heads, dtype=torch.float32, device=q_TNH.device)
    tensors = {"q": q_TNH, "k": k_TKH, "v": v_TKH, "out": out_TNH, "sums": sums_TN}
    _run(_forward_plan(shape, q_TNH.device), tensors | _offsets(starts_S1, shape), q_TNH.device)
    return out_TNH, sums_TN


def backward_pass(
    dout_TNH: Tensor,
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    out_TNH: Tensor,
    sums_TN: Tensor,
    starts_S1: Tensor,
    shape: RaggedShape,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values."""
    dq_TNH, dk_TKH, dv_TKH = (torch.empty_like(x) for x in (q_TNH, k_TKH, v_TKH))
    tensors = {"q": q_TNH, "k": k_TKH, "v": v_TKH, "out": out_TNH, "sums": sums_TN, "dout": dout_TNH}
    tensors |= {"dq": dq_TNH, "dk": dk_TKH, "dv": dv_TKH}
    _run(_backward_plan(shape, q_TNH.device), tensors | _offsets(starts_S1, shape), q_TNH.device)
    return dq_TNH, dk_TKH, dv_TKH


def _offsets(starts_S1: Tensor, shape: RaggedShape) -> dict[str, Tensor]:
    """Return the lengths of sequences and where their first elements are, by the names that plans have for them."""
    return {
        "lengths": starts_S1.diff(),
        "q starts": starts_S1 * (shape.heads * shape.head),
        "kv starts": starts_S1 * (shape.kv_heads * shape.head),
        "sums starts": starts_S1 * shape.heads,
    }


def _run(plan: "_Plan", tensors: dict[str, Tensor], device: torch.device) -> None:
    handle = _handle(device)
    library().set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
    workspace = torch.empty(max(1, plan.graph.get_workspace_size()), dtype=torch.uint8, device=device)
    plan.graph.execute({tensor: tensors[name] for name, tensor in plan.names.items()}, workspace, handle=handle)


# -- plans


@cache
def library() -> Any:
    """Return the module of nvidia-cudnn-frontend; raise ImportError without it."""
    import cudnn

    return cudnn


@cache
def _handle(device: torch.device) -> Any:
    with torch.cuda.device(device):
        return library().create_handle()


class _Plan:
    """A graph of one operation, and its tensors by name."""

    def __init__(self, shape: RaggedShape, device: torch.device) -> None:
        types = library().data_type
        self.shape = shape
        self.graph = library().pygraph(
            io_data_type={torch.bfloat16: types.BFLOAT16, torch.float16: types.HALF}[shape.dtype],
            intermediate_data_type=types.FLOAT, compute_data_type=types.FLOAT, handle=_handle(device),
        )  # fmt: skip
        self.names: dict[str, Any] = {}
        lengths = self._integers("lengths", shape.places)
        self.options = {
            "attn_scale": shape.scale, "use_causal_mask": True, "use_padding_mask": True,
            "seq_len_q": lengths, "seq_len_kv": lengths,
        }  # fmt: skip

    def _integers(self, name: str, count: int) -> Any:
        if name not in self.names:
            kind = library().data_type.INT32
            self.names[name] = self.graph.tensor(name=name, dim=[count, 1, 1, 1], stride=[1] * 4, data_type=kind)
        return self.names[name]

    def _starts(self, name: str) -> Any:
        kind = "sums" if name == "sums" else "kv" if name.removeprefix("d") in ("k", "v") else "q"
        return self._integers(f"{kind} starts", self.shape.places + 1)

    def read(self, *names: str) -> list[Any]:
        """Return tensors that the operation reads."""
        for name in names:
            sizes, strides = self.shape.sums_layout if name == "sums" else self.shape.layout(name)
            options = {"data_type": library().data_type.FLOAT} if name == "sums" else {}
            self.names[name] = self.graph.tensor(name=name, dim=sizes, stride=strides, **options)
            self.names[name].set_ragged_offset(self._starts(name))
        return [self.names[name] for name in names]

    def write(self, tensors: dict[str, Any]) -> None:
        """Name what the operation writes."""
        for name, tensor in tensors.items():
            sizes, strides = self.shape.sums_layout if name == "sums" else self.shape.layout(name)
            tensor.set_output(True).set_dim(sizes).set_stride(strides)
            if name == "sums":
                tensor.set_data_type(library().data_type.FLOAT)
            tensor.set_ragged_offset(self._starts(name))
            self.names[name] = tensor

    def build(self) -> "_Plan":
        """Choose and compile its kernels."""
        modes = library().heur_mode
        self.graph.validate()
        self.graph.build_operation_graph()
        self.graph.create_execution_plans([modes.A, modes.FALLBACK])
        self.graph.check_support()
        self.graph.build_plans()
        return self


@cache
def _forward_plan(shape: RaggedShape, device: torch.device) -> _Plan:
    plan = _Plan(shape, device)
    q, k, v = plan.read("q", "k", "v")
    out, sums = plan.graph.sdpa(name="attention", q=q, k=k, v=v, is_inference=False, **plan.options)
    plan.write({"out": out, "sums": sums})
    return plan.build()


@cache
def _backward_plan(shape: RaggedShape, device: torch.device) -> _Plan:
    plan = _Plan(shape, device)
    q, k, v, out, dout, sums = plan.read("q", "k", "v", "out", "dout", "sums")
    total = -(-shape.tokens // TOKENS_MULTIPLE) * TOKENS_MULTIPLE
    dq, dk, dv = plan.graph.sdpa_backward(
        name="gradients", q=q, k=k, v=v, o=out, dO=dout, stats=sums, max_total_seq_len_q=total,
        max_total_seq_len_kv=total, use_deterministic_algorithm=shape.deterministic, **plan.options,
    )  # fmt: skip
    plan.write({"dq": dq, "dk": dk, "dv": dv})
    return plan.build()
