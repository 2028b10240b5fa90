"""The part of nvidia-cudnn-frontend that attention over ragged rows needs, computed by PyTorch on the CPU.

Tensors are read and written through the sizes, strides and ragged offsets that a graph declares, a place at a time:
what is declared wrongly computes something else.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

data_type = SimpleNamespace(BFLOAT16="bfloat16", HALF="half", FLOAT="float", INT32="int32")
heur_mode = SimpleNamespace(A="A", FALLBACK="fallback")


@dataclass(eq=False)
class Node:
    """A tensor of a graph."""

    name: str = ""
    dim: list[int] = field(default_factory=list)
    stride: list[int] = field(default_factory=list)
    kind: str = ""
    starts: "Node | None" = None

    def set_output(self, _: bool) -> "Node":
        return self

    def set_dim(self, dim: list[int]) -> "Node":
        self.dim = dim
        return self

    def set_stride(self, stride: list[int]) -> "Node":
        self.stride = stride
        return self

    def set_data_type(self, kind: str) -> "Node":
        self.kind = kind
        return self

    def set_ragged_offset(self, starts: "Node") -> "Node":
        self.starts = starts
        return self

    def of_place(self, pack: dict["Node", Tensor], place: int, length: int) -> Tensor:
        """A view of one sequence [heads, length, size]."""
        assert self.starts is not None
        assert self.kind in ("", {torch.float32: "float"}.get(pack[self].dtype))
        begin = int(pack[self.starts].flatten()[place])
        storage = pack[self].reshape(-1)
        assert storage.data_ptr() == pack[self].data_ptr(), "a copy would be written to"
        return storage.as_strided((self.dim[1], length, self.dim[3]), self.stride[1:], begin)


class pygraph:  # noqa: N801  (as it is called there)
    """One operation on ragged rows."""

    def __init__(self, **_: Any) -> None:
        self.ready = False

    def tensor(self, *, name: str, dim: list[int], stride: list[int], data_type: str = "") -> Node:
        return Node(name, dim, stride, data_type)

    def sdpa(self, *, q: Node, k: Node, v: Node, is_inference: bool, **options: Any) -> tuple[Node, Node]:
        assert not is_inference
        self.inputs, self.options, self.outputs = (q, k, v), options, (Node(), Node())
        return self.outputs[0], self.outputs[1]

    def sdpa_backward(
        self, *, q: Node, k: Node, v: Node, o: Node, dO: Node, stats: Node, **options: Any
    ) -> tuple[Node, ...]:
        self.inputs, self.options = (q, k, v, o, dO, stats), options
        self.outputs: tuple[Node, ...] = (Node(), Node(), Node())
        return self.outputs

    def validate(self) -> None: ...
    def build_operation_graph(self) -> None: ...
    def create_execution_plans(self, modes: list[str]) -> None: ...
    def check_support(self) -> None: ...

    def build_plans(self) -> None:
        self.ready = True

    def get_workspace_size(self) -> int:
        return 0

    def execute(self, pack: dict[Node, Tensor], workspace: Tensor, handle: Any) -> None:
        assert self.ready
        assert self.options["use_causal_mask"]
        assert self.options["use_padding_mask"]
        assert set(pack) >= {*self.inputs, *self.outputs, self.options["seq_len_q"], self.options["seq_len_kv"]}
        for place, length in enumerate(pack[self.options["seq_len_q"]].flatten().tolist()):
            assert length <= self.inputs[0].dim[2]
            if length:
                self._place(pack, place, length)

    def _place(self, pack: dict[Node, Tensor], place: int, length: int) -> None:
        given = [node.of_place(pack, place, length).double() for node in self.inputs]
        passes = forward if len(given) == 3 else backward
        results = passes(*given, self.options["attn_scale"])
        for node, result in zip(self.outputs, results, strict=True):
            node.of_place(pack, place, length).copy_(result)


def scores_of(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Causal scores of one sequence, [N, L, L]."""
    scores = (q @ k.transpose(1, 2)) * scale
    return scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), float("-inf"))


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of one sequence [N, L, H], and the log-sum-exps of its scores."""
    k, v = (x.repeat_interleave(len(q) // len(k), dim=0) for x in (k, v))
    scores = scores_of(q, k, scale)
    return scores.softmax(-1) @ v, scores.logsumexp(-1, keepdim=True)


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, sums: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients, given what the forward pass kept."""
    groups = (len(k), -1)
    k, v = (x.repeat_interleave(len(q) // len(k), dim=0) for x in (k, v))
    weights = (scores_of(q, k, scale) - sums).exp()
    slopes = weights * (dout @ v.transpose(1, 2) - (dout * out).sum(-1, keepdim=True)) * scale
    dk, dv = slopes.transpose(1, 2) @ q, weights.transpose(1, 2) @ dout
    return slopes @ k, dk.unflatten(0, groups).sum(1), dv.unflatten(0, groups).sum(1)


def create_handle() -> str:
    return "handle"


def set_stream(handle: str, stream: int) -> None:
    assert handle == "handle"
