"""How verbs print: JSON for programs, short numbers for people."""

from typing import Any

__all__ = ["count", "duration", "print_json", "short_seconds", "shortened"]


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    from pydantic_core import to_json

    print(to_json(value, indent=2, inf_nan_mode="null").decode())


def count(number: float) -> str:
    """A count with three digits or so: 812, 12.3k, 4.56M, 7.0B."""
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= limit:
            return f"{number / limit:.3g}{suffix}"
    return f"{number:.3g}" if number % 1 else f"{number:.0f}"


def duration(seconds: float) -> str:
    """hh:mm:ss, days in front where there are any."""
    whole = int(seconds)
    days, rest = divmod(whole, 86400)
    clock = f"{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days}d {clock}" if days else clock


def short_seconds(seconds: float) -> str:
    """Seconds with three digits: 0.0927 s, 1.23 s, 52.4 s."""
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:#.3g} s"


def shortened(text: str, width: int) -> str:
    """A line no wider than that; dots stand for what was left out."""
    return text if len(text) <= width else text[: width - 3] + "..."
