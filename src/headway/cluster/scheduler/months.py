"""Calendar months in UTC: the periods of budgets. Pure."""

from datetime import UTC, datetime, timedelta

_ZERO = datetime(1970, 1, 1, tzinfo=UTC)
LAST_S = (datetime(9999, 12, 1, tzinfo=UTC) - _ZERO).total_seconds()
"""Where the calendar ends: what is later is in the last month."""


def month_bounds(unix_s: float) -> tuple[float, float]:
    """The Unix seconds at which the month of a time begins and ends."""
    first = month_start(unix_s)
    following = first.replace(year=first.year + first.month // 12, month=first.month % 12 + 1)
    return (first - _ZERO).total_seconds(), (following - _ZERO).total_seconds()


def month_start(unix_s: float) -> datetime:
    """The first moment of the month of a time."""
    moment = _ZERO + timedelta(seconds=min(max(unix_s, 0.0), LAST_S - 1))
    return moment.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
