"""What `headway serve` prints when it ends."""

import pytest

from headway.cli.serve import ending_line


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ({"draining": 0}, "stopping"),
        ({"draining": 1}, "draining 1 request: new ones are refused"),
        ({"draining": 12}, "draining 12 requests: new ones are refused"),
        ({"stopped": True, "unfinished": 0}, "stopped"),
        ({"stopped": True, "unfinished": 2}, "stopped; 2 requests did not finish"),
    ],
)
def test_the_end_is_said_in_one_line(message: dict[str, int], line: str) -> None:
    assert ending_line(message) == line
