"""Numbers, lines and table cells as `headway plan` prints them."""

import textwrap
from collections.abc import Sequence

from headway.cli.text import columns, count

GIB = 2**30
DAY_S = 86400.0


def span(seconds: float) -> str:
    """Return a time with three digits and its unit."""
    for limit, size, unit in ((2 * DAY_S, DAY_S, "d"), (7200, 3600, "h"), (180, 60, "min"), (0.9995, 1, "s")):
        if seconds >= limit:
            return f"{three_digits(seconds / size)} {unit}"
    return (
        f"{three_digits(seconds * 1e3)} ms"
        if seconds >= 0.9995e-3 or not seconds
        else f"{three_digits(seconds * 1e6)} us"
    )


def step_time(seconds: float) -> str:
    """Return the time of a step, never in minutes."""
    return f"{three_digits(seconds)} s" if seconds >= 0.9995 else span(seconds)


def three_digits(number: float) -> str:
    """Return three digits without an exponent."""
    if number >= 99.95:
        return f"{number:,.0f}"
    return f"{number:.1f}" if number >= 9.995 else f"{number:.2f}"


def percent(share: float) -> str:
    """Return a share: 52 %, 3.1 %, 0.04 %."""
    size = abs(share)
    digits = 0 if size >= 0.0995 else 1 if size >= 0.00995 or size < 5e-5 else 2
    return f"{100 * share:.{digits}f} %"


def tenths(share: float) -> str:
    """Return a share to a tenth of a percent."""
    return f"{100 * share:.1f} %"


def gigabytes(size: float) -> str:
    """Return bytes in gigabytes of 2**30, without the unit."""
    return f"{size / GIB:.0f}" if size >= 9.95 * GIB else f"{size / GIB:.1f}"


def binary_size(size: float) -> str:
    """Return bytes by powers of 1024."""
    for limit, unit in ((GIB, "GB"), (2**20, "MB"), (2**10, "kB")):
        if size >= 0.9995 * limit:
            return f"{three_digits(size / limit)} {unit}" if size < 99.95 * limit else f"{size / limit:.0f} {unit}"
    return f"{size:.0f} B" if size else "-"


def money(amount: float | None) -> str:
    """Return dollars; "" if unknown."""
    if amount is None:
        return ""
    if amount >= 1e6:
        return f"${three_digits(amount / 1e6)}M"
    return f"${amount:,.0f}" if amount >= 10 else f"${amount:.2f}"


def token_rate(tokens_s: float) -> str:
    """Return tokens per second."""
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


def cells_of(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Return right-aligned cells of a row."""
    return "".join(f" {cell:>{width - 1}}" for cell, width in zip(cells, widths, strict=True))
