"""A sandbox for code that a model wrote: Linux namespaces, limits, and no verdict from inside. See docs/guides/rewards.md."""

from headway.rl.sandbox.box import Box, SandboxLimits, check_sandbox, why_no_sandbox
from headway.rl.sandbox.programs import ProgramEnd, run_program
from headway.rl.sandbox.tested_code import TestCode, run_tests

__all__ = [
    "Box",
    "ProgramEnd",
    "SandboxLimits",
    "TestCode",
    "check_sandbox",
    "run_program",
    "run_tests",
    "why_no_sandbox",
]
