"""Attention within packed documents on GPUs: cuDNN over ragged rows, which does no work between documents.

The documents of all rows of a batch are laid one after another; `starts_S1` holds where each begins (int32), and at the
end all tokens. There may be more places than documents: those at the end are empty. Needs `nvidia-cudnn-frontend`:
PyTorch's own call of these kernels builds their plan anew every time, and its backward pass writes out of bounds.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

BUCKET = 64
"""Total tokens are a multiple of this for the workspace of the backward pass."""


@dataclass(frozen=True)
class RaggedShape:
    """What a plan of cuDNN is built for."""

    documents: int
    longest: int
    """The most tokens that a document may have."""
    tokens: int
    heads: int
    kv_heads: int
    head: int
    strides: tuple[tuple[int, int], ...]
    """Of queries, keys and values: between tokens, and between heads."""
    dtype: torch.dtype
    scale: float
    deterministic: bool
    ragged_sums: bool = True
    """Whether the log-sum-exps are [T, N], not [S, N, longest]."""


def document_starts(documents_BL: Tensor, bound: int) -> Tensor:
    """Return where each document starts in the row of all tokens [bound + 1]; the host does not wait."""
    new_BL = torch.ones_like(documents_BL, dtype=torch.bool)
    new_BL[:, 1:] = documents_BL[:, 1:] != documents_BL[:, :-1]
    tokens = documents_BL.numel()
    index_T = new_BL.flatten().cumsum(0) - 1
    starts_S1 = torch.full((bound + 1,), tokens, dtype=torch.int32, device=documents_BL.device)
    places_T = torch.arange(tokens, dtype=torch.int32, device=documents_BL.device)
    return starts_S1.scatter_reduce_(0, index_T, places_T, "amin")


def shape_of(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, starts_S1: Tensor, longest: int, scale: float, ragged_sums: bool = True
) -> RaggedShape:
    """Return what the plan for these tensors is kept by."""
    strides = tuple((x.stride(0), x.stride(1)) for x in (q_TNH, k_TKH, v_TKH))
    return RaggedShape(
        len(starts_S1) - 1, longest, len(q_TNH), q_TNH.shape[1], k_TKH.shape[1], q_TNH.shape[2], strides, q_TNH.dtype,
        scale, torch.are_deterministic_algorithms_enabled(), ragged_sums,
    )  # fmt: skip


def forward_pass(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, starts_S1: Tensor, shape: RaggedShape
) -> tuple[Tensor, Tensor]:
    """Return the output [T, N, H] and the log-sum-exps of the scores."""
    out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
    sums_shape = (shape.tokens, shape.heads) if shape.ragged_sums else (shape.documents, shape.heads, shape.longest)
    sums = torch.empty(sums_shape, dtype=torch.float32, device=q_TNH.device)
    graph, names = _forward_graph(shape, q_TNH.device)
    tensors = {"q": q_TNH, "k": k_TKH, "v": v_TKH, "out": out_TNH, "sums": sums}
    _run(graph, names, tensors | _offsets(starts_S1, shape), q_TNH.device)
    return out_TNH, sums


def backward_pass(
    grad_TNH: Tensor,
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    out_TNH: Tensor,
    sums: Tensor,
    starts_S1: Tensor,
    shape: RaggedShape,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values."""
    gradients = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q_TNH, k_TKH, v_TKH)]
    graph, names = _backward_graph(shape, q_TNH.device)
    tensors = {"q": q_TNH, "k": k_TKH, "v": v_TKH, "out": out_TNH, "sums": sums, "grad": grad_TNH.contiguous()}
    tensors |= dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    _run(graph, names, tensors | _offsets(starts_S1, shape), q_TNH.device)
    return gradients[0], gradients[1], gradients[2]


def _offsets(starts_S1: Tensor, shape: RaggedShape) -> dict[str, Tensor]:
    """Lengths of documents, and where their first elements are, by the names of a graph's tensors."""
    steps = [step for step, _ in shape.strides]
    whole, kv = shape.heads * shape.head, shape.kv_heads * shape.head
    return {
        "lengths": starts_S1.diff(),
        **{f"{name} starts": starts_S1 * step for name, step in zip("qkv", steps, strict=True)},
        "out starts": starts_S1 * whole,
        "kv starts": starts_S1 * kv,
        "sums starts": starts_S1 * shape.heads,
    }


def _run(graph: Any, names: dict[str, Any], tensors: dict[str, Tensor], device: torch.device) -> None:
    cudnn, handle = _library(), _handle(device)
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
    workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=device)
    graph.execute({tensor: tensors[name] for name, tensor in names.items()}, workspace, handle=handle)


# -- plans of cuDNN


@cache
def _library() -> Any:
    import cudnn

    return cudnn


@cache
def _handle(device: torch.device) -> Any:
    with torch.cuda.device(device):
        return _library().create_handle()


class _Builder:
    """Tensors of a graph by name."""

    def __init__(self, shape: RaggedShape, device: torch.device):
        self.cudnn = _library()
        self.shape = shape
        types = self.cudnn.data_type
        io = {torch.bfloat16: types.BFLOAT16, torch.float16: types.HALF}[shape.dtype]
        self.graph = self.cudnn.pygraph(
            io_data_type=io, intermediate_data_type=types.FLOAT, compute_data_type=types.FLOAT, handle=_handle(device)
        )
        self.names: dict[str, Any] = {}
        self.lengths = self._integers("lengths", shape.documents)

    def _integers(self, name: str, count: int) -> Any:
        kind = self.cudnn.data_type.INT32
        if name not in self.names:
            tensor = self.graph.tensor(name=name, dim=[count, 1, 1, 1], stride=[1, 1, 1, 1], data_type=kind)
            self.names[name] = tensor
        return self.names[name]

    def starts(self, name: str) -> Any:
        return self._integers(f"{name} starts", self.shape.documents + 1)

    def layout(self, name: str) -> tuple[list[int], list[int]]:
        """Sizes and strides of a tensor."""
        shape = self.shape
        heads = shape.kv_heads if name in ("k", "v", "dk", "dv") else shape.heads
        step, apart = heads * shape.head, shape.head
        if name in "qkv":
            step, apart = shape.strides["qkv".index(name)]
        return [shape.documents, heads, shape.longest, shape.head], [shape.longest * step, apart, step, 1]

    def sums(self) -> tuple[list[int], list[int]]:
        shape = self.shape
        sizes = [shape.documents, shape.heads, shape.longest, 1]
        if shape.ragged_sums:
            return sizes, [shape.longest * shape.heads, 1, shape.heads, 1]
        return sizes, [shape.longest * shape.heads, shape.longest, 1, 1]

    def given(self, name: str, starts: str) -> Any:
        sizes, strides = self.layout(name)
        tensor = self.graph.tensor(name=name, dim=sizes, stride=strides)
        tensor.set_ragged_offset(self.starts(starts))
        self.names[name] = tensor
        return tensor

    def made(self, name: str, tensor: Any, starts: str) -> None:
        sizes, strides = self.layout(name)
        tensor.set_output(True).set_dim(sizes).set_stride(strides)
        tensor.set_ragged_offset(self.starts(starts))
        self.names[name] = tensor

    def built(self) -> tuple[Any, dict[str, Any]]:
        self.graph.validate()
        self.graph.build_operation_graph()
        self.graph.create_execution_plans([self.cudnn.heur_mode.A, self.cudnn.heur_mode.FALLBACK])
        self.graph.check_support()
        self.graph.build_plans()
        return self.graph, self.names

    def masked(self) -> dict[str, Any]:
        return {
            "attn_scale": self.shape.scale,
            "use_padding_mask": True,
            "seq_len_q": self.lengths,
            "seq_len_kv": self.lengths,
            "use_causal_mask": True,
        }


@cache
def _forward_graph(shape: RaggedShape, device: torch.device) -> tuple[Any, dict[str, Any]]:
    builder = _Builder(shape, device)
    q, k, v = (builder.given(name, name) for name in "qkv")
    out, sums = builder.graph.sdpa(name="attention", q=q, k=k, v=v, is_inference=False, **builder.masked())
    builder.made("out", out, "out")
    sizes, strides = builder.sums()
    sums.set_output(True).set_dim(sizes).set_stride(strides).set_data_type(builder.cudnn.data_type.FLOAT)
    if shape.ragged_sums:
        sums.set_ragged_offset(builder.starts("sums"))
    builder.names["sums"] = sums
    return builder.built()


@cache
def _backward_graph(shape: RaggedShape, device: torch.device) -> tuple[Any, dict[str, Any]]:
    builder = _Builder(shape, device)
    q, k, v = (builder.given(name, name) for name in "qkv")
    out, grad = builder.given("out", "out"), builder.given("grad", "out")
    sizes, strides = builder.sums()
    sums = builder.graph.tensor(name="sums", dim=sizes, stride=strides, data_type=builder.cudnn.data_type.FLOAT)
    if shape.ragged_sums:
        sums.set_ragged_offset(builder.starts("sums"))
    builder.names["sums"] = sums
    total = -(-shape.tokens // BUCKET) * BUCKET
    gradients = builder.graph.sdpa_backward(
        name="gradients", q=q, k=k, v=v, o=out, dO=grad, stats=sums, max_total_seq_len_q=total,
        max_total_seq_len_kv=total, use_deterministic_algorithm=shape.deterministic, **builder.masked(),
    )  # fmt: skip
    for name, tensor in zip(("dq", "dk", "dv"), gradients, strict=True):
        builder.made(name, tensor, "out" if name == "dq" else "kv")
    return builder.built()
