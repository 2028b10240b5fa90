"""How `headway plan` looks: at most 80 columns, readable without colour. Lines of text; nothing is printed here."""

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence

from headway.cli.text import count
from headway.plan.explain import Cell, ExplainTable
from headway.plan.flops import parameters
from headway.plan.goodput import Goodput, goodput
from headway.plan.plan import RESTART_S, Plan, RunForecast
from headway.plan.scaling import ScalingPoint, efficiency
from headway.plan.search import RankedPlan
from headway.plan.settings import Settings
from headway.plan.task import RUNNABLE
from headway.recipe import Recipe

__all__ = ["WIDTH", "cells_of", "cut", "explain_lines", "next_lines", "plan_lines", "run_of", "sweep_lines", "wrapped"]

WIDTH = 80
BAR = 38
GIB = 2**30
DAY_S = 86400.0
SHOWN = 5
"""Plans in the table; the best that the trainer runs comes on top of that."""
LETTERS = {
    "weights": "w", "gradients": "g", "optimizer": "o", "activations": "a", "gathered": "t", "logits": "l",
    "overhead": "x", "free": ".",
}  # fmt: skip
RECOMPUTED = {
    "none": "nothing recomputed",
    "attention": "attention recomputed",
    "selective": "all but products recomputed",
    "full": "all recomputed",
}
WELL_KNOWN = ("a100", "h100", "h200")
ERRORS = {"dense": 0.08, "other": 0.14}
"""Mean errors of default fidelity on published runs of programs it was not fitted to, as `--against` says them: of
fully specified dense models on the chips above, and of all others."""
ACCURACY = {
    "limit": "limit fidelity: the speed of light, which no run reaches",
    "calibrated": "calibrated fidelity: refitted to the runs that were given",
    "measured": "measured fidelity: kernels as measured on such a device, links as modelled",
}


def plan_lines(plan: Plan, recipe: Recipe, runs: Mapping[int, RunForecast]) -> list[str]:
    """The whole screen. `runs` holds the recipe at each plan's speed, by the plan's place."""
    return [
        *wrapped(_title(plan)),
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
    """What to do next."""
    nodes = plan.cluster.nodes
    train = f"{command}; " if command and plan.runnable is not None else ""
    return wrapped(f"next: {train}--explain says why; --sweep~nodes={nodes}..{8 * nodes} scales it", 6)


# -- numbers


def span(seconds: float) -> str:
    """A time with three digits and its unit."""
    for limit, size, unit in ((2 * DAY_S, DAY_S, "d"), (7200, 3600, "h"), (180, 60, "min"), (0.9995, 1, "s")):
        if seconds >= limit:
            return f"{_three(seconds / size)} {unit}"
    return f"{_three(seconds * 1e3)} ms" if seconds >= 0.9995e-3 or not seconds else f"{_three(seconds * 1e6)} us"


def _step(seconds: float) -> str:
    """Of steps, which are never told in minutes."""
    return f"{_three(seconds)} s" if seconds >= 0.9995 else span(seconds)


def _three(number: float) -> str:
    """Three digits, and no exponent."""
    if number >= 99.95:
        return f"{number:,.0f}"
    return f"{number:.1f}" if number >= 9.995 else f"{number:.2f}"


def _percent(share: float) -> str:
    """A share for people: 52 %, 3.1 %, 0.04 %."""
    size = abs(share)
    digits = 0 if size >= 0.0995 else 1 if size >= 0.00995 or size < 5e-5 else 2
    return f"{100 * share:.{digits}f} %"


def _tenths(share: float) -> str:
    """A share to a tenth of a percent."""
    return f"{100 * share:.1f} %"


def _gb(size: float) -> str:
    return f"{size / GIB:.0f}" if size >= 9.95 * GIB else f"{size / GIB:.1f}"


def _size(size: float) -> str:
    """Bytes, by powers of 1024 like the memory they lie in."""
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
    """Break what is longer than a terminal is wide, but not at a `~`; the rest stands further in."""
    if len(line) <= WIDTH:
        return [line.replace("~", " ")]
    parts = textwrap.wrap(line, WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False)
    return [part.replace("~", " ") for part in parts]


def _label(name: str, text: str) -> list[str]:
    return wrapped(f"{name:<12}{text}", 12)


def cut(text: str, width: int) -> str:
    """At most so wide."""
    return text if len(text) <= width else text[: width - 2] + ".."


# -- the plans


def _title(plan: Plan) -> str:
    return f"{_work(plan)}, {plan.cluster.devices:,}~x~{plan.cluster.chip.name.upper()}"


def _work(plan: Plan) -> str:
    """What is trained."""
    size = count(parameters(plan.architecture))
    return f"{plan.name}  {size} parameters, {plan.seq:,} tokens x {plan.batch:,} sequences a step"


def run_of(plan: Plan, other: RankedPlan) -> RunForecast:
    """The whole recipe at another plan's speed: the same steps, saves and failures."""
    if other is plan.best:
        return plan.run
    made = _goodput(plan, other.estimate.step.seconds)
    hours = made.wall_s / 3600 * plan.cluster.devices
    return RunForecast(plan.run.steps, plan.run.tokens, made.wall_s, hours, plan.run.price_per_device_hour, made)


def _goodput(plan: Plan, step_s: float, interval_s: float | None = None) -> Goodput:
    old, devices = plan.run.goodput, plan.cluster.devices
    rate = None if old.mtbf_s == float("inf") else old.mtbf_s * devices / 3600
    return goodput(
        plan.run.steps * step_s, devices, rate, old.checkpoint_s, RESTART_S, step_s=step_s, interval_s=interval_s
    )


def _plans(plan: Plan, runs: Mapping[int, RunForecast]) -> Iterator[str]:
    priced = plan.run.cost is not None
    heads = ["step", "tokens/s", "MFU", "mem GB", "run", "cost"][: 6 if priced else 5]
    widths = [8, 10, 6, 8, 7, 9][: len(heads)]
    room = WIDTH - 2 - sum(widths)
    yield f"  {'plan':<{room}}" + cells_of(heads, widths)
    for place, one in enumerate(plan.result.plans):
        if place >= SHOWN and not (one.runnable and one is plan.runnable):
            continue
        made, run = one.estimate, runs[place]
        memory = f"{_gb(made.memory.total)}/{_gb(made.memory.capacity)}"
        cells = [_step(made.step.seconds), _rate(made.tokens_s), _percent(made.mfu), memory, span(run.seconds)]
        mark, name = ">" if place == 0 else " ", made.settings.mesh.describe()
        if len(name) > room:
            yield f"{mark} {name}"
            name, mark = "", " "
        yield f"{mark} {name:<{room}}" + cells_of([*cells, _money(run.cost)][: len(heads)], widths)
        reason = "" if place == 0 and len(plan.result.plans) == 1 else f"; {one.reason}"
        able = "; what this version's trainer runs" if place >= SHOWN else ""
        yield from wrapped(f"    {_details(made.settings)}{reason}{able}", 4)


def cells_of(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Cells of a row, each to the right of its column."""
    return "".join(f" {cell:>{width - 1}}" for cell, width in zip(cells, widths, strict=True))


def _details(settings: Settings, short: bool = False) -> str:
    """What the mesh does not say; in short, what is special."""
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
    """How many layers of a device, where not all of them."""
    some = settings.recompute_blocks if settings.recompute != "none" else None
    return "" if some is None else f" in {some} {'layer' if some == 1 else 'layers'}"


# -- where time and memory go


def _waterfall(plan: Plan) -> Iterator[str]:
    step = plan.best.estimate.step
    yield f"{'where a step goes':<23}{'':>7}{_step(step.seconds):>9} |{'#' * BAR}|"
    before = 0.0
    for name, seconds in step.accounts.items():
        if seconds <= 1e-9 * step.seconds:
            continue
        start, end = round(before / step.seconds * BAR), round((before + seconds) / step.seconds * BAR)
        bar = " " * start + "#" * (end - start)
        if start == end:
            bar = " " * min(start, BAR - 1) + "."
        yield f"  {name:<21}{_percent(seconds / step.seconds):>7}{_step(seconds):>9} |{bar:<{BAR}}|"
        before += seconds


def _memory(plan: Plan) -> Iterator[str]:
    memory = plan.best.estimate.memory
    parts = {name: getattr(memory, name) for name in LETTERS if name != "free"}
    parts["free"] = max(0.0, memory.capacity - memory.total)
    yield f"memory of a device, {_gb(memory.total)} of {_gb(memory.capacity)} GB"
    width, before, bar = WIDTH - 4, 0.0, ""
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
    yield from _label("speed", f"{best.tokens_s:,.0f} tokens/s, {best.tokens_s_per_device:,.0f} a device")
    full = f"{_tenths(best.mfu_full_attention)} counting full attention"
    yield from _label("MFU", f"{_tenths(best.mfu)} of {peak}, causal attention counted half; {full}")
    hours = f"{run.device_hours:,.0f}" if run.device_hours >= 10 else f"{run.device_hours:.3g}"
    yield from _label(
        "run", f"{run.steps:,} steps, {count(run.tokens)} tokens: {span(run.seconds)}, {hours} device-hours"
    )
    if run.cost is not None:
        yield from _label("cost", f"{_money(run.cost)} at ${run.price_per_device_hour:,.2f} a device-hour")
    yield from _goodput_lines(plan, recipe)
    yield from _label("trainer", _trainer(plan))
    yield from _label("accuracy", _accuracy(plan))


def _goodput_lines(plan: Plan, recipe: Recipe) -> Iterator[str]:
    made = plan.run.goodput
    lost = ", ".join(f"{name} {_percent(share)}" for name, share in made.accounts.items() if share >= 5e-5)
    yield from _label("goodput", _tenths(made.share) + (f"; lost: {lost}" if lost else ""))
    own = recipe.checkpoint.every_steps
    stated = "auto" if own == "auto" else f"{own:,} steps" if own else "the last step only"
    if made.interval_steps is None or made.interval_s is None:
        yield from _label("checkpoint", f"at the end would do: no failure rate is known; the recipe says {stated}")
        return
    failures = f"{made.failures:.1f}" if made.failures < 10 else f"{made.failures:,.0f}"
    yield from _label("failures", f"MTBF of the job {span(made.mtbf_s)}; {failures} expected in the run")
    why = f"Daly's optimum for saves that stall {span(made.checkpoint_s)}"
    every = f"every {made.interval_steps:,} steps, {span(made.interval_s)}: {why}"
    if own in (made.interval_steps, "auto"):
        yield from _label("checkpoint", f"{every}, as the recipe has it")
        return
    yield from _label("checkpoint", f"{every}; the recipe's {stated} {_dearer(plan, int(own))}")


def _dearer(plan: Plan, own: int) -> str:
    """What the recipe's own interval costs beyond the best one."""
    step_s = plan.best.estimate.step.seconds
    theirs = _goodput(plan, step_s, (own or plan.run.steps) * step_s)
    more = theirs.wall_s / plan.run.goodput.wall_s - 1
    return f"would take {_percent(more)} longer" if more >= 5e-5 else "cost as little"


def _trainer(plan: Plan) -> str:
    best, able = plan.best, plan.runnable
    if (plan.architecture.experts or plan.architecture.latent) and best.estimate.settings.mesh.tensor > 1:
        return "this version shares neither experts nor latent attention over a tensor axis"
    if best.runnable:
        return "this version runs the best plan"
    if able is None and best.estimate.settings.precision not in ("bf16", "float32"):
        return f"this version does not train in {best.estimate.settings.precision}"
    *others, last = RUNNABLE.axes
    axes = f"{', '.join(others)} and {last} axes"
    if able is None and len(plan.result.plans) == 1:
        return f"this version does not run such a plan: it runs {axes}, weights sharded over all of a shard axis"
    if able is None:
        return f"this version runs {axes}, and none of their plans fits here"
    slower = able.estimate.step.seconds / best.estimate.step.seconds - 1
    behind = f"{_percent(slower)} slower" if slower >= 5e-4 else "as fast"
    settings = able.estimate.settings
    what = f"{settings.mesh.describe()}, {_details(settings)}"
    return f"this version does not run the best plan; it runs {what}: {behind}"


def _accuracy(plan: Plan) -> str:
    chip = plan.cluster.chip.name
    if chip == "cpu" and plan.fidelity != "limit":
        return "a CPU's figures are assumed: expect to be off by a factor"
    if plan.fidelity in ACCURACY:
        return ACCURACY[plan.fidelity]
    dense = chip.startswith(WELL_KNOWN) and plan.architecture.experts is None
    of = "dense runs" if dense else "other chips and experts,"
    error = f"{100 * ERRORS['dense' if dense else 'other']:.0f} % mean error on {of}"
    return f"{plan.fidelity} fidelity: {error} nobody fitted (docs/guides/plan.md)"


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
    "of roof": lambda v: _percent(v),
    "value": lambda v: f"{v:.4g}",
}
"""Look of columns that hold numbers; others with numbers are shares."""
COLLECTIVES = {"all_gather": "gather", "reduce_scatter": "scatter", "all_reduce": "reduce", "all_to_all": "to all"}


def explain_lines(sections: Sequence[ExplainTable]) -> list[str]:
    """Sections as tables; of a formula or a meaning that is long, the rest on lines of its own."""
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
    """Columns as wide as they must be: words to the left, numbers to the right."""
    every = [section.columns, *texts]
    widths = [max(len(row[i]) for row in every) for i in range(len(section.columns))]
    numbers = [not isinstance(section.rows[0][i], str) for i in range(len(widths))]
    gap = 2 if sum(widths) + 2 * len(widths) <= WIDTH else 1
    widths[0] -= max(0, sum(widths) + gap * (len(widths) - 1) + 2 - WIDTH)
    for row in every:
        cells = (
            f"{text:>{width}}" if number else f"{cut(text, width):<{width}}"
            for text, width, number in zip(row, widths, numbers, strict=True)
        )
        yield ("  " + (" " * gap).join(cells)).rstrip()


def _story(section: ExplainTable, texts: Sequence[Sequence[str]], long: int) -> Iterator[str]:
    """A name, its number, and a formula or meaning that may take several lines."""
    number = next(i for i in range(len(section.columns)) if i not in (0, long))
    names = max(len(row[0]) for row in texts) + 1
    for row in texts:
        head = f"  {row[0]:<{names}}{row[number]:>9}  "
        yield from textwrap.wrap(head + row[long], WIDTH, subsequent_indent=" " * len(head)) or [head]


# -- sweeps


def sweep_lines(points: Sequence[ScalingPoint], command: str) -> list[str]:
    """A table: for each number of nodes two lines, the second with the plan and, if there is room, a bar of its
    efficiency."""
    plans = [point.plan for point in points if point.plan is not None]
    priced = any(plan.run.cost is not None for plan in plans)
    heads = ["nodes", "devices", "step", "tokens/s", "scaling", "MFU", "run", "device-h", "cost"][: 9 if priced else 8]
    widths = [7, 9, 9, 12, 9, 6, 9, 10, 9][: len(heads)]
    title = wrapped(_sweep_title(plans[0])) if plans else []
    lines = [*title, "", cells_of(heads, widths)] if title else [cells_of(heads, widths)]
    for point in points:
        lines += _sweep_point(points, point, widths)
    barred = any(_has_bar(_sweep_text(plan)) for plan in plans)
    lines += ["", "scaling: tokens/s of a device over the first line's" + "; bars are of the largest" * barred]
    return [*lines, *wrapped(f"next: {command} for one of them in full", 6)]


def _sweep_title(plan: Plan) -> str:
    return f"{_work(plan)}, nodes~of~{plan.cluster.per_node}~x~{plan.cluster.chip.name.upper()}"


def _sweep_text(plan: Plan) -> str:
    settings = plan.best.estimate.settings
    return f"{'':7}  {settings.mesh.describe()}, {_details(settings, short=True)}"


def _has_bar(text: str) -> bool:
    """Whether a plan's text leaves room for a bar of ten and its ends."""
    return len(text) <= WIDTH - 13


def _sweep_point(points: Sequence[ScalingPoint], point: ScalingPoint, widths: Sequence[int]) -> Iterator[str]:
    head = cells_of([f"{point.nodes:,}", f"{point.devices:,}"], widths[:2])
    share = efficiency(points, point)
    if point.plan is None or share is None:
        yield from wrapped(f"{head}   {point.reason}", sum(widths[:2]) + 3)
        return
    best, run = point.plan.best.estimate, point.plan.run
    cells = [_step(best.step.seconds), _rate(best.tokens_s), _percent(share), _percent(best.mfu), span(run.seconds)]
    cells += [count(run.device_hours), _money(run.cost)]
    yield head + cells_of(cells[: len(widths) - 2], widths[2:])
    text = _sweep_text(point.plan)
    if _has_bar(text):
        most = max(efficiency(points, one) or 0.0 for one in points)
        yield f"{text:<{WIDTH - 12}}|{'#' * round(share / most * 10):<10}|"
    else:
        yield from wrapped(text, 9)
