"""Formats `headway plan` as lines of at most 80 columns, fewer on a narrow terminal, readable without colour."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from headway.cli.plan_text import (
    GIB,
    cells_of,
    gigabytes,
    label,
    money,
    percent,
    span,
    step_time,
    tenths,
    token_rate,
    wrapped,
)
from headway.cli.text import byte_size, columns, count, plural
from headway.plan.flops import parameters
from headway.plan.goodput import WRITE_SHARE, Goodput, daly_interval, goodput
from headway.plan.plan import RESTART_S, CheckpointStorage, Plan, RunForecast
from headway.plan.search import RankedPlan
from headway.plan.settings import Settings
from headway.plan.task import trainer_limits
from headway.recipe import Recipe

SHOWN = 5
"""Plans in the table, besides the best one that the trainer can run."""
LETTERS = {
    "weights": "w", "gradients": "g", "optimizer": "o", "activations": "a", "gathered": "t", "logits": "l",
    "overhead": "x", "free": ".",
}  # fmt: skip
RECOMPUTED = {
    "none": "nothing recomputed",
    "attention": "attention recomputed",
    "selective": "all but GEMMs recomputed",
    "except-attention": "all but attention recomputed",
    "full": "all recomputed",
}
MODELLED = ("exposed communication", "slowed by overlap", "pipeline bubble", "host")
"""Parts of a step's time that no fidelity measures."""
WELL_KNOWN = ("a100", "h100", "h200")
ERRORS = {"dense": 0.08, "other": 0.14}
"""Mean errors of default fidelity on published runs of programs it was not fitted to, from `--against`: of fully
specified dense models on the chips above, and of all others."""
ACCURACY = {
    "limit": "limit fidelity: an upper bound that no run reaches",
    "calibrated": "calibrated fidelity: calibrated to the given runs",
    "measured": "measured fidelity: kernels as measured on this chip, links as modelled",
}


def plan_lines(plan: Plan, recipe: Recipe, runs: Mapping[int, RunForecast]) -> list[str]:
    """Return all lines. `runs` has the forecast of each plan, by its rank."""
    return [
        *wrapped(f"{describe_work(plan)}, {plan.cluster.devices:,}~x~{plan.cluster.chip.name.upper()}"),
        "",
        *_plans(plan, runs),
        "",
        *_waterfall(plan),
        "",
        *_memory(plan),
        "",
        *_facts(plan, recipe),
    ]


def next_lines(plan: Plan, command: str) -> list[str]:
    """Return what to do next."""
    nodes = plan.cluster.nodes
    train = f"{command}; " if command and plan.runnable is not None else ""
    return wrapped(f"next: {train}--explain shows why; --sweep~nodes={nodes}..{8 * nodes} scales it", 6)


# -- the plans


def describe_work(plan: Plan) -> str:
    """Return what is trained."""
    size = count(parameters(plan.architecture))
    return f"{plan.name}  {size} parameters, {plan.seq:,} tokens x {plural(plan.batch, 'sequence')} per step"


def run_of(plan: Plan, other: RankedPlan) -> RunForecast:
    """Return the forecast of the recipe with another plan: the same steps, saves and failures."""
    if other is plan.best:
        return plan.run
    forecast = _goodput(plan, other.estimate.step.seconds)
    hours = forecast.wall_s / 3600 * plan.cluster.devices
    return replace(plan.run, seconds=forecast.wall_s, device_hours=hours, goodput=forecast)


def _goodput(plan: Plan, step_s: float, interval_s: float | None = None) -> Goodput:
    old, devices = plan.run.goodput, plan.cluster.devices
    rate = None if old.mtbf_s == float("inf") else old.mtbf_s * devices / 3600
    return goodput(
        plan.run.steps * step_s,
        devices,
        rate,
        old.checkpoint_s,
        RESTART_S,
        step_s=step_s,
        interval_s=interval_s,
        write_s=old.write_s,
    )


def _plans(plan: Plan, runs: Mapping[int, RunForecast]) -> Iterator[str]:
    priced = plan.run.cost is not None
    heads = ["step", "tokens/s", "MFU", "mem GB", "run", "cost"][: 6 if priced else 5]
    longest = max(len(percent(candidate.estimate.mfu)) for candidate in plan.result.plans)
    widths = [8, 10, max(6, 1 + longest), 8, 7, 9][: len(heads)]
    room = columns() - 2 - sum(widths)
    yield f"  {'plan':<{room}}" + cells_of(heads, widths)
    for rank, candidate in enumerate(plan.result.plans):
        if rank >= SHOWN and not (candidate.runnable and candidate is plan.runnable):
            continue
        estimate, run = candidate.estimate, runs[rank]
        memory = f"{gigabytes(estimate.memory.total)}/{gigabytes(estimate.memory.capacity)}"
        cells = [
            step_time(estimate.step.seconds),
            token_rate(estimate.tokens_s),
            percent(estimate.mfu),
            memory,
            span(run.seconds),
        ]
        mark, name = ">" if rank == 0 else " ", estimate.settings.mesh.describe()
        if len(name) > room:
            yield f"{mark} {name}"
            name, mark = "", " "
        yield f"{mark} {name:<{room}}" + cells_of([*cells, money(run.cost)][: len(heads)], widths)
        reason = "" if rank == 0 and len(plan.result.plans) == 1 else f"; {candidate.reason}"
        note = "; the best that the trainer can run" if rank >= SHOWN else ""
        yield from wrapped(f"    {describe_settings(estimate.settings)}{reason}{note}", 4)


def describe_settings(settings: Settings, short: bool = False) -> str:
    """Return the settings besides the mesh; if short, only unusual ones."""
    parts = [f"microbatch {settings.microbatch}"]
    if settings.recompute != "none" or not short:
        parts.append(RECOMPUTED[settings.recompute] + _in_blocks(settings))
    if settings.mesh.pipeline > 1:
        parts.append(settings.schedule + (f" x{settings.chunks}" if settings.chunks > 1 else ""))
    if settings.mesh.shard * settings.mesh.context > 1 and not (short and settings.zero == 3):
        parts.append(f"ZeRO {settings.zero}")
    parts += ["weights kept"] * settings.keeps_weights + ["reduced each"] * settings.reduces_each
    if settings.precision not in ("bf16", "float32"):
        parts.append(settings.precision)
    return ", ".join(parts)


def _in_blocks(settings: Settings) -> str:
    """Return how many layers per device, if not all."""
    some = settings.recompute_blocks if settings.recompute != "none" else None
    return "" if some is None else f" in {some} {'layer' if some == 1 else 'layers'}"


# -- where time and memory go


def _waterfall(plan: Plan) -> Iterator[str]:
    step, width = plan.best.estimate.step, columns() - 42
    yield f"{'time of a step':<23}{'':>7}{step_time(step.seconds):>9} |{'#' * width}|"
    before = 0.0
    for name, seconds in step.accounts.items():
        if seconds <= 1e-9 * step.seconds:
            continue
        start, end = round(before / step.seconds * width), round((before + seconds) / step.seconds * width)
        bar = " " * start + "#" * (end - start)
        mark = "~" if plan.fidelity == "measured" and name in MODELLED else ""
        if start == end:
            bar = " " * min(start, width - 1) + "."
        yield f"  {name:<21}{percent(seconds / step.seconds):>7}{mark + step_time(seconds):>9} |{bar:<{width}}|"
        before += seconds
    if plan.fidelity == "measured":
        yield "  ~ modelled; the other times are of kernels measured on this chip"


def _memory(plan: Plan) -> Iterator[str]:
    memory = plan.best.estimate.memory
    parts = {name: getattr(memory, name) for name in LETTERS if name != "free"}
    parts["free"] = max(0.0, memory.capacity - memory.total)
    yield f"memory per device: {gigabytes(memory.total)} of {gigabytes(memory.capacity)} GB"
    width, before, bar = columns() - 4, 0.0, ""
    for name, size in parts.items():
        before += size
        bar += LETTERS[name] * (round(before / memory.capacity * width) - len(bar))
    yield f"  |{bar[:width]:<{width}}|"
    shown = [f"{LETTERS[name]} {name} {size / GIB:.1f}" for name, size in parts.items() if size >= 0.05 * GIB]
    yield from wrapped("  " + "  ".join(word.replace(" ", "~") for word in shown))


# -- the run


def _facts(plan: Plan, recipe: Recipe) -> Iterator[str]:
    best, run = plan.best.estimate, plan.run
    peak = f"{best.peak_flops_s / 1e12:,.4g} TFLOP/s"
    yield from label("speed", f"{best.tokens_s:,.0f} tokens/s, {best.tokens_s_per_device:,.0f} per device")
    counted = "attention counted in full: it is not causal"
    if best.mfu != best.mfu_full_attention:  # equal where attention is not causal
        counted = f"causal attention counted half; {tenths(best.mfu_full_attention)} counting full attention"
    yield from label("MFU", f"{tenths(best.mfu)} of {peak}, {counted}")
    hours = f"{run.device_hours:,.0f}" if run.device_hours >= 10 else f"{run.device_hours:.3g}"
    yield from label(
        "run", f"{plural(run.steps, 'step')}, {count(run.tokens)} tokens: {span(run.seconds)}, {hours} device-hours"
    )
    if run.cost is not None:
        yield from label("cost", f"{money(run.cost)} at ${run.price_per_device_hour:,.2f} per device-hour")
    yield from _goodput_lines(plan, recipe)
    yield from label("trainer", _trainer(plan))
    yield from label("accuracy", _accuracy(plan))


def _goodput_lines(plan: Plan, recipe: Recipe) -> Iterator[str]:
    expected = plan.run.goodput
    lost = ", ".join(f"{name} {percent(share)}" for name, share in expected.accounts.items() if share >= 5e-5)
    yield from label("goodput", tenths(expected.share) + (f"; lost: {lost}" if lost else ""))
    own = recipe.checkpoint.every_steps
    stated = "auto" if own == "auto" else plural(own, "step") if own else "the last step only"
    if expected.interval_steps is None or expected.interval_s is None:
        yield from label("checkpoint", f"at the end suffices: failure rate unknown; the recipe has {stated}")
        return
    failures = f"{expected.failures:.1f}" if expected.failures < 10 else f"{expected.failures:,.0f}"
    yield from label("failures", f"job MTBF {span(expected.mtbf_s)}; {failures} expected in the run")
    every = f"every {_steps(expected.interval_steps)}, {span(expected.interval_s)}: {_why(expected)}"
    if own in (expected.interval_steps, "auto"):
        yield from label("checkpoint", f"{every}, as in the recipe")
    else:
        yield from label("checkpoint", f"{every}; the recipe's {stated} {_extra_cost(plan, int(own))}")
    yield from label("storage", _storage(plan.run.storage))


def _steps(number: int) -> str:
    return f"{number:,} {'step' if number == 1 else 'steps'}"


def _why(expected: Goodput) -> str:
    """Return what decides how often to save."""
    stall = f"saves that stall {span(expected.checkpoint_s)}"
    daly = span(daly_interval(expected.checkpoint_s, expected.mtbf_s))
    match expected.bound:
        case "write bandwidth":
            share = percent(WRITE_SHARE).replace(" ", "~")
            writes = f"storage writes a save in {span(expected.write_s)}, for at most {share} of the time"
            return f"bound by write bandwidth: {writes}; by stalls of {span(expected.checkpoint_s)} alone, {daly}"
        case "step":
            return f"bound by the step: Daly's optimum for {stall} is {daly}"
        case "run":
            return f"bound by the run: it ends before the {daly} of Daly's optimum for {stall}"
        case _:
            return f"bound by stalls: Daly's optimum for {stall}"


def _storage(storage: CheckpointStorage) -> str:
    """Return what the checkpoints take, and what to keep if that is too much."""
    multiples = f" and every {_steps(storage.keep_every_steps)}" if storage.keep_every_steps else ""
    kept = f"the last {storage.keep_last}{multiples}, and one being written"
    line = f"{byte_size(storage.peak_bytes)}: {byte_size(storage.save_bytes)} per save; {kept}"
    if storage.capacity_bytes is None:
        return line
    total = byte_size(storage.capacity_bytes)
    return (
        f"{line}; of {total}" if storage.advice is None else f"{line}; bound by storage: of {total}, {storage.advice}"
    )


def _extra_cost(plan: Plan, own: int) -> str:
    """Return the extra cost of the recipe's own interval."""
    step_s = plan.best.estimate.step.seconds
    recipe_goodput = _goodput(plan, step_s, (own or plan.run.steps) * step_s)
    more = recipe_goodput.wall_s / plan.run.goodput.wall_s - 1
    return f"would take {percent(more)} longer" if more >= 5e-5 else "cost the same"


def _trainer(plan: Plan) -> str:
    best, runnable = plan.best, plan.runnable
    limits, mesh = trainer_limits(plan.architecture), best.estimate.settings.mesh
    if best.runnable:
        return "the trainer can run the best plan"
    if runnable is None and best.estimate.settings.precision not in ("bf16", "float32", "fp8"):
        return f"the trainer does not support {best.estimate.settings.precision}"
    *others, last = limits.axes
    axes = f"{', '.join(others)} and {last} axes"
    cut = mesh.tensor > 1 and "tensor" not in limits.axes
    if runnable is None and cut:
        return "the trainer supports no tensor axis with experts or latent attention"
    if runnable is None and len(plan.result.plans) == 1:
        return f"the trainer cannot run this plan: it supports {axes}, with weights sharded over the whole shard axis"
    if runnable is None:
        return f"the trainer supports {axes}; none of their plans fits here"
    slower = runnable.estimate.step.seconds / best.estimate.step.seconds - 1
    behind = f"{percent(slower)} slower" if slower >= 5e-4 else "as fast"
    settings = runnable.estimate.settings
    what = f"{settings.mesh.describe()}, {describe_settings(settings)}"
    zero = best.estimate.settings.zero
    why = ", which has a tensor axis beside experts or latent attention" if cut else ""
    why = why or (f", as it has no ZeRO {zero}" if mesh.owners > 1 and zero not in limits.zero else "")
    return f"the trainer cannot run the best plan{why}; it can run {what}: {behind}"


def _accuracy(plan: Plan) -> str:
    chip = plan.cluster.chip.name
    if chip == "cpu" and plan.fidelity != "limit":
        return "CPU figures are assumed: expect errors of a factor"
    if plan.fidelity in ACCURACY:
        return ACCURACY[plan.fidelity]
    dense = chip.startswith(WELL_KNOWN) and plan.architecture.experts is None
    runs = "dense runs" if dense else "other chips and MoE"
    error = f"{100 * ERRORS['dense' if dense else 'other']:.0f} % mean error on {runs}"
    return f"{plan.fidelity} fidelity: {error} it was not fitted to (docs/guides/plan.md)"
