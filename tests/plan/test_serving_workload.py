"""Closed workloads: sums by hand, and limits that hold. tests/inference holds the schedule against the engine's."""

from collections.abc import Iterator
from itertools import pairwise

import pytest

from headway.errors import UsageError
from headway.hardware import parse_on
from headway.plan.architecture import Architecture
from headway.plan.costs import make_cost_model
from headway.plan.serving import plan_workload
from headway.plan.serving_latency import PassModel
from headway.plan.serving_passes import Span, pass_operations
from headway.plan.serving_workload import EngineLimits, Request, forecast, prompt_flops, uniform_requests

LLAMA_1B = Architecture(16, 2048, 32, 8, 64, 8192, 128256)
AMPLE = EngineLimits(256, 2048, 10**9)


def served(fidelity: str = "default") -> PassModel:
    return PassModel(LLAMA_1B, make_cost_model(parse_on("h200x1"), fidelity))  # type: ignore[arg-type]


def test_one_request_is_a_prefill_and_a_pass_per_further_token() -> None:
    model = served()
    planned = forecast(model, [Request(100, 20)], AMPLE)
    assert planned.prefill_s == pytest.approx(model.seconds(Span(1, 0, 100)))
    assert planned.decode_s == pytest.approx(sum(model.seconds(Span(1, start, 1)) for start in range(100, 119)))
    assert planned.host_s == pytest.approx((1 + 3) * model.host_s(1))  # rounds of 8, 8 and 3 passes
    assert planned.first_tokens_s == pytest.approx((planned.prefill_s + model.host_s(1),))
    assert (planned.prefill_passes, planned.decode_passes, planned.mean_batch) == (1, 19, 1)


def test_prompts_of_one_pass_share_its_weights_and_later_ones_wait() -> None:
    model = served()
    planned = forecast(model, [Request(1000, 1)] * 4, AMPLE)  # 2,048 tokens: two prompts and 48 of the third
    passes = [
        model.seconds(Span(1, 0, 48, ends=False), Span(2, 0, 1000)),
        model.seconds(Span(1, 48, 952), Span(1, 0, 1000)),
    ]
    assert planned.prefill_s == pytest.approx(sum(passes))
    assert planned.first_tokens_s[0] == planned.first_tokens_s[1] < planned.first_tokens_s[2]
    assert planned.decode_s == 0
    assert planned.tokens_s == pytest.approx(4 / planned.seconds)


def test_a_bound_has_no_time_of_the_host_and_is_faster() -> None:
    requests = uniform_requests(40, (50, 500), (10, 100))
    bound, predicted = (forecast(served(fidelity), requests, AMPLE) for fidelity in ("limit", "default"))
    assert bound.host_s == 0 < predicted.host_s
    assert bound.seconds < predicted.seconds < 5 * bound.seconds
    assert (bound.prefill_passes, bound.decode_passes) == (predicted.prefill_passes, predicted.decode_passes)


def test_a_small_cache_and_few_sequences_take_longer() -> None:
    requests = uniform_requests(40, (50, 500), (10, 100))
    times = [
        forecast(served(), requests, EngineLimits(sequences, 2048, cache)).seconds
        for sequences, cache in ((40, 10**6), (8, 10**6), (8, 1500), (1, 10**6))
    ]
    assert times == sorted(times)
    assert len(set(times)) == 4


def test_sequences_never_have_more_tokens_than_the_cache() -> None:
    largest = 0.0

    class Watched:
        def seconds(self, *spans: Span) -> float:
            nonlocal largest
            largest = max(largest, sum(span.sequences * (span.start + span.tokens) for span in spans))
            return 1.0

        def host_s(self, sequences: float) -> float:
            return 0.0

    forecast(Watched(), uniform_requests(200, (50, 500), (10, 300)), EngineLimits(64, 2048, 5000))  # type: ignore[arg-type]
    assert 2500 < largest <= 5000


@pytest.mark.parametrize("count", [1, 2, 7, 256])
def test_lengths_are_spread_evenly_and_reproducible(count: int) -> None:
    requests = uniform_requests(count, (100, 1024), (5, 5))
    assert requests == uniform_requests(count, (100, 1024), (5, 5))
    prompts = sorted(request.prompt for request in requests)
    assert prompts[0] == 100
    assert count == 1 or prompts[-1] == 1024
    gaps = [after - before for before, after in pairwise(prompts)]
    assert not gaps or max(gaps) - min(gaps) <= 1
    assert {request.output for request in requests} == {5}


def test_prompt_flops_are_those_of_whole_prompts() -> None:
    def passes() -> Iterator[float]:
        for prompt in (7, 7, 50):
            for _, layers, part in pass_operations(LLAMA_1B, "bfloat16", Span(1, 0, prompt, ends=False)):
                yield layers * part.flops

    requests = [Request(7, 1), Request(50, 9), Request(7, 3)]
    assert prompt_flops(served(), requests) == pytest.approx(sum(passes()))


def test_plan_has_the_engines_limits_and_refuses_what_can_never_start() -> None:
    planned = plan_workload("llama", served(), uniform_requests(4, (10, 20), (2, 3)), price=3600.0)
    assert (planned.limits.max_sequences, planned.limits.max_batch_tokens) == (256, 2048)
    assert planned.cost == pytest.approx(planned.forecast.seconds)
    few = plan_workload("llama", served(), [Request(10, 2)], concurrency=3000, pass_tokens=100)
    assert few.limits.max_batch_tokens == 3001  # prompts need room beside a token of every sequence
    with pytest.raises(UsageError, match="does not fit"):
        plan_workload("llama", served(), [Request(10**8, 1)])
