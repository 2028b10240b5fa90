"""Operations called without their registration where nothing compiles, and by it where something does."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from headway.kernels.eager_op import eager_op, eager_op_with_gradients
from headway.kernels.rms_norm import reference, rms_norm

CALLS = list[str]()


@torch.library.custom_op("headway_tests::cube", mutates_args=())
def registered(x: Tensor, factor: float) -> Tensor:
    CALLS.append("registered")
    return factor * x**3


@registered.register_fake
def _(x: Tensor, _factor: float) -> Tensor:
    return torch.empty_like(x)


def launch(x: Tensor, factor: float) -> Tensor:
    CALLS.append("launched")
    return factor * x**3


def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.factor = inputs[1]


def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return 3 * ctx.factor * ctx.saved_tensors[0] ** 2 * grad, None


cube = eager_op_with_gradients(registered, launch, keep, backward)


def calls_of(way: Any, x: Tensor) -> list[str]:
    CALLS.clear()
    y = way(x)
    y.sum().backward()
    assert torch.allclose(y, 2 * x**3)
    assert x.grad is not None
    assert torch.allclose(x.grad, 6 * x**2)
    return list(CALLS)


def test_a_call_that_nothing_follows_launches_by_itself() -> None:
    x = torch.randn(5, requires_grad=True)
    assert calls_of(lambda x: cube(x, 2.0), x) == ["launched"]
    CALLS.clear()
    assert torch.equal(eager_op(registered, launch)(x.detach(), 1.0), x.detach() ** 3)
    assert CALLS == ["launched"]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiler_sees_the_operation(backend: str) -> None:
    graphs = list[Any]()

    def seen(graph: Any, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    x = torch.randn(5, requires_grad=True)
    way = torch.compile(lambda x: cube(x, 2.0) + 0, backend=seen, fullgraph=True)
    assert calls_of(way, x) == ["registered"]
    (graph,) = graphs
    assert any("headway_tests.cube" in str(node.target) for node in graph.graph.nodes)


def test_a_mode_that_follows_operations_sees_it() -> None:
    with FakeTensorMode() as mode:
        y = cube(mode.from_tensor(torch.randn(5)), 2.0)
    assert y.shape == (5,)
    assert not isinstance(y, torch.nn.Parameter)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for CPUs")
def test_norms_are_traced_by_a_compiler() -> None:
    x, weight = torch.randn(3, 16), torch.randn(16)
    names = list[str]()

    def seen(graph: Any, _: list[Any]) -> Any:
        names.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    way = torch.compile(lambda x: rms_norm(x, weight, 1e-6), backend=seen, fullgraph=True)
    assert torch.allclose(way(x), reference(x, weight, 1e-6), atol=1e-5)
    assert any("headway.rms_norm" in name for name in names)
