"""Rewards as numbers: what a user's function returned, checked."""

import math
import numbers
from typing import Any

from headway.errors import HeadwayError

MOST_SHOWN = 200
"""Characters of a wrong value in a message."""
MOST_REWARD = 1e9
"""A larger value is an error: it would drown all others, and its weighted sum may overflow."""


def checked(value: Any) -> float:
    """Return a reward as a float; raise HeadwayError with the value if it is no number or not finite."""
    scalar = value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value  # of any library
    if not isinstance(scalar, numbers.Real):
        raise HeadwayError(f"returned {shown(value)}, which is no number")
    try:
        number = float(scalar)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise HeadwayError(f"returned {shown(value)}, which is not finite")
    if abs(number) > MOST_REWARD:
        raise HeadwayError(f"returned {shown(value)}; rewards are at most {MOST_REWARD:g}")
    return number


def shown(value: Any) -> str:
    """Return a value and its type for a message, however odd it is."""
    try:
        text = repr(value)
    except Exception:  # of a class of the user's, or an int of too many digits
        text = "a value"
    if len(text) > MOST_SHOWN:
        text = f"{text[:MOST_SHOWN]}..."
    return f"{text} ({type(value).__name__})"
