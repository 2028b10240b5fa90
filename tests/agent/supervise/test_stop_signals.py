"""How signals count as requests to stop."""

import signal

import pytest

from headway.agent.supervise.stop_signals import StopSignals

INT, TERM, WARNED = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1


@pytest.mark.parametrize(
    ("received", "asked"),
    [
        ([(INT, 0.0)], 1),
        ([(INT, 0.0), (INT, 0.01)], 1),  # `timeout -s INT` signals the command, then its group
        ([(INT, 0.0), (INT, 0.9), (INT, 1.8)], 2),  # repeated requests count again
        ([(INT, 0.0), (INT, 2.0)], 2),
        ([(TERM, 0.0), (INT, 0.2)], 2),  # headway stop --now
        ([(WARNED, 0.0), (WARNED, 5.0), (WARNED, 10.0)], 1),
        ([(WARNED, 0.0), (TERM, 0.1)], 2),  # from a launcher that forwards the second request
    ],
)
def test_count_of_stop_requests(received: list[tuple[int, float]], asked: int) -> None:
    stop_signals = StopSignals()
    for number, now in received:
        stop_signals.receive(number, now)
    assert stop_signals.asked == asked
