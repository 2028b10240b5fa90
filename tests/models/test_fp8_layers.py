"""Float8 layers against the same products of rounded factors in float64, and what is left of a model without them."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from headway.errors import ModelError, RecipeError
from headway.kernels import dispatch
from headway.kernels.fp8 import E4M3, cast
from headway.kernels.fp8_observed import observe
from headway.models import empty_decoder, fp8, fp8_grouped, fp8_linear
from headway.models.fp8 import groups_of, make_fp8
from headway.models.fp8_linear import OBSERVED, Float8Options, Float8Weights, TensorScales, linear
from headway.models.layers import GatedFeedForward, gelu, silu
from headway.models.lora import add_adapters
from headway.parallel import ParallelModel, World, parallelize_model
from headway.parallel.objective import DeviceBatch, SumScale
from headway.recipe import Lora, Recipe
from headway.recipe.fp8 import Fp8, fp8_layers
from headway.recipe.load import parse_recipe

CPU = torch.device("cpu")
SIZES = {"layers": 2, "dim": 64, "heads": 4, "kv_heads": 2, "hidden": 96, "vocab_size": 64}
SCALINGS = pytest.mark.parametrize("rowwise", [False, True], ids=["tensorwise", "rowwise"])


def recipe_of(model: dict[str, Any] | None = None, fp8: dict[str, Any] | None = None, **train: Any) -> Recipe:
    values = {"model": SIZES | (model or {}), "data": {"path": "nowhere", "seq": 16}}
    return parse_recipe(
        values | {"train": {"dtype": "bfloat16", "batch": 4, "fp8": {} if fp8 is None else fp8, **train}}, {}, "test"
    )


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def rounded(x: Tensor, *, e5m2: bool = False, rowwise: bool = False) -> tuple[Tensor, Tensor]:
    """What the codes of a matrix stand for in float64: those of its rows, and those of its columns."""
    made = cast(x, e5m2=e5m2, rowwise=rowwise)
    return made.codes.double() * made.scale.double(), (made.codes_t.double() * made.scale_t.double()).mT


def close(ours: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(ours.double(), right, rtol=8e-3, atol=8e-3 * right.abs().max().item())


@SCALINGS
@pytest.mark.parametrize("e5m2", [False, True], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("rows", [16, 21])
@pytest.mark.parametrize("holds", [False, True], ids=["cast at use", "held"])
def test_three_products_are_those_of_rounded_factors(rowwise: bool, e5m2: bool, rows: int, holds: bool) -> None:
    x, weight = drawn(rows, 48).requires_grad_(), drawn(32, 48, seed=1).requires_grad_()
    weights = Float8Weights(Float8Options(rowwise, e5m2))
    if holds:
        hold(weights, rowwise, weight.detach())
    y, slope = linear(x, weights, (weight,)), drawn(rows, 32, seed=2)
    y.backward(slope)
    kinds = {"rowwise": rowwise}
    padded = torch.nn.functional.pad(slope, (0, 0, 0, -rows % 16))
    (x_rows, x_columns), (w_rows, w_columns) = rounded(x.detach(), **kinds), rounded(weight.detach(), **kinds)
    dy_rows, dy_columns = (part[:rows] for part in rounded(padded, e5m2=e5m2, **kinds))
    close(y.detach(), x_rows @ w_rows.mT)
    close(x.grad, dy_rows @ w_columns)
    close(weight.grad, dy_columns.mT @ x_columns)


def slices(rowwise: bool, *weights: Tensor) -> Float8Weights:
    held = Float8Weights(Float8Options(rowwise))
    hold(held, rowwise, *weights)
    return held


def hold(held: Float8Weights, rowwise: bool, *weights: Tensor) -> None:
    held.hold(sum(len(weight) for weight in weights), weights[0].shape[1], CPU)
    scales = TensorScales([len(weights)], CPU)
    (inverse,) = scales.refresh([weights])
    held.scale = None if rowwise else scales.scales[0]
    held.refresh(weights, None if rowwise else inverse)


def test_scale_of_a_group_is_that_of_its_largest_weight() -> None:
    groups = [(drawn(4, 8), 100 * drawn(2, 8)), (drawn(3, 8) / 100,)]
    scales = TensorScales([2, 1], CPU)
    inverses = scales.refresh(groups)
    for scale, inverse, weights in zip(scales.scales, inverses, groups, strict=True):
        assert torch.equal(scale, cast(torch.cat(weights)).scale)
        assert scale * inverse == 1


@SCALINGS
def test_layers_that_share_an_input_are_one_product(rowwise: bool) -> None:
    weights = tuple(drawn(rows, 48, seed=seed).requires_grad_() for seed, rows in enumerate((32, 16, 16)))
    x = drawn(2, 24, 48, seed=5).requires_grad_()
    together = slices(rowwise, *(weight.detach() for weight in weights))
    parts = linear(x, together, weights).split([32, 16, 16], dim=-1)
    whole = linear(x, Float8Weights(Float8Options(rowwise)), (torch.cat(weights),))
    slope = drawn(2, 24, 64, seed=6)
    ours = torch.autograd.grad(torch.cat(parts, dim=-1), (x, *weights), slope)
    theirs = torch.autograd.grad(whole, (x, *weights), slope)
    assert torch.equal(torch.cat(parts, dim=-1), whole)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


@SCALINGS
@pytest.mark.parametrize("activation", [silu, gelu], ids=["swiglu", "geglu"])
def test_feed_forward_in_one_function_is_that_of_its_layers(rowwise: bool, activation: Any) -> None:
    layer = GatedFeedForward(32, 48, activation=activation).bfloat16()
    for seed, parameter in enumerate(layer.parameters()):
        parameter.data.copy_(drawn(*parameter.shape, seed=seed) / 5)
    parameters = (layer.gate.weight, layer.up.weight, layer.down.weight)
    x, slope = drawn(3, 16, 32, seed=7).requires_grad_(), drawn(3, 16, 32, seed=8)
    layer.gate.fp8_together = slices(rowwise, layer.gate.weight.detach(), layer.up.weight.detach())
    layer.down.fp8 = slices(rowwise, layer.down.weight.detach())
    apart = layer(x)
    apart_slopes = torch.autograd.grad(apart, (x, *parameters), slope)
    layer.fp8_fused = True
    fused = layer(x)
    torch.testing.assert_close(fused, apart, rtol=0.02, atol=0.02)
    for ours, theirs in zip(torch.autograd.grad(fused, (x, *parameters), slope), apart_slopes, strict=True):
        difference = (ours.float() - theirs.float()).norm() / theirs.float().norm()
        assert difference < 0.05, "the slope of the activation is rounded once, not twice"


# -- models


def parallel(recipe: Recipe) -> ParallelModel:
    model = empty_decoder(recipe.model, "meta")
    if recipe.lora is not None:
        add_adapters(model, recipe.lora)
    spread = parallelize_model(model, recipe, World(0, 1, CPU))
    generator = torch.Generator().manual_seed(0)
    for parameter in spread.model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1 + (parameter.ndim == 1))
    for buffer in spread.model.buffers():
        buffer.zero_()
    return spread


def batch() -> tuple[DeviceBatch, SumScale]:
    tokens = torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(1))
    return DeviceBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), SumScale.per_label(64)


def gradients(recipe: Recipe) -> Iterator[tuple[str, Tensor]]:
    spread = parallel(recipe)
    yield "loss", spread.passes(*batch())
    for name, parameter in spread.model.named_parameters():
        if parameter.grad is not None:
            yield name, parameter.grad


@pytest.mark.parametrize(
    "model", [{}, {"qkv_bias": True, "mlp_bias": True}, {"family": "mixtral", "experts": 4}], ids=str
)
def test_gradients_of_a_model_are_near_those_in_bfloat16(model: dict[str, Any]) -> None:
    low, high = (
        dict(gradients(recipe_of(model))),
        dict(gradients(recipe_of(model).model_copy(update={"train": plain()}))),
    )
    assert low.keys() == high.keys()
    for name, value in low.items():
        difference = ((value - high[name]).norm() / high[name].norm()).item()
        assert difference < 0.35, name  # gradients have two bits, and some tokens another expert
    assert any(not torch.equal(value, high[name]) for name, value in low.items())


def plain() -> Any:
    return recipe_of().train.model_copy(update={"fp8": None})


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_recomputation_keeps_every_bit(kind: str) -> None:
    kept, again = dict(gradients(recipe_of())), dict(gradients(recipe_of(recompute=kind)))
    assert all(torch.equal(value, again[name]) for name, value in kept.items())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler warns of its own code
def test_blocks_compile_to_one_graph_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: compiler(function, backend="aot_eager", fullgraph=True))
    eager, compiled = dict(gradients(recipe_of())), dict(gradients(recipe_of(compile=True)))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert all(torch.equal(value, compiled[name]) for name, value in eager.items())


def test_weights_are_cast_once_for_all_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    casts = list[int]()
    refresh = Float8Weights.refresh
    monkeypatch.setattr(Float8Weights, "refresh", lambda self, *rest: (casts.append(1), refresh(self, *rest))[1])
    spread = parallel(recipe_of(microbatch=1))
    spread.passes(*batch())
    assert len(casts) == len(spread.float8.groups) == 8


def test_changed_weights_are_cast_anew() -> None:
    spread = parallel(recipe_of())
    before = spread.passes(*batch())
    with torch.no_grad():
        for parameter in spread.model.parameters():
            parameter.mul_(0.5)
    after = spread.passes(*batch())
    assert before != after
    assert spread.evaluate(batch()[0]) == after * 64


def test_weights_cast_together_have_the_codes_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of weights in bfloat16: Triton's interpreter cuts off what it should round."""
    spread = parallel(recipe_of())
    with torch.no_grad():
        for parameter in spread.model.parameters():
            parameter.copy_(parameter.bfloat16())
    spread.refresh()
    groups = [group.weights for group in spread.float8.groups]
    wanted = [(held.codes.float(), held.codes_t.float(), held.scale.clone()) for held in groups]
    for held in groups:
        held.codes.zero_(), held.codes_t.zero_(), held.scale.zero_()
    monkeypatch.setattr(dispatch, "devices", ("cuda", "cpu"))
    spread.refresh()
    for held, right in zip(groups, wanted, strict=True):
        made = (held.codes.float(), held.codes_t.float(), held.scale)
        assert all(torch.equal(one, other) for one, other in zip(made, right, strict=True))


def test_adapters_learn_beside_a_base_in_float8() -> None:
    recipe = recipe_of().model_copy(update={"lora": Lora(rank=4)})
    learned = dict(gradients(recipe))
    assert all("lora" in name for name in learned if name != "loss")
    assert len(learned) == 1 + 2 * 14
    assert all(value.isfinite().all() for value in learned.values())


def test_layers_observe_what_goes_through_them() -> None:
    spread = parallel(recipe_of())
    seen = list[Tensor]()
    spread.model.layers[0].attention_norm.register_forward_hook(lambda *_: seen.append(_[-1].detach()))
    spread.passes(*batch())
    observed = dict(zip(OBSERVED, spread.float8.observed()[0].tolist(), strict=True))
    assert spread.float8.groups[0].name == "layers.0.attention.q+k+v"
    assert observed["passes"] == 1
    assert observed["input_amax"] == seen[0].bfloat16().abs().max().item()
    assert 0 < observed["gradient_amax"] < 1
    assert observed["input_overflow"] == observed["gradient_overflow"] == 0
    spread.float8.forget()
    assert not spread.float8.observed().any()


def test_shares_that_become_zero_and_that_do_not_fit_are_counted() -> None:
    x = torch.full((16, 16), 2.0**-30)
    x[0, 0], x[1] = 448, 0.0
    shares = fp8_observed(x)
    assert shares[1] == 448
    assert shares[2] == pytest.approx((256 - 16 - 1) / 256)
    assert shares[3] == 0
    x[2, :8] = torch.inf
    assert fp8_observed(x)[3] == 1, "nothing fits a scale that is not a number"


def fp8_observed(x: Tensor) -> list[float]:
    values: list[float] = observe(x, cast(x), e5m2=False).sum(dim=0).tolist()
    return values


def test_not_a_number_is_passed_on() -> None:
    x = drawn(16, 32)
    x[3, 4] = torch.inf
    assert not linear(x, Float8Weights(Float8Options()), (drawn(16, 32),)).isfinite().any()


class Kept:
    """What a function's context is, without an autograd graph: fake tensors of a GPU cannot have one here."""

    needs_input_grad = (True,) * 9

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors


@pytest.mark.parametrize("holds", [False, True], ids=["cast at use", "held"])
@SCALINGS
def test_products_of_a_gpu_take_these_layouts(rowwise: bool, holds: bool) -> None:
    """PyTorch checks the layouts and scales of products on a GPU without one."""
    made, ctx = partial(torch.empty, device="cuda"), Kept()
    with FakeTensorMode(), torch.no_grad():
        scales = [made(count if rowwise else 1, 1) for count in (512, 256)]
        codes = [made(512, 256, dtype=E4M3), made(256, 512, dtype=E4M3), scales[0], scales[1] if rowwise else None]
        low = partial(made, dtype=torch.bfloat16)
        held = codes if holds else [None] * 4
        y = fp8_linear._Linear.forward(ctx, low(128, 256), None, rowwise, True, True, *held, low(512, 256))
        dx, *_, dw = fp8_linear._Linear.backward(ctx, low(128, 512))
    assert (y.shape, dx.shape, dw.shape) == ((128, 512), (128, 256), (512, 256))
    assert y.dtype == dx.dtype == dw.dtype == torch.bfloat16


def test_grouped_products_of_a_gpu_take_these_layouts() -> None:
    low, ctx = partial(torch.empty, device="cuda", dtype=torch.bfloat16), Kept()
    with FakeTensorMode(), torch.no_grad():
        ends = torch.empty(4, device="cuda", dtype=torch.int32)
        y = fp8_grouped._GroupedLinear.forward(ctx, low(128, 256), low(4, 512, 256), ends, None, False)
        dx, dw, *_ = fp8_grouped._GroupedLinear.backward(ctx, low(128, 512))
    assert (y.shape, dx.shape, dw.shape) == ((128, 512), (128, 256), (4, 512, 256))


# -- which layers


def test_layers_are_chosen_by_pattern_and_odd_sizes_are_named() -> None:
    recipe = recipe_of({"hidden": 100}, {"skip": ["layers.1.attention.*"]})
    layers = fp8_layers(recipe.model, recipe.train.fp8)
    assert layers.chosen == tuple(f"layers.0.attention.{name}" for name in "qkvo")
    assert layers.skipped["layers.0.mlp.up"] == "100 is no multiple of 16"
    assert layers.skipped["layers.1.attention.q"] == "train.fp8.skip"
    only = fp8_layers(recipe_of().model, Fp8(layers=("layers.*.mlp.*",)))
    assert {name.split(".")[2] for name in only.chosen} == {"mlp"}
    mixture = recipe_of({"family": "mixtral"})
    assert "layers.1.mlp.experts" in fp8_layers(mixture.model, Fp8()).chosen
    assert "layers.1.mlp.router" in fp8_layers(mixture.model, Fp8()).skipped


def test_layers_partly_chosen_are_products_of_their_own() -> None:
    recipe = recipe_of(fp8={"skip": ["layers.*.attention.v"]})
    model = empty_decoder(recipe.model, "meta")
    make_fp8(model, recipe.model, recipe.train.fp8, CPU, holds=True)
    names = [group.name for group in groups_of(model)][:4]
    assert names[:3] == ["layers.0.attention.q", "layers.0.attention.k", "layers.0.attention.o"]
    assert sorted(group.name for group in groups_of(model))[3:5] == ["layers.0.mlp.down", "layers.0.mlp.gate+up"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"fp8": {"layers": ["layers.*.attention.qq"]}},
            r"train.fp8.layers: no linear layer .* 'layers.\*.attention.qq'",
        ),
        ({"fp8": {"skip": ["head"]}}, "train.fp8.skip: no linear layer of a block matches 'head'"),
        ({"fp8": {"skip": ["**"]}}, "no layer is left"),
    ],
)
def test_patterns_without_a_layer_are_refused(changes: dict[str, Any], message: str) -> None:
    recipe = recipe_of(**changes)
    with pytest.raises(RecipeError, match=message):
        fp8_layers(recipe.model, recipe.train.fp8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": {"dtype": "float32", "fp8": {}}}, 'needs train.dtype = "bfloat16"'),
        ({"inference": {"exact": True}}, "excludes inference.exact"),
        ({"lora": {"quantize": "nf4"}, "model": SIZES | {"init": "x"}}, "excludes lora.quantize"),
    ],
)
def test_settings_that_exclude_float8_are_refused(changes: dict[str, Any], message: str) -> None:
    values = {"model": SIZES, "data": {"path": "nowhere"}, "train": {"dtype": "bfloat16", "fp8": {}}}
    with pytest.raises(RecipeError, match=message):
        parse_recipe(values | changes, {}, "test")


@pytest.mark.parametrize(
    ("found", "kind", "refused"),
    [
        ((8, 0), "tensorwise", True),
        ((8, 9), "tensorwise", False),
        ((8, 9), "rowwise", True),
        ((9, 0), "experts", False),
    ],
)
def test_a_gpu_without_float8_is_refused_by_name(
    found: tuple[int, int], kind: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: found)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")
    if not refused:
        fp8.check_device(torch.device("cuda"), kind)
        return
    with pytest.raises(ModelError, match=rf"\({kind}\) needs compute capability .* A100 has {found[0]}.{found[1]}"):
        fp8.check_device(torch.device("cuda"), kind)
