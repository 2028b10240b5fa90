"""Reads packed plots as the page's plots.ts does, number by number."""

import json
import math
import struct
from typing import Any


def unpack(data: bytes) -> dict[str, Any]:
    """Return `pending`, and plots with lists of numbers, None for gaps."""
    (size,) = struct.unpack_from("<I", data)
    document = json.loads(data[4 : 4 + size])
    at, plots = 4 + size, {}

    def column(length: int, letter: str) -> list[float | None]:
        nonlocal at
        numbers = struct.unpack_from(f"<{length}{letter}", data, at)
        at += length * struct.calcsize(letter)
        return [None if math.isnan(number) else number for number in numbers]

    for key, plot in document["plots"].items():
        assert at % 8 == 0
        letter = {4: "f", 8: "d"}[plot["value"]]
        steps = column(plot["steps"], "d")
        lines = {run: column(plot["steps"], letter) for run in plot["runs"]}
        means = {run: column(plot["steps"] // 2, letter) for run in plot["runs"]} if plot["means"] else None
        plots[key] = {"steps": steps, "lines": lines, "means": means}
        at += -at % 8
    assert at == len(data)
    return {"pending": document["pending"], "plots": plots}
