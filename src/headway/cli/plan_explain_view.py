"""Tables of `headway plan --explain`: each number of a plan with what it is made of."""

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence

from headway.cli.plan_text import binary_size, cut, percent, span, wrapped
from headway.cli.text import columns, count
from headway.plan.explain import Cell, ExplainTable

FORMATS: Mapping[str, Callable[[float], str]] = {
    "m": lambda v: f"{v:.6g}",
    "n": lambda v: f"{v:.6g}",
    "k": lambda v: f"{v:.6g}",
    "flops": lambda v: count(v).replace("B", "G") if v else "-",
    "bytes": lambda v: binary_size(v),
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
