"""Predicted seconds of passes, by hand and by what must hold; and how they compare with measured rows."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headway.cli.serving_view import WORST_ERROR
from headway.hardware import default_cluster, known_chip, parse_on
from headway.plan.accuracy.serving_rows import MeasuredRow, fit_constants, read_rows, rounded
from headway.plan.architecture import Architecture, ExpertShape
from headway.plan.costs import make_cost_model
from headway.plan.serving_latency import (
    COLD_START_S,
    EVEN_FLOORS,
    UNEVEN_FLOORS,
    WARM_START_S,
    EngineConstants,
    PassModel,
)
from headway.plan.serving_passes import Span

MEASURED = Path(__file__).parents[2] / "benchmarks/results/serving_rows_h200.json"
ROWS = read_rows(MEASURED)
QWEN3 = Architecture(28, 1024, 16, 8, 128, 3072, 151936)
MIXTRAL = Architecture(32, 4096, 32, 8, 128, 14336, 32000, tied=False, experts=ExpertShape(8, 2, 14336))
PEAK, BANDWIDTH, COPY = 989.5e12, 4.8e12, 0.87 * 4.8e12
CONSTANTS = EngineConstants(
    weights=0.9, cache=0.8, products=0.7, row_kernel_s=2e-6, kernel_s=3e-6, host_s=1e-6, program_bytes_s=1e12
)
MATRICES = 1024 * 4096 + 2048 * 1024 + 3 * 1024 * 3072
HEAD = 1024 * 151936


def model(arch: Architecture = QWEN3, *, exact: bool = False, constants: EngineConstants = CONSTANTS) -> PassModel:
    return PassModel(arch, make_cost_model(parse_on("h200x1")), exact=exact, constants=constants)


# -- against measurements


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_measured_row_is_predicted_within_15_percent(row: MeasuredRow) -> None:
    assert abs(row.error(EngineConstants())) <= 0.15


def test_most_rows_were_not_fitted_and_errors_are_as_documented() -> None:
    constants = EngineConstants()
    unseen = [abs(row.error(constants)) for row in ROWS if not row.fitted]
    assert len(unseen) == 12
    assert len(ROWS) == 16
    assert sum(unseen) / len(unseen) <= 0.035
    assert max(abs(row.error(constants)) for row in ROWS) <= WORST_ERROR


def test_constants_are_those_that_the_fitted_rows_give() -> None:
    assert rounded(fit_constants(ROWS)) == EngineConstants()


@pytest.mark.parametrize(("column", "floors"), [(2, EVEN_FLOORS), (3, UNEVEN_FLOORS)], ids=["plain", "exact"])
def test_attention_alone_reads_at_the_cache_bandwidth_and_takes_its_floors(column: int, floors: int) -> None:
    """A line through times over bytes, by least squares of relative errors."""
    measured = np.array(json.loads(MEASURED.read_text(encoding="utf-8"))["attention"])
    constants, times = EngineConstants(), 1e-6 * measured[:, column]
    moved = measured[:, 0] * measured[:, 1] * 2 * 8 * 128 * 2
    terms = np.column_stack([moved, np.ones_like(moved)])
    (per_byte, always), *_ = np.linalg.lstsq(terms / times[:, None], np.ones_like(times))
    assert 1 / per_byte == pytest.approx(constants.cache * BANDWIDTH, rel=0.01)
    assert always == pytest.approx(floors * constants.kernel_s, rel=0.1)
    assert abs(terms @ (per_byte, always) / times - 1).max() < 0.02


def test_starts_are_as_measured() -> None:
    starts = json.loads(MEASURED.read_text(encoding="utf-8"))["starts"]
    assert starts == {"cold_s": COLD_START_S, "warm_s": WARM_START_S}


def test_a_bound_misses_most_rows_by_more_than_15_percent() -> None:
    """The control: what the latency model adds is needed."""
    limit = [
        row.measured / (1e3 * PassModel(row.architecture, make_cost_model(parse_on("h200"), "limit")).seconds(row.span))
        for row in ROWS
        if row.span is not None
    ]
    assert len(limit) == 7
    assert min(limit) > 1.4


# -- by hand


def test_pass_of_one_token_by_hand() -> None:
    """Norms are inside products: five kernels per layer, and three floors of attention, whose keys are split."""
    layers = 28 * (2 * MATRICES / (0.9 * BANDWIDTH) + 2 * MATRICES / (0.7 * PEAK) + 8 * 2e-6)
    cached = 28 * 500 * 2 * 8 * 128 * 2 / (0.8 * BANDWIDTH)
    rotated = 28 * 2 * 32 * 128 * 2 / COPY
    head = 2 * HEAD / (0.9 * BANDWIDTH) + 2 * HEAD / (0.7 * PEAK) + 2e-6
    sampling = 12 * 151936 / COPY + 5 * 2e-6
    assert model().seconds(Span(1, 499, 1)) == pytest.approx(layers + cached + rotated + head + sampling, rel=1e-12)


def test_pass_of_many_sequences_by_hand() -> None:
    """Nine kernels per layer, norms being two of them, and one that lists the keys to share out."""
    layers = 28 * (2 * MATRICES / (0.9 * BANDWIDTH) + 64 * 2 * MATRICES / (0.7 * PEAK) + 9 * 3e-6)
    cached = 28 * 64 * 500 * 2 * 8 * 128 * 2 / (0.8 * BANDWIDTH)
    elementwise = 28 * 64 * 2 * (4 * 1024 + 2 * 32 * 128) / COPY
    head = 2 * HEAD / (0.9 * BANDWIDTH) + 64 * 2 * HEAD / (0.7 * PEAK) + 3e-6
    sampling = 64 * 12 * 151936 / COPY + 5 * 3e-6
    expected = layers + cached + elementwise + head + sampling + 3e-6
    assert model().seconds(Span(64, 499, 1)) == pytest.approx(expected, rel=1e-12)


def test_exact_mode_reads_with_one_program_per_32_outputs() -> None:
    slow = replace(CONSTANTS, program_bytes_s=1e9)
    sizes = ((1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024))
    reading = 28 * sum(2 * inputs * outputs / (outputs / 32 * 1e9) for inputs, outputs in sizes)
    reading += 28 * 500 * 2 * 8 * 128 * 2 / (8 * 1e9)  # eight key heads, one program each
    parts = {point.name: point.seconds for point in model(exact=True, constants=slow).points(Span(1, 499, 1))}
    timed = parts["projections"] + parts["feed-forward"] + parts["attention"]
    assert timed - 28 * 8 * 3e-6 == pytest.approx(reading, rel=1e-3)  # the rest is FLOPs and the rotation
    plain, exact = model(), model(exact=True)
    assert exact.seconds(Span(1, 499, 1)) > plain.seconds(Span(1, 499, 1))
    many = Span(512, 499, 1)
    assert exact.seconds(many) > plain.seconds(many)


@pytest.mark.parametrize(("sequences", "spans"), [(1, 3), (49, 3), (50, 1)])
def test_exact_mode_reads_spans_of_512_keys_by_programs_of_their_own_if_few_sequences_decode(
    sequences: int, spans: int
) -> None:
    """49 sequences with eight key heads have fewer than three programs per processor."""
    slow = replace(CONSTANTS, program_bytes_s=1e9)
    parts = {point.name: point.seconds for point in model(exact=True, constants=slow).points(Span(sequences, 1499, 1))}
    reading = 28 * 1500 * 2 * 128 * 2 / (spans * 1e9)
    assert parts["attention"] == pytest.approx(reading + 28 * 4 * 3e-6, rel=1e-2)


def test_shared_out_keys_take_a_floor_less_and_one_list() -> None:
    floors = replace(CONSTANTS, kernel_s=1.0)
    seven, eight = (model(constants=floors).seconds(Span(count, 500, 1)) for count in (7, 8))
    assert round(seven - eight) == 28 - 1


# -- what must hold


@pytest.mark.parametrize("arch", [QWEN3, MIXTRAL])
@pytest.mark.parametrize("exact", [False, True])
def test_more_work_takes_longer(arch: Architecture, exact: bool) -> None:
    served = model(arch, exact=exact)
    few = [served.seconds(Span(batch, 500, 1)) for batch in (1, 2, 4, 7)]  # 8 in plain mode have other attention
    many = [served.seconds(Span(batch, 500, 1)) for batch in (8, 32, 49, 50, 100, 256, 512, 513, 1000)]
    by_length = [served.seconds(Span(8, start, 1)) for start in (0, 10, 1000, 30000)]
    by_tokens = [served.seconds(Span(1, 0, tokens)) for tokens in (2, 100, 257, 1000, 5000)]
    for times in (few, many, by_length, by_tokens):
        assert times == sorted(times)
        assert len(set(times)) == len(times)


def test_a_pass_of_two_spans_reads_weights_once() -> None:
    served = model()
    decoding, prompt = Span(32, 500, 1), Span(1, 0, 700)
    both = served.seconds(decoding, prompt)
    assert max(served.seconds(decoding), served.seconds(prompt)) < both
    assert both < served.seconds(decoding) + served.seconds(prompt)


def test_prediction_is_never_below_the_bound() -> None:
    bound = PassModel(QWEN3, make_cost_model(parse_on("h200x1"), "limit"))
    for span in (Span(1, 10, 1), Span(256, 3000, 1), Span(8, 0, 4096), Span(3, 1000, 200)):
        for exact in (False, True):
            served = model(exact=exact, constants=EngineConstants())
            assert served.seconds(span) > bound.seconds(span)


def test_times_scale_with_the_chip() -> None:
    chip = known_chip("h200")
    fast = default_cluster(replace(chip, bandwidth_bytes_s=2 * chip.bandwidth_bytes_s), 1)
    floors = replace(CONSTANTS, row_kernel_s=0.0, kernel_s=0.0, products=1e9)
    slow_s = model(constants=floors).seconds(Span(32, 500, 1))
    fast_s = PassModel(QWEN3, make_cost_model(fast), constants=floors).seconds(Span(32, 500, 1))
    assert fast_s == pytest.approx(slow_s / 2, rel=1e-6)
