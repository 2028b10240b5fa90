"""A reward that logs."""

from typing import Any

import headway as hw


def length(answer: Any) -> float:
    hw.log({"length": len(answer.text)})
    return 1.0
