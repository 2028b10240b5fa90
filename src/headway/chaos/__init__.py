"""Fault injection: the matrix of what can break, and long runs under many faults."""

from headway.chaos.cases import CASES, FaultCase, select_cases
from headway.chaos.driver import ChaosHarness
from headway.chaos.matrix import CaseResult, CaseRun, FaultMatrix, SoakResult, chaos, run_soak
from headway.chaos.process_tree import track_descendants
from headway.chaos.torchrun_baseline import BaselineResult, BaselineRun, run_torchrun

__all__ = [
    "CASES",
    "BaselineResult",
    "BaselineRun",
    "CaseResult",
    "CaseRun",
    "ChaosHarness",
    "FaultCase",
    "FaultMatrix",
    "SoakResult",
    "chaos",
    "run_soak",
    "run_torchrun",
    "select_cases",
    "track_descendants",
]
