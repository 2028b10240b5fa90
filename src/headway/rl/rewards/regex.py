"""The `regex` reward: an answer that a pattern matches."""

import re
from typing import Annotated

from pydantic import AfterValidator

from headway.rl.rewards.answer import Answer


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"no regular expression: {error}") from None
    return pattern


def regex_reward(
    answer: Answer,
    *,
    pattern: Annotated[str, AfterValidator(_compiles)],
    search: bool = False,
    ignore_case: bool = False,
    dot_all: bool = False,
) -> float:
    """Return 1.0 if the pattern matches all of the answer, or with `search` any part of it.

    A pattern that backtracks without end is stopped by rl.reward_timeout_s, as any reward is.
    """
    flags = (re.IGNORECASE if ignore_case else 0) | (re.DOTALL if dot_all else 0)
    compiled = re.compile(pattern, flags)
    return float(bool(compiled.search(answer.text) if search else compiled.fullmatch(answer.text)))
