"""Blocks of diffusion transformers with fused kernels, in Triton's interpreter, equal plain ones, forward and backward;
layers that are adapted or split run by themselves."""

from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headway.kernels import dispatch
from headway.kernels.dispatch import OF_DIFFUSION
from headway.models.diffusion import dit, wan
from headway.models.diffusion.layers import project, project_heads
from headway.models.lora import LoraLinear
from headway.parallel.recompute import recompute
from headway.recipe.families.dit import DiT
from headway.recipe.families.wan import Wan
from headway.recipe.train import Operation

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")
SIZES: dict[str, Any] = {"layers": 1, "dim": 24, "heads": 2, "hidden": 40, "in_channels": 4}
TEXT = {"text_dim": 6, "text_tokens": 5}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Has the CPU count as a device of Triton's, which its interpreter makes it, for the fused kernels alone."""
    monkeypatch.setattr(dispatch, "devices", ("cuda", "cpu"))
    monkeypatch.setattr(dispatch, "LEAST_ELEMENTS", 0)
    fuse(OF_DIFFUSION)
    yield
    dispatch.make_plain(())


def fuse(operations: Collection[Operation]) -> None:
    """Run these operations with their kernels, and all else of a block in plain PyTorch."""
    others = ("rms_norm", "rope", "gated", "attention", *OF_DIFFUSION)
    dispatch.make_plain([operation for operation in others if operation not in operations])


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def case(name: str, tokens: int = 6) -> tuple[nn.Module, list[Any]]:
    """A block and its inputs."""
    stream = drawn(2, tokens, 24, seed=0)
    if name.startswith("wan"):
        model = Wan(family="wan", **SIZES, **TEXT, cross_norm="cross norm" in name)
        turns = drawn(tokens, 6, seed=3).detach()
        bits = torch.stack((turns.cos(), turns.sin())).view(torch.int32)
        block: nn.Module = wan.Block(model)
        inputs = [stream, drawn(2, 6, 24, seed=1), drawn(2, 5, 24, seed=2), None, bits]
    elif name == "dit of text":
        block = dit.Block(DiT(family="dit", **SIZES, conditioning="text", **TEXT))
        mask = torch.arange(5) < torch.tensor([[[[5]]], [[[3]]]])
        inputs = [stream, drawn(2, 24, seed=1), drawn(2, 5, 24, seed=2), mask]
    else:
        block = dit.Block(DiT(family="dit", **SIZES, num_classes=3))
        inputs = [stream, drawn(2, 24, seed=1)]
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(0, 0.2, generator=generator)
    return block, inputs


def passes(block: nn.Module, inputs: list[Any], operations: tuple[Any, ...], *, compiled: bool = False) -> list[Tensor]:
    """The result, and gradients of all inputs and parameters."""
    fuse(operations)
    forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True) if compiled else block.forward
    y = forward(*inputs)
    leaves = [*block.parameters(), *(x for x in inputs if x is not None and x.requires_grad)]
    return [y.detach(), *torch.autograd.grad(y, leaves, drawn(*y.shape, seed=4).detach())]


@pytest.mark.parametrize("name", ["wan, cross norm", "wan", "dit", "dit of text"])
@pytest.mark.parametrize("operations", [*((operation,) for operation in OF_DIFFUSION), OF_DIFFUSION], ids=str)
def test_fused_blocks_are_those_of_plain_pytorch(name: str, operations: tuple[Any, ...]) -> None:
    block, inputs = case(name)
    for fused, plain in zip(passes(block, inputs, operations), passes(block, inputs, ()), strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-4, atol=2e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::UserWarning:torch")
@pytest.mark.parametrize("kind", ["none", "selective", "full"])
@pytest.mark.parametrize("name", ["wan, cross norm", "dit"])
def test_a_compiler_takes_them_as_they_are(name: str, kind: Any) -> None:
    """In one graph, with recomputation too."""
    block, inputs = case(name)
    eager = passes(block, inputs, OF_DIFFUSION)
    recompute([block], kind, None)
    compiled = passes(block, inputs, OF_DIFFUSION, compiled=True)
    for actual, right in zip(compiled, eager, strict=True):
        torch.testing.assert_close(actual, right, rtol=1e-5, atol=1e-5)


def test_small_tensors_are_left_to_pytorch_and_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias whose gradient a kernel computes goes to that kernel, and is not lost, at any size."""
    block, inputs = case("dit")
    elements = inputs[0].numel()
    monkeypatch.setattr(dispatch, "LEAST_ELEMENTS", elements + 1)
    for compiled, name in ((False, "pytorch"), (True, "compiler")):
        assert dispatch.fused("gelu", "cuda", torch.bfloat16, elements, compiled).kernel == name
    truth = passes(block, inputs, ())
    for least in (elements, elements + 1):  # the hidden size has more elements than the stream
        monkeypatch.setattr(dispatch, "LEAST_ELEMENTS", least)
        for fused, plain in zip(passes(block, inputs, OF_DIFFUSION), truth, strict=True):
            torch.testing.assert_close(fused, plain, rtol=1e-4, atol=2e-5)


def test_adapted_and_split_layers_run_by_themselves() -> None:
    block, inputs = case("dit")
    layer, stream = block.mlp.up, inputs[0]
    assert project(layer, stream, fuses=True)[1] is layer.bias
    assert project(layer, stream, fuses=False)[1] is None
    layers = (block.attention.q, block.attention.k)
    assert project_heads(layers, (None, None), stream, 12) is not None
    layer.forward = partial(layer.forward)  # as a tensor axis does
    assert project(layer, stream, fuses=True)[1] is None
    layers[0].__class__ = LoraLinear
    assert project_heads(layers, (None, None), stream, 12) is None


def stored(name: str, tokens: int) -> int:
    """Numbers that a block's forward pass stores for the backward pass, each storage once."""
    block, inputs = case(name, tokens)
    stored: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        stored[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        block(*inputs)
    return sum(x.untyped_storage().nbytes() for x in stored.values()) // 4


@pytest.mark.parametrize(
    ("name", "widths", "rows"),
    [
        # the stream twice, three norms, two products and what normalizes their heads, attention and what is gated twice
        ("wan, cross norm", 2 + 3 + 4 + 3 + 2 + 2, 3 * 2 + 3 + 2 * 2 + 12 / 2),
        ("dit", 1 + 2 + 3 + 1 + 2, 2 * 2 + 2),
        ("dit of text", 2 + 3 + 4 + 2 + 2, 3 * 2 + 2 * 2),
    ],
)
def test_a_token_stores_no_more_than_gradients_need(name: str, widths: int, rows: float) -> None:
    """In widths of the stream, beside GELU's input and output; `rows` are statistics of norms and attention, of two
    heads, and angles of positions. A gated branch and its sum would be a width more. Weights are as large at any
    length, and do not count."""
    stored_by_tokens = (stored(name, 4) - stored(name, 2)) / (2 * 2)
    assert stored_by_tokens <= widths * 24 + 2 * 40 + rows
