"""What signals ask for."""

import signal

import pytest

from headway.agent.supervise.stop_signals import StopSignals

INT, TERM, WARNED = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1


@pytest.mark.parametrize(
    ("heard", "asked"),
    [
        ([(INT, 0.0)], 1),
        ([(INT, 0.0), (INT, 0.01)], 1),  # `timeout -s INT` tells the command, and then its group
        ([(INT, 0.0), (INT, 0.9), (INT, 1.8)], 2),  # whoever goes on asking is heard
        ([(INT, 0.0), (INT, 2.0)], 2),
        ([(TERM, 0.0), (INT, 0.2)], 2),  # headway stop --now
        ([(WARNED, 0.0), (WARNED, 5.0), (WARNED, 10.0)], 1),
        ([(WARNED, 0.0), (TERM, 0.1)], 2),  # of a keeper that passes the second wish on
    ],
)
def test_how_often_somebody_has_asked(heard: list[tuple[int, float]], asked: int) -> None:
    wishes = StopSignals()
    for number, now in heard:
        wishes.hear(number, now)
    assert wishes.asked == asked
