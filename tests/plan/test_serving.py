"""Plans of inference: held against sums done by hand, brute force and a simulated server."""

import re
from dataclasses import replace
from itertools import combinations, product

import pytest

from headway.errors import UsageError
from headway.hardware import Cluster, default_cluster, known_chip, parse_on
from headway.plan.architecture import Architecture, ExpertShape, LatentAttention
from headway.plan.costs import make_cost_model
from headway.plan.flops import parameters
from headway.plan.serving import (
    PASS_TOKENS,
    ServingLoad,
    ServingPlan,
    ServingPoint,
    plan_serving,
    prefill_passes,
    serving_memory,
)
from headway.plan.serving_latency import PassModel
from headway.plan.serving_passes import DTYPES, Span, distinct_experts, pass_operations

LLAMA_1B = Architecture(16, 2048, 32, 8, 64, 8192, 128256)
MIXTRAL = Architecture(32, 4096, 32, 8, 128, 14336, 32000, tied=False, experts=ExpertShape(8, 2, 14336))
DEEPSEEK = Architecture(
    61, 7168, 128, 128, 192, 18432, 129280, tied=False,
    experts=ExpertShape(256, 8, 2048, shared=1, dense_layers=3), latent=LatentAttention(1536, 512, 64, 128),
)  # fmt: skip
WINDOWED = Architecture(6, 64, 4, 2, 16, 128, 512, window=7, windowed_layers=5)
PEAK, BANDWIDTH, GIB = 989.5e12, 4.8e12, 2**30
"""Of an H200: dense bfloat16 FLOP/s and bytes per second."""
USUAL = ServingLoad(1000, 300)


def planned(
    arch: Architecture,
    on: str | Cluster = "h200x1",
    load: ServingLoad = USUAL,
    fidelity: str = "limit",
    dtype: str = "bfloat16",
    **options: object,
) -> ServingPlan:
    cluster = parse_on(on) if isinstance(on, str) else on
    model = PassModel(arch, make_cost_model(cluster, fidelity), dtype)  # type: ignore[arg-type]
    return plan_serving("model", model, load, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("arch", [LLAMA_1B, MIXTRAL])
@pytest.mark.parametrize("fidelity", ["limit", "default"])
@pytest.mark.parametrize("load", [USUAL, ServingLoad(4000, 2), ServingLoad(10, 2000)])
def test_planned_batch_is_the_smallest_that_is_within_a_percent_of_the_fastest(
    arch: Architecture, fidelity: str, load: ServingLoad
) -> None:
    plan = planned(arch, load=load, fidelity=fidelity)
    fastest = max(point.tokens_s for point in plan.points)
    assert plan.planned.tokens_s >= 0.99 * fastest
    assert all(point.tokens_s < 0.99 * fastest for point in plan.points if point.batch < plan.planned.batch)
    assert plan.points[-1].batch == plan.memory.largest_batch, "what fits is shown in any case"


def test_dense_model_by_hand() -> None:
    """Llama 3.2 1B in bfloat16 on an H200, one sequence at a time: decoding waits for memory, prefill computes."""
    plan = planned(LLAMA_1B, concurrency=1, price=3.6)
    layer = 2048 * (2048 + 512 + 512) + 2048 * 2048 + 3 * 2048 * 8192
    head = 128256 * 2048
    token = 16 * 2 * 8 * 64 * 2  # layers, keys and values, heads, size, bytes
    assert (plan.memory.weights, plan.memory.token_bytes) == (2 * 1_235_814_400, token)
    blocks = int(0.9 * (141 * GIB - GIB / 2 - 2 * 1_235_814_400) / (64 * token))
    assert plan.memory.cache_tokens == 64 * blocks
    assert plan.memory.largest_batch == blocks // 21 == 3032  # 1,300 tokens are 21 blocks of 64
    step = 2 * (16 * layer + head) / BANDWIDTH + (1000 + 150) * token / BANDWIDTH
    assert plan.planned.step_s == pytest.approx(step, rel=1e-12)
    pairs = 1000 * 1001 / 2
    ttft = (2 * 1000 * 16 * layer + 16 * 32 * 4 * 64 * pairs) / PEAK + 2 * head / BANDWIDTH
    assert plan.ttft_s == pytest.approx(ttft, rel=1e-12)
    tokens_s = 300 / (ttft + 299 * step)
    assert plan.planned.tokens_s == pytest.approx(tokens_s, rel=1e-12)
    assert plan.planned.cost_per_million(3.6) == pytest.approx(0.001 / tokens_s * 1e6)


def test_moe_model_by_hand() -> None:
    """Mixtral 8x7B, four sequences: of 8 experts, 8 * (1 - (6/8)**4) = 5.46875 are read on average."""
    plan = planned(MIXTRAL, concurrency=4)
    assert plan.memory.weights == 2 * 46_702_792_704  # the published model
    projections = 4096 * (4096 + 2 * 1024) + 4096 * 4096
    read = 32 * (projections + 4096 * 8 + 5.46875 * 3 * 4096 * 14336) + 32000 * 4096
    cached = 4 * 1150 * 32 * 2 * 8 * 128
    assert plan.planned.step_s == pytest.approx(2 * (read + cached) / BANDWIDTH, rel=1e-12)
    experts = next(point for point in plan.decode if point.name == "experts")
    assert experts.flops == pytest.approx(2 * 4 * 32 * 2 * 3 * 4096 * 14336)  # two experts per token


@pytest.mark.parametrize(("count", "top_k", "tokens"), [(4, 2, 1), (4, 2, 2), (5, 1, 4), (4, 3, 3), (3, 3, 2)])
def test_distinct_experts_are_the_mean_over_all_routings(count: int, top_k: int, tokens: int) -> None:
    routings = list(product(combinations(range(count), top_k), repeat=tokens))
    mean = sum(len(set().union(*map(set, routing))) for routing in routings) / len(routings)
    assert distinct_experts(count, top_k, tokens) == pytest.approx(mean)


@pytest.mark.parametrize("start", [0, 3, 6, 7, 20])
@pytest.mark.parametrize("tokens", [1, 2, 5, 30])
def test_windowed_attention_counts_what_each_token_sees(start: int, tokens: int) -> None:
    step = Span(3, start, tokens)
    parts = [
        (layers, part) for group, layers, part in pass_operations(WINDOWED, "bfloat16", step) if group == "attention"
    ]
    seen = {None: [range(place + 1) for place in range(start, start + tokens)]}
    seen[7] = [range(max(0, place - 6), place + 1) for place in range(start, start + tokens)]
    for (layers, part), (window, count) in zip(parts, ((None, 1), (7, 5)), strict=True):
        assert layers == count
        assert part.flops == 3 * 4 * 4 * 16 * sum(map(len, seen[window]))
        assert part.bytes == 3 * 2 * (2 * 2 * 16) * len(set().union(*map(set, seen[window])))


def test_prompts_longer_than_a_pass_go_in_chunks_of_the_same_flops() -> None:
    long = ServingLoad(3 * PASS_TOKENS + 100, 1)
    passes = list(prefill_passes(long))
    assert [step.tokens for step in passes] == [2048, 2048, 2048, 100]
    assert [step.ends for step in passes] == [False, False, False, True]
    whole = Span(1, 0, long.prompt)

    def flops(steps: list[Span]) -> float:
        return sum(
            layers * part.flops for step in steps for _, layers, part in pass_operations(LLAMA_1B, "bfloat16", step)
        )

    assert flops(passes) == pytest.approx(flops([whole]), rel=1e-12)


def test_latent_attention_reads_its_narrow_cache() -> None:
    """DeepSeek-V3: 512 + 64 elements per token and layer; queries of 128 heads meet them as they are."""
    (part,) = [part for group, _, part in pass_operations(DEEPSEEK, "bfloat16", Span(2, 99, 1)) if group == "attention"]
    assert part.bytes == 2 * 100 * (512 + 64) * 2
    assert part.flops == 2 * 2 * 100 * 128 * (512 + 64 + 512)


def test_throughput_is_that_of_a_simulated_server() -> None:
    """Four slots, started apart: a decoding pass at a time, and a prefill for each sequence that has ended."""
    point = ServingPoint(batch=4, load=ServingLoad(10, 6), step_s=0.01, prefill_s=0.004)
    left, clock, tokens = [1, 2, 3, 5], 0.0, 0
    for _ in range(5000):
        clock, tokens, left = clock + 0.01, tokens + 4, [steps - 1 for steps in left]
        for slot, steps in enumerate(left):
            if steps == 0:  # the next prompt: its prefill gives the first token, five steps the others
                clock, tokens, left[slot] = clock + 0.004, tokens + 1, 5
    assert point.tokens_s == pytest.approx(tokens / clock, rel=1e-3)
    assert point.prefill_share == pytest.approx(0.016 / (0.016 + 0.05))
    assert point.time_per_token_s == pytest.approx(4 / point.tokens_s)


@pytest.mark.parametrize("arch", [LLAMA_1B, MIXTRAL, WINDOWED])
def test_longer_sequences_leave_room_for_fewer(arch: Architecture) -> None:
    chip = known_chip("h200")
    sizes = [serving_memory(arch, chip, ServingLoad(prompt, 300), "bfloat16") for prompt in (1, 100, 1000, 9000, 90000)]
    batches = [memory.largest_batch for memory in sizes]
    assert batches == sorted(batches, reverse=True)
    assert batches[0] > batches[-1]
    for memory in sizes:
        assert memory.weights + memory.context + memory.cache + memory.free == pytest.approx(memory.capacity)
        assert memory.largest_batch * memory.sequence_tokens * memory.token_bytes <= memory.cache
        assert memory.free >= 0.099 * (memory.capacity - memory.weights - memory.context)


@pytest.mark.parametrize("fidelity", ["limit", "default"])
@pytest.mark.parametrize("arch", [LLAMA_1B, MIXTRAL])
def test_more_bandwidth_and_smaller_batches_decode_faster(arch: Architecture, fidelity: str) -> None:
    chip = known_chip("h200")
    fast = default_cluster(replace(chip, bandwidth_bytes_s=2 * chip.bandwidth_bytes_s), 1)
    slow_plan, fast_plan = planned(arch, fidelity=fidelity), planned(arch, fast, fidelity=fidelity)
    for slow_point, fast_point in zip(slow_plan.points, fast_plan.points, strict=True):
        assert fast_point.step_s < slow_point.step_s
        assert fast_point.tokens_s > slow_point.tokens_s
    steps = [point.step_s for point in slow_plan.points]
    assert steps == sorted(steps)
    assert fast_plan.ttft_s <= slow_plan.ttft_s


@pytest.mark.parametrize("arch", [LLAMA_1B, MIXTRAL])
def test_the_roofline_is_a_bound_of_the_prediction(arch: Architecture) -> None:
    for bound, predicted in zip(planned(arch).points, planned(arch, fidelity="default").points, strict=True):
        assert bound.step_s < predicted.step_s < 4 * bound.step_s
        assert bound.prefill_s < predicted.prefill_s < 4 * bound.prefill_s


@pytest.mark.parametrize(("arch", "on"), [(LLAMA_1B, "h200x1"), (MIXTRAL, "h200x1"), (LLAMA_1B, "rtx4090")])
def test_compute_bound_batch_is_where_the_intensity_passes_the_ridge(arch: Architecture, on: str) -> None:
    load = ServingLoad(8, 8)
    plan = planned(arch, on, load, concurrency=1)
    batch, chip = plan.compute_bound_batch, plan.cluster.chip
    assert batch is not None

    def intensity(size: int) -> float:
        points = plan.model.points(Span(size, load.mean_context - 1, 1))
        return sum(point.flops for point in points) / sum(point.bytes for point in points)

    ridge = chip.peak("bfloat16") / chip.bandwidth_bytes_s
    assert intensity(batch - 1) < ridge <= intensity(batch)
    assert planned(LLAMA_1B, load=ServingLoad(100_000, 10), concurrency=1).compute_bound_batch is None


@pytest.mark.parametrize(
    ("arch", "on", "load", "options"),
    [
        (MIXTRAL, "h100x1", USUAL, {}),
        (MIXTRAL, "h200x1", USUAL, {"concurrency": 400}),
        (LLAMA_1B, "rtx4090", ServingLoad(900_000, 100_000), {}),
        (LLAMA_1B, "rtx4090", ServingLoad(500_000, 10_000), {"dtype": "float32"}),
    ],
    ids=["weights", "concurrency", "length", "dtype"],
)
def test_what_does_not_fit_says_what_would(arch: Architecture, on: str, load: ServingLoad, options: dict) -> None:
    with pytest.raises(UsageError, match=f"model does not fit on {known_chip(on.split('x1')[0]).name}: ") as caught:
        planned(arch, on, load, **options)
    hint = caught.value.hint or ""
    assert hint.startswith("what fits: ")
    changes = 0
    if match := re.search(r"--on (\S+)", hint):
        changes += planned(arch, match[1], load, **options).memory.largest_batch >= options.get("concurrency", 1)
    if match := re.search(r"--concurrency (\d+)", hint):
        changes += planned(arch, on, load, concurrency=int(match[1])).planned.batch == int(match[1])
        with pytest.raises(UsageError):
            planned(arch, on, load, concurrency=int(match[1]) + 1)
    if match := re.search(r"of ([\d,]+) tokens together", hint):
        total = int(match[1].replace(",", ""))
        changes += planned(arch, on, ServingLoad(total - 1, 1), **options).memory.largest_batch >= 1
        with pytest.raises(UsageError):
            planned(arch, on, ServingLoad(total, 1), **options)
    if "--dtype bfloat16" in hint:
        changes += planned(arch, on, load).memory.largest_batch >= 1
    assert changes == hint.count("--") - hint.count("--output")


def test_a_model_for_which_no_chip_is_large_enough() -> None:
    with pytest.raises(UsageError) as caught:
        planned(DEEPSEEK)
    assert "1250.4 GB of weights" in caught.value.message
    assert caught.value.hint == "no known chip holds it, and a server uses one device"


@pytest.mark.parametrize("dtype", DTYPES)
def test_precision_decides_bytes_and_peak(dtype: str) -> None:
    plan = planned(LLAMA_1B, dtype=dtype)
    width = 4 if dtype == "float32" else 2
    assert plan.memory.weights == width * parameters(LLAMA_1B)
    assert plan.peak_flops_s == (67e12 if dtype == "float32" else PEAK)
