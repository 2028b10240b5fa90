"""Faults on purpose: the matrix of what can break, and long runs that many faults strike."""

from headway.agent.chaos.beside import Peer, PeerTry, beside
from headway.agent.chaos.drive import Stage
from headway.agent.chaos.matrix import Long, Matrix, Result, Try, chaos, long_run
from headway.agent.chaos.offspring import offspring
from headway.agent.chaos.rows import ROWS, Row, choose

__all__ = [
    "ROWS",
    "Long",
    "Matrix",
    "Peer",
    "PeerTry",
    "Result",
    "Row",
    "Stage",
    "Try",
    "beside",
    "chaos",
    "choose",
    "long_run",
    "offspring",
]
