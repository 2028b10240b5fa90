"""Formats `headway plan` as lines of at most 80 columns, fewer on a narrow terminal, readable without colour."""

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from headway.cli.text import byte_size, columns, count, plural
from headway.plan.explain import Cell, ExplainTable
from headway.plan.flops import parameters
from headway.plan.goodput import WRITE_SHARE, Goodput, daly_interval, goodput
from headway.plan.plan import RESTART_S, CheckpointStorage, Plan, RunForecast
from headway.plan.scaling import ScalingPoint, efficiency
from headway.plan.search import RankedPlan
from headway.plan.settings import Settings
from headway.plan.task import RUNNABLE
from headway.recipe import Recipe

GIB = 2**30
DAY_S = 86400.0
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
        *wrapped(f"{_work(plan)}, {plan.cluster.devices:,}~x~{plan.cluster.chip.name.upper()}"),
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


# -- numbers


def span(seconds: float) -> str:
    """Return a time with three digits and its unit."""
    for limit, size, unit in ((2 * DAY_S, DAY_S, "d"), (7200, 3600, "h"), (180, 60, "min"), (0.9995, 1, "s")):
        if seconds >= limit:
            return f"{_three(seconds / size)} {unit}"
    return f"{_three(seconds * 1e3)} ms" if seconds >= 0.9995e-3 or not seconds else f"{_three(seconds * 1e6)} us"


def _step(seconds: float) -> str:
    """Return the time of a step, never in minutes."""
    return f"{_three(seconds)} s" if seconds >= 0.9995 else span(seconds)


def _three(number: float) -> str:
    """Return three digits without an exponent."""
    if number >= 99.95:
        return f"{number:,.0f}"
    return f"{number:.1f}" if number >= 9.995 else f"{number:.2f}"


def percent(share: float) -> str:
    """Return a share: 52 %, 3.1 %, 0.04 %."""
    size = abs(share)
    digits = 0 if size >= 0.0995 else 1 if size >= 0.00995 or size < 5e-5 else 2
    return f"{100 * share:.{digits}f} %"


def _tenths(share: float) -> str:
    """Return a share to a tenth of a percent."""
    return f"{100 * share:.1f} %"


def _gb(size: float) -> str:
    return f"{size / GIB:.0f}" if size >= 9.95 * GIB else f"{size / GIB:.1f}"


def _size(size: float) -> str:
    """Return bytes by powers of 1024."""
    for limit, unit in ((GIB, "GB"), (2**20, "MB"), (2**10, "kB")):
        if size >= 0.9995 * limit:
            return f"{_three(size / limit)} {unit}" if size < 99.95 * limit else f"{size / limit:.0f} {unit}"
    return f"{size:.0f} B" if size else "-"


def _money(amount: float | None) -> str:
    if amount is None:
        return ""
    if amount >= 1e6:
        return f"${_three(amount / 1e6)}M"
    return f"${amount:,.0f}" if amount >= 10 else f"${amount:.2f}"


def _rate(tokens_s: float) -> str:
    return f"{tokens_s:,.0f}" if tokens_s < 1e7 else count(tokens_s)


def wrapped(line: str, indent: int = 2) -> list[str]:
    """Wrap a line at the width of the terminal, at most 80 columns, with a hanging indent, but not at a `~`."""
    if len(line) <= columns():
        return [line.replace("~", " ")]
    parts = textwrap.wrap(line, columns(), subsequent_indent=" " * indent, break_on_hyphens=False)
    return [part.replace("~", " ") for part in parts]


def label(name: str, text: str) -> list[str]:
    """Return a labelled text, wrapped."""
    return wrapped(f"{name:<12}{text}", 12)


def cut(text: str, width: int) -> str:
    """Cut a text at a width."""
    return text if len(text) <= width else text[: width - 2] + ".."


# -- the plans


def _work(plan: Plan) -> str:
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
        memory = f"{_gb(estimate.memory.total)}/{_gb(estimate.memory.capacity)}"
        cells = [
            _step(estimate.step.seconds),
            _rate(estimate.tokens_s),
            percent(estimate.mfu),
            memory,
            span(run.seconds),
        ]
        mark, name = ">" if rank == 0 else " ", estimate.settings.mesh.describe()
        if len(name) > room:
            yield f"{mark} {name}"
            name, mark = "", " "
        yield f"{mark} {name:<{room}}" + cells_of([*cells, _money(run.cost)][: len(heads)], widths)
        reason = "" if rank == 0 and len(plan.result.plans) == 1 else f"; {candidate.reason}"
        note = "; the best that the trainer can run" if rank >= SHOWN else ""
        yield from wrapped(f"    {_details(estimate.settings)}{reason}{note}", 4)


def cells_of(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Return right-aligned cells of a row."""
    return "".join(f" {cell:>{width - 1}}" for cell, width in zip(cells, widths, strict=True))


def _details(settings: Settings, short: bool = False) -> str:
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
    yield f"{'time of a step':<23}{'':>7}{_step(step.seconds):>9} |{'#' * width}|"
    before = 0.0
    for name, seconds in step.accounts.items():
        if seconds <= 1e-9 * step.seconds:
            continue
        start, end = round(before / step.seconds * width), round((before + seconds) / step.seconds * width)
        bar = " " * start + "#" * (end - start)
        mark = "~" if plan.fidelity == "measured" and name in MODELLED else ""
        if start == end:
            bar = " " * min(start, width - 1) + "."
        yield f"  {name:<21}{percent(seconds / step.seconds):>7}{mark + _step(seconds):>9} |{bar:<{width}}|"
        before += seconds
    if plan.fidelity == "measured":
        yield "  ~ modelled; the other times are of kernels measured on this chip"


def _memory(plan: Plan) -> Iterator[str]:
    memory = plan.best.estimate.memory
    parts = {name: getattr(memory, name) for name in LETTERS if name != "free"}
    parts["free"] = max(0.0, memory.capacity - memory.total)
    yield f"memory per device: {_gb(memory.total)} of {_gb(memory.capacity)} GB"
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
    full = f"{_tenths(best.mfu_full_attention)} counting full attention"
    yield from label("MFU", f"{_tenths(best.mfu)} of {peak}, causal attention counted half; {full}")
    hours = f"{run.device_hours:,.0f}" if run.device_hours >= 10 else f"{run.device_hours:.3g}"
    yield from label(
        "run", f"{plural(run.steps, 'step')}, {count(run.tokens)} tokens: {span(run.seconds)}, {hours} device-hours"
    )
    if run.cost is not None:
        yield from label("cost", f"{_money(run.cost)} at ${run.price_per_device_hour:,.2f} per device-hour")
    yield from _goodput_lines(plan, recipe)
    yield from label("trainer", _trainer(plan))
    yield from label("accuracy", _accuracy(plan))


def _goodput_lines(plan: Plan, recipe: Recipe) -> Iterator[str]:
    expected = plan.run.goodput
    lost = ", ".join(f"{name} {percent(share)}" for name, share in expected.accounts.items() if share >= 5e-5)
    yield from label("goodput", _tenths(expected.share) + (f"; lost: {lost}" if lost else ""))
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
    if (plan.architecture.experts or plan.architecture.latent) and best.estimate.settings.mesh.tensor > 1:
        return "the trainer supports no tensor axis with experts or latent attention"
    if best.runnable:
        return "the trainer can run the best plan"
    if runnable is None and best.estimate.settings.precision not in ("bf16", "float32", "fp8"):
        return f"the trainer does not support {best.estimate.settings.precision}"
    *others, last = RUNNABLE.axes
    axes = f"{', '.join(others)} and {last} axes"
    if runnable is None and len(plan.result.plans) == 1:
        return f"the trainer cannot run this plan: it supports {axes}, with weights sharded over the whole shard axis"
    if runnable is None:
        return f"the trainer supports {axes}; none of their plans fits here"
    slower = runnable.estimate.step.seconds / best.estimate.step.seconds - 1
    behind = f"{percent(slower)} slower" if slower >= 5e-4 else "as fast"
    settings = runnable.estimate.settings
    what = f"{settings.mesh.describe()}, {_details(settings)}"
    return f"the trainer cannot run the best plan; it can run {what}: {behind}"


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


# -- explanations


FORMATS: Mapping[str, Callable[[float], str]] = {
    "m": lambda v: f"{v:.6g}",
    "n": lambda v: f"{v:.6g}",
    "k": lambda v: f"{v:.6g}",
    "flops": lambda v: count(v).replace("B", "G") if v else "-",
    "bytes": lambda v: _size(v),
    "seconds": lambda v: span(v) if v else "-",
    "exposed": lambda v: span(v) if v else "-",
    "times": lambda v: f"{v:,.6g}",
    "of roof": lambda v: percent(v),
    "value": lambda v: f"{v:.4g}",
}
"""Formats of columns with numbers; other numbers are shares."""
COLLECTIVES = {"all_gather": "gather", "reduce_scatter": "scatter", "all_reduce": "reduce", "all_to_all": "to all"}


def explain_lines(sections: Sequence[ExplainTable]) -> list[str]:
    """Return sections as tables; long formulas and meanings are wrapped."""
    return [line for section in sections for line in (*_section(section), "")][:-1]


def _section(section: ExplainTable) -> Iterator[str]:
    yield section.title
    texts = [[_cell(name, cell) for name, cell in zip(section.columns, row, strict=True)] for row in section.rows]
    if section.rows:
        long = next((i for i, name in enumerate(section.columns) if name in ("formula", "meaning")), None)
        yield from _story(section, texts, long) if long is not None else _grid(section, texts)
    if section.note:
        yield from wrapped(f"  = {section.note}" if section.note.startswith("together") else f"  {section.note}", 2)


def _cell(name: str, cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, str):
        return COLLECTIVES.get(cell, cell)
    return FORMATS[name](cell) if name in FORMATS else f"{cell:.3f}"


def _grid(section: ExplainTable, texts: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield columns as wide as needed: text left-aligned, numbers right-aligned."""
    every = [section.columns, *texts]
    widths = [max(len(row[i]) for row in every) for i in range(len(section.columns))]
    numbers = [not isinstance(section.rows[0][i], str) for i in range(len(widths))]
    gap = 2 if sum(widths) + 2 * len(widths) <= columns() else 1
    widths[0] -= max(0, sum(widths) + gap * (len(widths) - 1) + 2 - columns())
    for row in every:
        cells = (
            f"{text:>{width}}" if number else f"{cut(text, width):<{width}}"
            for text, width, number in zip(row, widths, numbers, strict=True)
        )
        yield ("  " + (" " * gap).join(cells)).rstrip()


def _story(section: ExplainTable, texts: Sequence[Sequence[str]], long: int) -> Iterator[str]:
    """Yield a name, its number, and a formula or meaning of one or more lines."""
    number = next(i for i in range(len(section.columns)) if i not in (0, long))
    names = max(len(row[0]) for row in texts) + 1
    for row in texts:
        head = f"  {row[0]:<{names}}{row[number]:>9}  "
        yield from textwrap.wrap(head + row[long], columns(), subsequent_indent=" " * len(head)) or [head]


# -- sweeps


SWEEP = {
    "nodes": 7, "devices": 9, "step": 9, "tokens/s": 12, "scaling": 9, "MFU": 6, "run": 9, "device-h": 10, "cost": 9,
}  # fmt: skip
"""Columns of a sweep, and how wide each is."""


def sweep_lines(points: Sequence[ScalingPoint], command: str) -> list[str]:
    """Return two lines per number of nodes: figures; then the plan and, if it fits, a bar of its efficiency."""
    plans = [point.plan for point in points if point.plan is not None]
    priced = any(plan.run.cost is not None for plan in plans)
    heads = _sweep_heads(priced)
    lines = [cells_of(heads, [SWEEP[head] for head in heads])]
    if plans:
        cluster = plans[0].cluster
        title = f"{_work(plans[0])}, nodes~of~{cluster.per_node}~x~{cluster.chip.name.upper()}"
        lines = [*wrapped(title), "", *lines]
    for point in points:
        lines += _sweep_point(points, point, heads)
    barred = any(_has_bar(_sweep_text(plan)) for plan in plans)
    bars = "; bars: share of the best" * barred
    lines += ["", *wrapped(f"scaling: tokens/s per device relative to the first line{bars}")]
    return [*lines, *wrapped(f"next: {command} for the details of one", 6)]


def _sweep_heads(priced: bool) -> list[str]:
    """Return the columns of a sweep that fit the terminal."""
    heads = [head for head in SWEEP if priced or head != "cost"]
    for narrow in ("devices", "device-h", "MFU"):
        if sum(SWEEP[head] for head in heads) > columns():
            heads.remove(narrow)
    return heads


def _sweep_text(plan: Plan) -> str:
    settings = plan.best.estimate.settings
    return f"{'':7}  {settings.mesh.describe()}, {_details(settings, short=True)}"


def _has_bar(text: str) -> bool:
    """Whether a plan's text leaves room for a bar."""
    return len(text) <= columns() - 13


def _sweep_point(points: Sequence[ScalingPoint], point: ScalingPoint, heads: Sequence[str]) -> Iterator[str]:
    share = efficiency(points, point)
    if point.plan is None or share is None:
        sizes = cells_of([f"{point.nodes:,}", f"{point.devices:,}"], [SWEEP["nodes"], SWEEP["devices"]])
        yield from wrapped(f"{sizes}   {point.reason}", len(sizes) + 3)
        return
    best, run = point.plan.best.estimate, point.plan.run
    cells = {
        "nodes": f"{point.nodes:,}",
        "devices": f"{point.devices:,}",
        "step": _step(best.step.seconds),
        "tokens/s": _rate(best.tokens_s),
        "scaling": percent(share),
        "MFU": percent(best.mfu),
        "run": span(run.seconds),
        "device-h": count(run.device_hours),
        "cost": _money(run.cost),
    }
    yield cells_of([cells[head] for head in heads], [SWEEP[head] for head in heads])
    text = _sweep_text(point.plan)
    if _has_bar(text):
        most = max(efficiency(points, other) or 0.0 for other in points)
        yield f"{text:<{columns() - 12}}|{'#' * round(share / most * 10):<10}|"
    else:
        yield from wrapped(text, 9)
