"""Headway from Python and notebooks: `import headway as hw`, then `hw.train`, `hw.runs`, `hw.plan` and `hw.load`."""

from headway.api.plans import PlanSummary, plan
from headway.api.run import Metric, Report, Run, Runs, runs
from headway.api.start import load, train

__all__ = ["Metric", "PlanSummary", "Report", "Run", "Runs", "load", "plan", "runs", "train"]
