"""Formats `headway plan --serve`: JSON, and lines of at most 80 columns, fewer on a narrow terminal."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from headway.cli.plan_text import cells_of, cut, label, percent, span, wrapped
from headway.cli.text import columns, count
from headway.plan.flops import active_parameters, parameters
from headway.plan.roofline import HEADS, RooflinePoint, place
from headway.plan.serving import ServingMemory, ServingPlan, ServingPoint
from headway.plan.serving_latency import COLD_START_S, WARM_START_S, PassModel

GIB = 2**30
LETTERS = {"weights": "w", "cache": "k", "context": "x", "free": "."}
NAMES = {"cache": "KV cache"}
CHECKED_CHIP, WORST_ERROR = "h200", 0.072
"""What the prediction was checked on, and its largest error there: 16 rows (benchmarks/plan/fit_serving.py)."""
WIDE = 72
"""Columns that the whole roofline table takes; a narrower terminal gets fewer."""
NO_PRICE = "--price DOLLARS per device-hour gives the cost per million tokens"
MEMORY_BOUND = "memory at any batch: every sequence reads its own cache"


def serving_lines(plan: ServingPlan) -> list[str]:
    """Return all lines but the last."""
    return [
        *wrapped(_title(plan)),
        "",
        *_batches(plan),
        "",
        *memory_lines(plan.memory),
        "",
        *_rooflines(plan),
        "",
        *_facts(plan),
    ]


def _title(plan: ServingPlan) -> str:
    devices = plan.cluster.devices
    servers = ", a server on each" if devices > 1 else ""
    work = f"prompts of {plan.load.prompt:,} tokens, {plan.load.output:,} generated"
    return title(plan.name, plan.model, work) + servers


def title(name: str, model: PassModel, work: str) -> str:
    """Return what is served, how, and on what."""
    arch, cluster = model.architecture, model.costs.cluster
    active = f" ({count(active_parameters(arch))} active)" if arch.experts is not None else ""
    mode = " in exact mode" if model.exact else ""
    devices = f"{cluster.devices:,}~x~{cluster.chip.name.upper()}"
    return f"{name}  {count(parameters(arch))} parameters{active} in {model.dtype}{mode}, {work}, {devices}"


def _batches(plan: ServingPlan) -> Iterator[str]:
    heads = {"step": 9, "per token": 11, "tokens/s": 11, "prefill": 9, "$/M": 9}
    if plan.price is None:
        del heads["$/M"]
    for narrow in ("prefill", "step"):
        if 10 + sum(heads.values()) > columns():
            del heads[narrow]
    widths = list(heads.values())
    yield f"  {'batch':>8}" + cells_of(list(heads), widths)
    for point in plan.points:
        mark = "> " if point is plan.planned else "  "
        cells = {
            "step": span(point.step_s),
            "per token": span(point.time_per_token_s),
            "tokens/s": f"{point.tokens_s:,.0f}",
            "prefill": percent(point.prefill_share),
            "$/M": "" if plan.price is None else dollars(point.cost_per_million(plan.price)),
        }
        yield f"{mark}{point.batch:>8,}" + cells_of([cells[head] for head in heads], widths)
    note = "step: a decoding pass; per token: with prefill of other prompts in between; tokens/s: generated, per device"
    yield from wrapped(f"  {note}")


def memory_lines(memory: ServingMemory) -> Iterator[str]:
    """Yield a bar of what fills a device, and its legend."""
    parts = {name: float(getattr(memory, name)) for name in LETTERS}
    yield f"memory per device: {(memory.capacity - memory.free) / GIB:.1f} of {memory.capacity / GIB:.0f} GB"
    width, before, bar = columns() - 4, 0.0, ""
    for name, size in parts.items():
        before += size
        bar += LETTERS[name] * (round(before / memory.capacity * width) - len(bar))
    yield f"  |{bar[:width]:<{width}}|"
    shown = [f"{LETTERS[name]} {NAMES.get(name, name)} {size / GIB:.1f}" for name, size in parts.items()]
    yield from wrapped("  " + "  ".join(word.replace(" ", "~") for word in shown))


def _rooflines(plan: ServingPlan) -> Iterator[str]:
    peak, bandwidth = plan.peak_flops_s, plan.cluster.chip.bandwidth_bytes_s
    yield from wrapped(
        f"roofline: {bandwidth / 1e12:.3g} TB/s up to {peak / bandwidth:,.0f} FLOP/byte, "
        f"{peak / 1e12:,.4g} TFLOP/s beyond"
    )
    heads = {HEADS[0]: 10, HEADS[1]: 9, "time": 9, HEADS[3]: 9}
    if columns() < WIDE:
        del heads[HEADS[1]], heads[HEADS[3]]
    room = columns() - sum(heads.values()) - 10
    yield f"{'':<{room}}{cells_of(list(heads), list(heads.values()))}  {HEADS[4]}"
    titles = (f"prefill of {plan.load.prompt:,} tokens", f"decoding, batch {plan.planned.batch:,}")
    for title, points in zip(titles, (plan.prefill, plan.decode), strict=True):
        for item in (*place([_sum(title, points)], peak, bandwidth), *place(points, peak, bandwidth)):
            cells = {
                HEADS[0]: f"{item.intensity:,.3g}" if item.intensity < 1000 else f"{item.intensity:,.0f}",
                HEADS[1]: f"{item.flops_s / 1e12:,.4g}",
                "time": span(item.point.seconds),
                HEADS[3]: percent(item.of_time),
            }
            name = cut(f"  {item.point.name}" if item.point.name == title else f"    {item.point.name}", room)
            yield f"{name:<{room}}{cells_of([cells[head] for head in heads], list(heads.values()))}  {item.bound}"


def _sum(name: str, points: Sequence[RooflinePoint]) -> RooflinePoint:
    """Return a pass as one point."""
    sizes = [(point.flops, point.bytes, point.seconds) for point in points]
    flops, moved, seconds = map(sum, zip(*sizes, strict=True))
    return RooflinePoint(name, flops, moved, seconds)


def _facts(plan: ServingPlan) -> Iterator[str]:
    load, planned, memory, devices = plan.load, plan.planned, plan.memory, plan.cluster.devices
    largest, bound = memory.largest_batch, plan.compute_bound_batch
    fits = f"{largest:,} {'sequence' if largest == 1 else 'sequences'} of {load.length:,} tokens"
    per_token = f"{memory.token_bytes / 1024:,.4g} kB per token"
    yield from label("batch", f"{fits} at most: a cache of {memory.cache_tokens:,} tokens, {per_token}")
    bounds = f"memory up to a batch of {bound - 1:,}, by compute beyond" if bound else MEMORY_BOUND
    yield from label("decoding", f"bound by {bounds}")
    yield from label("TTFT", f"{span(plan.ttft_s)} at an idle server")
    each = 1 / planned.time_per_token_s
    users = f"{each:,.0f}" if each >= 10 else f"{each:.2g}"
    times = f"{span(planned.time_per_token_s)}, {users} tokens/s per sequence"
    yield from label("per token", f"{times}, with {planned.batch:,} at a time")
    total = f"{planned.tokens_s * devices:,.0f} tokens/s" + (
        f", {planned.tokens_s:,.0f} per device" if devices > 1 else ""
    )
    requests = planned.tokens_s * devices / load.output
    prompts = f"{requests * load.prompt:,.0f} tokens/s of prompts"
    yield from label("speed", f"{total}, and {prompts}: {rate(requests)} requests/s")
    if plan.price is None:
        yield from label("cost", NO_PRICE)
    else:
        cost = dollars(planned.cost_per_million(plan.price))
        yield from label("cost", f"{cost} per million generated tokens at ${plan.price:,.2f} per device-hour")
    yield from start_and_accuracy(plan.model)


def start_and_accuracy(model: PassModel) -> Iterator[str]:
    """Yield how long a server takes to start, and what the figures are."""
    if model.costs.ideal:
        yield from label(
            "accuracy", "roofline: a bound for each pass; launches, scheduling and sampling are not counted"
        )
        return
    times = f"{WARM_START_S} s to the first tokens, {COLD_START_S} s with kernels to compile"
    yield from label("start", f"{times}, and reading weights: measured once, on an H200's host")
    arch = model.architecture
    like_checked = arch.experts is None and arch.latent is None and arch.window is None and model.dtype == "bfloat16"
    if model.costs.cluster.chip.name == CHECKED_CHIP and like_checked:
        text = f"predicted for Headway's engine: within {percent(WORST_ERROR)} of 16 rows measured on an H200"
    else:
        text = "predicted for Headway's engine, but checked with dense models in bfloat16 on an H200 only"
    yield from label("accuracy", text)


def start_document(model: PassModel) -> dict[str, float] | None:
    """Return seconds to start, by caches of compiled kernels; None for a bound."""
    return None if model.costs.ideal else {"cold": COLD_START_S, "warm": WARM_START_S}


def dollars(amount: float) -> str:
    """Return dollars with three digits, or cents."""
    return f"${amount:,.2f}" if amount >= 1 else f"${amount:.3g}"


# -- JSON


def serving_document(plan: ServingPlan) -> dict[str, Any]:
    """Return everything the text shows as JSON-ready values."""
    memory, planned, devices = plan.memory, plan.planned, plan.cluster.devices
    return {
        "name": plan.name,
        **model_document(plan.model),
        "prompt": plan.load.prompt,
        "output": plan.load.output,
        "memory": memory_document(memory),
        "largest_batch": memory.largest_batch,
        "compute_bound_batch": plan.compute_bound_batch,
        "ttft_s": plan.ttft_s,
        **_point_document(plan, planned),
        "tokens_s": planned.tokens_s * devices,
        "requests_s": planned.tokens_s * devices / plan.load.output,
        "price_per_device_hour": plan.price,
        "batches": [_point_document(plan, point) for point in plan.points],
        "rooflines": {"prefill": _points(plan, plan.prefill), "decode": _points(plan, plan.decode)},
    }


def model_document(model: PassModel) -> dict[str, Any]:
    """Return what is served, and on what."""
    arch, cluster = model.architecture, model.costs.cluster
    return {
        "model": {
            **asdict(arch), "parameters": parameters(arch), "active_parameters": active_parameters(arch)
        },
        "cluster": cluster.as_dict() | {"devices": cluster.devices},
        "fidelity": model.costs.fidelity,
        "dtype": model.dtype,
        "exact": model.exact,
        "start_s": start_document(model),
    }  # fmt: skip


def memory_document(memory: ServingMemory) -> dict[str, Any]:
    """Return the bytes of a device."""
    return asdict(memory) | {"free": memory.free, "cache_tokens": memory.cache_tokens}


def _point_document(plan: ServingPlan, point: ServingPoint) -> dict[str, Any]:
    return {
        "batch": point.batch,
        "step_s": point.step_s,
        "prefill_s": point.prefill_s,
        "prefill_share": point.prefill_share,
        "time_per_token_s": point.time_per_token_s,
        "tokens_s_per_device": point.tokens_s,
        "cost_per_million_tokens": None if plan.price is None else point.cost_per_million(plan.price),
    }


def _points(plan: ServingPlan, points: Sequence[RooflinePoint]) -> list[dict[str, Any]]:
    placed = place(points, plan.peak_flops_s, plan.cluster.chip.bandwidth_bytes_s)
    return [
        {**asdict(item.point), "flops_per_byte": item.intensity, "of_time": item.of_time, "bound": item.bound}
        for item in placed
    ]


def rate(value: float) -> str:
    """Return a rate with three digits, and thousands written out."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
