"""Formats `headway plan --serve --requests N`: a closed workload, as lines and as JSON."""

from collections.abc import Iterator
from typing import Any

from headway.cli.plan_text import label, percent, span, wrapped
from headway.cli.serving_view import (
    NO_PRICE,
    dollars,
    memory_document,
    memory_lines,
    model_document,
    rate,
    start_and_accuracy,
    title,
)
from headway.cli.text import plural
from headway.plan.serving import WorkloadPlan
from headway.plan.serving_workload import Request, prompt_flops

TTFT_SHARES = {"median": 0.5, "p99": 0.99}


def workload_lines(plan: WorkloadPlan) -> list[str]:
    """Return all lines but the last."""
    lengths = f"prompts of {_spread([r.prompt for r in plan.requests])} tokens, "
    lengths += f"{_spread([r.output for r in plan.requests])} generated"
    work = f"{plural(len(plan.requests), 'request')} at once, {lengths}"
    return [*wrapped(title(plan.name, plan.model, work)), "", *memory_lines(plan.memory), "", *_facts(plan)]


def _spread(lengths: list[int]) -> str:
    low, high = min(lengths), max(lengths)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _facts(plan: WorkloadPlan) -> Iterator[str]:
    planned = plan.forecast
    requests_s = rate(planned.requests / planned.seconds)
    yield from label("speed", f"{planned.tokens_s:,.0f} tokens/s generated, {requests_s} requests/s")
    tokens = f"{planned.prompt_tokens:,} tokens of prompts and {planned.output_tokens:,} generated"
    yield from label("time", f"{span(planned.seconds)} for {tokens}")
    prefill = f"{_passes(planned.prefill_passes)} with prompts, {_prefill_flops_s(plan) / 1e12:,.0f} TFLOP/s"
    yield from label("prefill", f"{_share(plan, planned.prefill_s)}: {prefill}")
    if planned.decode_passes:
        passes = f"{_passes(planned.decode_passes)} of {planned.mean_batch:,.3g} sequences on average"
        yield from label("decoding", f"{_share(plan, planned.decode_s)}: {passes}")
    if planned.host_s:
        yield from label("host", f"{_share(plan, planned.host_s)}: the device waits for Python")
    first = [f"{name} {span(planned.first_token_s(share))}" for name, share in TTFT_SHARES.items()]
    yield from label("TTFT", ", ".join(first))
    limits = plan.limits
    most = f"{limits.max_sequences:,} sequences at a time, {limits.max_batch_tokens:,} tokens per pass"
    yield from label("limits", f"{most}, a cache of {limits.cache_tokens:,} tokens")
    if plan.price is None or plan.cost is None:
        yield from label("cost", NO_PRICE)
    else:
        per_million = dollars(plan.cost / planned.output_tokens * 1e6)
        at = f"${plan.price:,.2f} per device-hour"
        yield from label("cost", f"{dollars(plan.cost)}, {per_million} per million generated tokens, at {at}")
    yield from start_and_accuracy(plan.model)


def _share(plan: WorkloadPlan, seconds: float) -> str:
    return f"{span(seconds)}, {percent(seconds / plan.forecast.seconds)}"


def _passes(number: int) -> str:
    return f"{number:,} pass{'es' * (number != 1)}"


def _prefill_flops_s(plan: WorkloadPlan) -> float:
    return prompt_flops(plan.model, plan.requests) / plan.forecast.prefill_s


def workload_document(plan: WorkloadPlan) -> dict[str, Any]:
    """Return everything the text shows as JSON-ready values."""
    planned = plan.forecast
    return {
        "name": plan.name,
        **model_document(plan.model),
        "requests": planned.requests,
        "lengths": {name: _lengths(plan.requests, name) for name in ("prompt", "output")},
        "memory": memory_document(plan.memory),
        "max_sequences": plan.limits.max_sequences,
        "max_batch_tokens": plan.limits.max_batch_tokens,
        "prompt_tokens": planned.prompt_tokens,
        "output_tokens": planned.output_tokens,
        "seconds": planned.seconds,
        "prefill_s": planned.prefill_s,
        "decode_s": planned.decode_s,
        "host_s": planned.host_s,
        "prefill_passes": planned.prefill_passes,
        "decode_passes": planned.decode_passes,
        "mean_batch": planned.mean_batch,
        "prefill_flops_s": _prefill_flops_s(plan),
        "tokens_s": planned.tokens_s,
        "requests_s": planned.requests / planned.seconds,
        "ttft_s": {name: planned.first_token_s(share) for name, share in TTFT_SHARES.items()},
        "price_per_device_hour": plan.price,
        "cost": plan.cost,
        "cost_per_million_tokens": None if plan.cost is None else plan.cost / planned.output_tokens * 1e6,
    }


def _lengths(requests: tuple[Request, ...], name: str) -> list[int]:
    lengths = [getattr(request, name) for request in requests]
    return [min(lengths), max(lengths)]
