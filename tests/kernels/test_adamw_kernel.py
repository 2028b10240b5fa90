"""The fused AdamW: the paper's formula in float64, and the very bits of rounding.py and codes of eightbit.py."""

import hashlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headway.kernels.adamw import AdamwPart, Draw, adamw, reference
from headway.kernels.adamw_8bit import adamw_8bit, books_of
from headway.kernels.adamw_8bit import reference as reference_8bit
from headway.state.box import Box
from headway.train.optim.adamw import adamw as adamw_today
from headway.train.optim.adamw import adamw_states, eightbit_states
from headway.train.optim.eightbit import blocks, codebook, decode, encode
from headway.train.optim.parameter_state import trained
from headway.train.optim.rounding import RoundingBits, to_bfloat16
from thinned import thinned

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-6, torch.bfloat16: 2e-6}
"""By the dtype of gradients, of what is kept in float32: as a share, or of one."""
CPU = torch.device("cpu")
SHAPES = [(1,), (7,), (129,), (3, 1), (5, 7), (2, 1000), (17, 512), (2, 3, 48), (1, 2064), (70, 16), (0, 8)]
RATES: dict[str, Any] = {"lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
BOOKS = books_of(codebook(True, CPU), codebook(False, CPU), CPU)


def draw_of(dice: RoundingBits) -> Draw:
    return lambda name: hashlib.sha256(f"{dice.seed}/{dice.step}/{name}".encode()).digest()[:16]


def part_of(
    shape: tuple[int, ...],
    weight: torch.dtype = torch.float32,
    gradient: torch.dtype = torch.float32,
    moment: torch.dtype = torch.float32,
    seed: int = 0,
    device: str = "cpu",
) -> AdamwPart:
    """A whole parameter some way into its training; what it holds is exact in bfloat16."""
    generator = torch.Generator(device).manual_seed(seed)
    w, g, m, v = (torch.randn(shape, generator=generator, device=device).bfloat16() for _ in range(4))
    step = torch.tensor(3.0, device=device)
    kept = (0.1 * m.float()).bfloat16().to(moment), (0.1 * v.float().square()).bfloat16().to(moment)
    return AdamwPart(w.to(weight), g.to(gradient), *kept, step, f"w{seed}", Box((0,) * len(shape), shape), shape)


def copied(part: AdamwPart) -> AdamwPart:
    kept = {key: getattr(part, key).clone() for key in ("weight", "gradient", "mean", "square", "step")}
    if part.shown is not None:
        kept["shown"] = part.shown.clone()
    if part.scales is not None:
        kept["scales"] = tuple(scale.clone() for scale in part.scales)
    return replace(part, **kept)


def opened(part: AdamwPart) -> AdamwPart:
    """The same in float32."""
    copy = copied(part)
    return replace(copy, weight=copy.weight.float(), mean=copy.mean.float(), square=copy.square.float())


def paper(part: AdamwPart, factor: float = 1.0, **rates: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Loshchilov and Hutter's algorithm 2, in float64: weight and moments."""
    rates = RATES | rates
    beta1, beta2 = rates["betas"]
    w, g, m, v = (tensor.double() for tensor in (part.weight, part.gradient, part.mean, part.square))
    g = factor * g
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    mean, square = m / (1 - beta1 ** float(part.step)), v / (1 - beta2 ** float(part.step))
    return w - rates["lr"] * (mean / (square.sqrt() + rates["eps"]) + rates["weight_decay"] * w), m, v


def assert_near(part: AdamwPart, truth: tuple[Tensor, Tensor, Tensor], tolerance: float = 2e-6) -> None:
    for actual, wanted in zip((part.weight, part.mean, part.square), truth, strict=True):
        torch.testing.assert_close(actual.double(), wanted, rtol=tolerance, atol=tolerance)


# -- the formula


@pytest.mark.parametrize(("gradient", "factor"), thinned(TOLERANCE, [None, 0.25]))
def test_it_is_the_papers_for_many_tensors_at_once(gradient: torch.dtype, factor: float | None) -> None:
    parts = [part_of(shape, gradient=gradient, seed=i) for i, shape in enumerate(SHAPES)]
    plain = [copied(part) for part in parts]
    truths = [paper(part, factor or 1.0) for part in parts]
    given = None if factor is None else torch.tensor(factor)
    table = adamw(parts, factor=given, **RATES)
    reference(plain, factor=given, **RATES)
    assert len(table.launches) == 2  # what may be read by 16 bytes, and what may not
    for part, other, truth in zip(parts, plain, truths, strict=True):
        assert_near(part, truth, TOLERANCE[gradient])
        assert_near(other, truth, TOLERANCE[gradient])


@pytest.mark.parametrize(("step", "betas"), thinned([1, 2, 1000, 300000], [(0.9, 0.999), (0.0, 0.0), (0.95, 0.99999)]))
def test_moments_are_corrected_by_the_count_of_steps(step: int, betas: tuple[float, float]) -> None:
    parts = [replace(part_of((33,), seed=i), step=torch.tensor(float(step + i))) for i in range(3)]
    truths = [paper(part, betas=betas) for part in parts]
    adamw(parts, **RATES | {"betas": betas})
    for part, truth in zip(parts, truths, strict=True):
        assert_near(part, truth)
    assert [float(part.step) for part in parts] == [step, step + 1, step + 2]


def test_the_rate_may_be_on_the_device() -> None:
    part, other = part_of((4, 40)), part_of((4, 40))
    adamw([part], **RATES)
    adamw([other], **RATES | {"lr": torch.tensor(0.02)})
    assert torch.equal(part.weight, other.weight)


def test_a_multiple_of_the_gradient_by_the_factor_is_the_gradient() -> None:
    part, other = part_of((5, 40)), part_of((5, 40))
    adamw([part], **RATES)
    adamw([replace(other, gradient=other.gradient * 8)], factor=torch.tensor(0.125), **RATES)
    assert torch.equal(part.weight, other.weight)


def test_masters_are_shown_in_bfloat16() -> None:
    part = part_of((9, 64), gradient=torch.bfloat16)
    part = replace(part, shown=torch.zeros(9, 64, dtype=torch.bfloat16))
    truth = paper(part)
    adamw([part], **RATES)
    assert_near(part, truth)
    assert part.shown is not None
    # the interpreter cuts off where a GPU rounds to the nearest
    torch.testing.assert_close(part.shown.float(), part.weight, rtol=2**-7, atol=0)
    reference([part], **RATES)
    assert torch.equal(part.shown, part.weight.bfloat16())


@pytest.mark.filterwarnings("ignore:invalid value")
def test_non_finite_gradient_propagates() -> None:
    part = part_of((3, 600), *[torch.bfloat16] * 3)
    part.gradient[1, 5], part.gradient[2, 599] = torch.nan, torch.inf
    adamw([part], draw=draw_of(RoundingBits(1, 2)), **RATES)
    for tensor in (part.weight, part.mean, part.square):
        assert (~tensor.isfinite()).nonzero().tolist() == [[1, 5], [2, 599]]


# -- rounding


HALF = torch.bfloat16
ROUNDED = {"all": (HALF, HALF), "weights": (HALF, torch.float32), "moments": (torch.float32, HALF)}


@pytest.mark.parametrize(
    ("kind", "shape"), thinned(ROUNDED, [(1,), (1500,), (4, 7), (10, 512), (3, 1000), (20, 130), (2, 9, 16)])
)
def test_stochastic_rounding_uses_the_reference_bits(kind: str, shape: tuple[int, ...]) -> None:
    """Of what the same kernel makes in float32."""
    weight, moment = ROUNDED[kind]
    dice = RoundingBits(seed=3, step=8)
    part = part_of(shape, weight, HALF, moment)
    exact = opened(part)
    adamw([part], draw=draw_of(dice), **RATES)
    adamw([exact], **RATES)
    for key, name in (("weight", "weight"), ("mean", "exp_avg"), ("square", "exp_avg_sq")):
        kept, value = getattr(part, key), getattr(exact, key)
        if kept.dtype == HALF:
            value = to_bfloat16(value, dice.bits("w0", part.box, part.shape, CPU, name))
        assert torch.equal(kept, value), key


CUTS = {
    (30, 40): [Box((0, 0), (13, 40)), Box((13, 0), (17, 40))],
    (3, 1024): [Box((0, 0), (3, 512)), Box((0, 512), (3, 512))],
    (4, 6, 20): [Box((0, 0, 0), (4, 2, 20)), Box((0, 2, 0), (3, 4, 20)), Box((3, 2, 0), (1, 4, 20))],
    (2, 3, 4, 5): [Box((0, 0, 0, 0), (2, 3, 4, 3)), Box((0, 0, 0, 3), (2, 2, 4, 2)), Box((0, 2, 0, 3), (2, 1, 4, 2))],
    (50,): [Box((0,), (20,)), Box((20,), (30,))],
}


@pytest.mark.parametrize("shape", CUTS)
def test_every_mesh_rounds_alike(shape: tuple[int, ...]) -> None:
    whole = part_of(shape, HALF, HALF, HALF)
    parts = []
    for box in CUTS[shape]:
        cut = box.slices((0,) * len(shape))
        kept = {key: getattr(whole, key)[cut].clone() for key in ("weight", "gradient", "mean", "square")}
        parts.append(replace(whole, box=box, **kept))
    plain = copied(whole)
    draw = draw_of(RoundingBits(1, 5))
    adamw([whole], draw=draw, **RATES)
    adamw(parts, draw=draw, **RATES)
    reference([plain], draw=draw, **RATES)
    for part in parts:
        cut = part.box.slices((0,) * len(shape))
        for key in ("weight", "mean", "square"):
            assert torch.equal(getattr(part, key), getattr(whole, key)[cut]), key
    for key in ("weight", "mean", "square"):
        off = (getattr(plain, key) != getattr(whole, key)).float().mean()
        assert off < 0.01, key  # the reference's last bit of float32 may be another


@pytest.mark.parametrize("kind", [*ROUNDED, "neither", "masters"])
def test_adamw_matches_torch_implementation(kind: str) -> None:
    """The bits of the passes it replaces, but where float32 was off by its last."""
    weight, moment = ROUNDED.get(kind, (torch.float32, torch.float32))
    dice, shape = RoundingBits(7, 3), (40, 96)
    part = part_of(shape, weight, weight, moment)
    if kind == "masters":
        part = replace(part, shown=torch.zeros(shape, dtype=HALF))
    today = trained("w0", nn.Parameter((part.weight if part.shown is None else part.shown).clone()))
    today.parameter.grad = part.gradient.to(today.parameter.dtype)
    today.state.update(adamw_states(today, moment))
    if kind == "masters":
        today.state["master"] = part.weight.clone()
    today.state["step"].fill_(2.0)
    for key, value in (("exp_avg", part.mean), ("exp_avg_sq", part.square)):
        today.state[key].copy_(value)
    with torch.no_grad():
        adamw_today([today], RATES, dice)
        today.show_master()
    plain = copied(part)
    reference([plain], draw=draw_of(dice), **RATES)
    adamw([part], draw=draw_of(dice), **RATES)
    for candidate in (part, plain):
        for kept, value in (
            (candidate.weight, today.weight),
            (candidate.mean, today.moment("exp_avg")),
            (candidate.square, today.moment("exp_avg_sq")),
        ):
            if kept.dtype == torch.float32:
                torch.testing.assert_close(kept, value, rtol=1e-6, atol=1e-7)
            else:
                assert (kept != value).float().mean() < 0.01


# -- the table


def test_a_table_holds_while_all_but_gradients_stay() -> None:
    parts = [part_of((6, 32), seed=i) for i in range(3)]
    table = adamw(parts, **RATES)
    again = adamw(parts, before=table, **RATES)
    assert again.launches[0].fresh is table.launches[0].fresh
    moved = [replace(part, gradient=part.gradient.clone()) for part in parts]
    truths = [paper(part) for part in moved]
    third = adamw(moved, before=again, **RATES)
    assert third.launches[0].entries is table.launches[0].entries
    for part, truth in zip(moved, truths, strict=True):
        assert_near(part, truth)
    elsewhere = [replace(part, weight=part.weight.clone()) for part in moved]
    truths = [paper(part) for part in elsewhere]
    fourth = adamw(elsewhere, before=third, **RATES)
    assert fourth.launches[0].entries is not table.launches[0].entries
    for part, truth in zip(elsewhere, truths, strict=True):
        assert_near(part, truth)


def test_precisions_may_be_mixed() -> None:
    kinds = [(torch.float32,) * 3, (HALF,) * 3, (HALF, torch.float32, torch.float32), (torch.float32, HALF, HALF)]
    parts = [part_of((12, 64), *kind, seed=i) for i, kind in enumerate(kinds)]
    truths = [paper(part) for part in parts]
    table = adamw(parts, draw=draw_of(RoundingBits(0, 1)), **RATES)
    assert len(table.launches) == 4
    for part, truth, kind in zip(parts, truths, kinds, strict=True):
        assert_near(part, truth, 2e-6 if HALF not in kind else 2**-6)


def test_unsupported_inputs_are_refused() -> None:
    part = part_of((4, 16))
    wrong = {
        "one shape": {"gradient": torch.zeros(4, 15)},
        "contiguous": {"weight": torch.zeros(16, 4).t()},
        "float32 or bfloat16": {"weight": part.weight.half()},
        "moments must have one dtype": {"mean": part.mean.bfloat16()},
        "a master copy must be": {"shown": torch.zeros(4, 16)},
        "step count": {"step": torch.zeros((), dtype=torch.int64)},
    }
    for message, changed in wrong.items():
        with pytest.raises(ValueError, match=message):
            adamw([replace(part, **changed)], **RATES)
    with pytest.raises(ValueError, match="bfloat16 or float16"):
        adamw([replace(part, gradient=part.gradient.double())], **RATES)
    with pytest.raises(ValueError, match="need scales"):
        adamw_8bit([part], BOOKS, **RATES)


# -- eight bits


def coarse(part: AdamwPart) -> AdamwPart:
    """The same with moments in eight bits."""
    mean, mean_scale = encode(part.mean.float(), True)
    root, root_scale = encode(part.square.float().sqrt(), False)
    return replace(part, mean=mean.contiguous(), square=root.contiguous(), scales=(mean_scale, root_scale))


def fine(part: AdamwPart) -> AdamwPart:
    """The same with moments in float32."""
    assert part.scales is not None
    square = decode(part.square, part.scales[1], False).square_()
    return replace(copied(part), mean=decode(part.mean, part.scales[0], True), square=square, scales=None)


@pytest.mark.parametrize(
    ("weight", "shape"),
    thinned([torch.float32, HALF], [(1,), (300,), (3, 7), (5, 256), (9, 512), (2, 1300), (2, 2, 528)]),
)
def test_codes_are_those_of_the_moments_in_float32(shape: tuple[int, ...], weight: torch.dtype) -> None:
    """To the code, of what the kernel of float32 makes of decoded moments."""
    part = coarse(part_of(shape, weight, weight))
    part.gradient.mul_(10.0 ** torch.linspace(-6, 3, shape[-1]).to(weight))
    exact, plain = fine(part), copied(part)
    draw = draw_of(RoundingBits(2, 9))
    adamw_8bit([part], BOOKS, draw=draw, factor=torch.tensor(0.5), **RATES)
    adamw([exact], draw=draw, factor=torch.tensor(0.5), **RATES)
    reference_8bit([plain], BOOKS, draw=draw, factor=torch.tensor(0.5), **RATES)
    assert part.scales is not None
    assert plain.scales is not None
    assert torch.equal(part.weight, exact.weight)
    mean, root = encode(exact.mean, True), encode(exact.square.sqrt(), False)
    for (codes, scales), kept, scale in zip((mean, root), (part.mean, part.square), part.scales, strict=True):
        assert torch.equal(kept, codes)
        assert torch.equal(scale, scales)
    for plain_codes, wanted in ((plain.mean, part.mean), (plain.square, part.square)):
        off = (plain_codes.int() - wanted.int()).abs()
        assert int(off.max()) <= 1
        assert off.float().mean() < 0.01
    for plain_scale, other in zip(plain.scales, part.scales, strict=True):
        torch.testing.assert_close(plain_scale, other, rtol=1e-6, atol=0)


def empty(gradient: Tensor) -> AdamwPart:
    """Moments that become the gradient and its absolute value, of betas that are zero."""
    shape = tuple(gradient.shape)
    codes = [torch.zeros(shape, dtype=torch.uint8) for _ in range(2)]
    scales = [torch.zeros(*shape[:-1], blocks(shape[-1])) for _ in range(2)]
    step, box = torch.tensor(1.0), Box((0,) * len(shape), shape)
    return AdamwPart(torch.zeros(shape), gradient, *codes, step, "w", box, shape, scales=(scales[0], scales[1]))


@pytest.mark.parametrize("scale", [1.0, 3.7, 1e-30, 1e-12])
def test_ties_and_all_magnitudes_have_the_codes_of_a_search(scale: float) -> None:
    """On each border, a last bit above and below, and far between: both signs, blocks of all kinds."""
    edges = torch.cat([(numbers[1:] + numbers[:-1]) / 2 for numbers in BOOKS.numbers.view(2, 256)]).float()
    near = torch.cat([edges, edges.nextafter(torch.tensor(2.0)), edges.nextafter(torch.tensor(-2.0))])
    generator = torch.Generator().manual_seed(0)
    far = torch.randn(4 * 255, generator=generator) * 10 ** (-9 * torch.rand(4 * 255, generator=generator))
    rest = torch.cat([near, -near, far.clamp(-1, 1), torch.zeros(255)]).view(-1, 255)
    # of each block the first is the largest, so that shares are what they are here
    value = torch.cat([torch.ones(len(rest), 1), rest], dim=1) * scale
    part = empty(value)
    adamw_8bit([part], BOOKS, **RATES | {"betas": (0.0, 0.0)})
    assert part.scales is not None
    codes, scales = encode(value, True)
    assert torch.equal(part.mean, codes)
    assert torch.equal(part.scales[0], scales)
    codes, scales = encode((value * value).sqrt(), False)
    assert torch.equal(part.square, codes)
    assert torch.equal(part.scales[1], scales)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_zeros_and_what_is_no_number_in_eight_bits() -> None:
    gradient = torch.zeros(3, 300)
    gradient[1, 299], gradient[2, 0] = torch.nan, torch.inf
    part = empty(gradient)
    adamw_8bit([part], BOOKS, **RATES | {"betas": (0.0, 0.0)})
    assert part.scales is not None
    for codes, scales, signed in ((part.mean, part.scales[0], True), (part.square, part.scales[1], False)):
        wanted, wanted_scales = encode(gradient, signed)
        assert torch.equal(codes, wanted)
        torch.testing.assert_close(scales, wanted_scales, rtol=0, atol=0, equal_nan=True)


def test_8bit_adamw_matches_torch_implementation() -> None:
    dice, shape = RoundingBits(7, 3), (6, 700)
    float_part = part_of(shape)
    today = trained("w0", nn.Parameter(float_part.weight.clone()))
    today.parameter.grad = float_part.gradient.clone()
    today.state.update(eightbit_states(today))
    kept = (today.moment("exp_avg").clone(), today.moment("exp_avg_root").clone())
    scales = (today.moment("exp_avg_scale").clone(), today.moment("exp_avg_root_scale").clone())
    part = replace(float_part, mean=kept[0], square=kept[1], scales=scales)
    table = None
    for step in (1, 2, 3):
        with torch.no_grad():
            adamw_today([today], RATES, dice)
        part.step.fill_(float(step))
        table = adamw_8bit([part], BOOKS, before=table, **RATES)
    # a share that is off by its last bit may have another code, and its weight then goes another way
    assert ((part.weight - today.weight).abs() > 1e-5).float().mean() < 0.001
    for codes, key in ((part.mean, "exp_avg"), (part.square, "exp_avg_root")):
        assert (codes != today.moment(key)).float().mean() < 0.01


# -- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [*ROUNDED, "neither"])
def test_on_a_gpu_bits_are_the_dices_and_numbers_the_papers(kind: str) -> None:
    weight, moment = ROUNDED.get(kind, (torch.float32, torch.float32))
    shapes = [(4096, 14336), (2048,), (1000, 37), (3, 300, 520)]
    gradient = HALF if kind != "neither" else torch.float32
    parts = [part_of(shape, weight, gradient, moment, seed=i, device="cuda") for i, shape in enumerate(shapes)]
    exact, again = [opened(part) for part in parts], [copied(part) for part in parts]
    truths = [paper(part, 0.5) for part in parts]
    dice, factor = RoundingBits(3, 8), torch.tensor(0.5, device="cuda")
    adamw(parts, draw=draw_of(dice), factor=factor, **RATES)
    adamw(again, draw=draw_of(dice), factor=factor, **RATES)
    adamw(exact, factor=factor, **RATES)
    for part, other, wide, truth in zip(parts, again, exact, truths, strict=True):
        assert_near(wide, truth)
        for key, name in (("weight", "weight"), ("mean", "exp_avg"), ("square", "exp_avg_sq")):
            kept, value = getattr(part, key), getattr(wide, key)
            assert torch.equal(kept, getattr(other, key))
            if kept.dtype == HALF:
                bits = dice.bits(part.name, part.box, part.shape, torch.device("cuda"), name)
                value = to_bfloat16(value, bits)
            # products are fused alike in every kind of launch, so that the bits are
            assert torch.equal(kept, value), (part.name, key)


@pytest.mark.gpu
def test_on_a_gpu_masters_are_shown_rounded_to_the_nearest() -> None:
    part = part_of((1000, 2048), gradient=HALF, device="cuda")
    part = replace(part, shown=torch.zeros(1000, 2048, dtype=HALF, device="cuda"))
    adamw([part], **RATES)
    assert part.shown is not None
    assert torch.equal(part.shown, part.weight.bfloat16())


@pytest.mark.gpu
def test_on_a_gpu_it_is_near_torchs_own() -> None:
    part = part_of((3000, 2048), device="cuda")
    other, before = copied(part), part.weight.clone()
    adamw([part], **RATES)
    torch._fused_adamw_(
        [other.weight],
        [other.gradient],
        [other.mean],
        [other.square],
        [],
        [other.step],
        lr=0.02,
        beta1=0.9,
        beta2=0.95,
        weight_decay=0.1,
        eps=1e-8,
        amsgrad=False,
        maximize=False,
    )
    for key in ("mean", "square"):
        torch.testing.assert_close(getattr(part, key), getattr(other, key), rtol=5e-7, atol=1e-7)
    size = (
        before.abs() + (part.weight - before).abs()
    )  # a weight near zero is the difference of two numbers that are not
    assert ((part.weight - other.weight).abs() <= 1e-6 * size + 1e-8).all()


@pytest.mark.gpu
@pytest.mark.parametrize("weight", [torch.float32, HALF])
def test_on_a_gpu_codes_are_those_of_the_moments_in_float32(weight: torch.dtype) -> None:
    cuda = torch.device("cuda")
    books = books_of(codebook(True, CPU), codebook(False, CPU), cuda)
    for shape in ((4096, 4096), (1000, 1300), (3, 7), (64, 300)):
        part = coarse(part_of(shape, weight, weight, device="cuda"))
        exact = fine(part)
        draw = draw_of(RoundingBits(2, 9))
        adamw_8bit([part], books, draw=draw, **RATES)
        adamw([exact], draw=draw, **RATES)
        assert part.scales is not None
        assert (part.weight != exact.weight).float().mean() < 1e-3
        for kept, value, signed in ((part.mean, exact.mean, True), (part.square, exact.square.sqrt(), False)):
            off = (kept.int() - encode(value, signed)[0].int()).abs()
            assert int(off.max()) <= 1
            assert off.float().mean() < 1e-3


@pytest.mark.gpu
def test_on_a_gpu_the_host_never_waits() -> None:
    parts = [part_of((100, 256), HALF, HALF, HALF, seed=i, device="cuda") for i in range(3)]
    factor = torch.ones((), device="cuda")
    table = adamw(parts, draw=draw_of(RoundingBits(0, 1)), factor=factor, **RATES)
    torch.cuda.set_sync_debug_mode("error")
    try:
        adamw(parts, draw=draw_of(RoundingBits(0, 2)), factor=factor, before=table, **RATES)
    finally:
        torch.cuda.set_sync_debug_mode("default")
