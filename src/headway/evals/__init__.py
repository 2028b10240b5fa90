"""Evaluation: tasks from local files, scores with confidence intervals, paired comparisons. No model runs here."""

from headway.evals.compare import Comparison, compare_rows
from headway.evals.intervals import pass_at_k, ratio_interval, share_interval, wilson
from headway.evals.paired import PairedTest, compare_shares, compare_totals
from headway.evals.questions import Question, make_questions
from headway.evals.results import metrics_of
from headway.evals.task import LoadedTask, Task, load_task, shipped_tasks

__all__ = [
    "Comparison",
    "LoadedTask",
    "PairedTest",
    "Question",
    "Task",
    "compare_rows",
    "compare_shares",
    "compare_totals",
    "load_task",
    "make_questions",
    "metrics_of",
    "pass_at_k",
    "ratio_interval",
    "share_interval",
    "shipped_tasks",
    "wilson",
]
