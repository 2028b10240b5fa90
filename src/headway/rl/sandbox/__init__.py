"""A sandbox for code that a model wrote: Linux namespaces, limits, and no verdict from inside."""

from headway.rl.sandbox.process import SandboxLimits, SandboxProcess, check_sandbox, why_no_sandbox
from headway.rl.sandbox.programs import ProgramEnd, run_program
from headway.rl.sandbox.tested_code import TestCode, run_tests

__all__ = [
    "ProgramEnd",
    "SandboxLimits",
    "SandboxProcess",
    "TestCode",
    "check_sandbox",
    "run_program",
    "run_tests",
    "why_no_sandbox",
]
