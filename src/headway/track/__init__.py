"""Run tracking: recorded events, the time ledger, metrics, the chain of steps and run folders."""

from headway.track.accounts import ACCOUNTS, OF_POLICIES, AttemptTime
from headway.track.chain import START, RunComparison, checkpoint_digests, compare_runs, extend_chain
from headway.track.evaluations import (
    EvalMetric,
    Evaluation,
    latest_evaluations,
    read_evaluation_rows,
    read_evaluations,
    write_evaluation,
)
from headway.track.events import (
    FORMAT,
    Event,
    Header,
    Record,
    Recorder,
    Tail,
    clock_offset,
    kept_until,
    read_ends,
    read_record,
    read_run,
    record_path,
)
from headway.track.files import make_durable, read_recipe, write_json
from headway.track.ledger import Ledger, account, largest_overhead
from headway.track.metrics import history, metric_names, metric_table, read_metric, read_metrics
from headway.track.plans import RunPlan, read_plan, write_plan
from headway.track.registry import split_ref
from headway.track.run_folder import FAILED, RunFolder, command, run_id, runs_root
from headway.track.run_lock import lock_holder, lock_run
from headway.track.run_summary import RunSummary, summarize
from headway.track.runs import (
    create_run,
    find_run,
    find_set_aside,
    free_name,
    has_stepped,
    is_set_aside,
    list_runs,
    next_attempt,
    parse_ref,
    set_aside,
    take_back,
)
from headway.track.tensorboard import export_tensorboard

__all__ = [
    "ACCOUNTS",
    "FAILED",
    "FORMAT",
    "OF_POLICIES",
    "START",
    "AttemptTime",
    "EvalMetric",
    "Evaluation",
    "Event",
    "Header",
    "Ledger",
    "Record",
    "Recorder",
    "RunComparison",
    "RunFolder",
    "RunPlan",
    "RunSummary",
    "Tail",
    "account",
    "checkpoint_digests",
    "clock_offset",
    "command",
    "compare_runs",
    "create_run",
    "export_tensorboard",
    "extend_chain",
    "find_run",
    "find_set_aside",
    "free_name",
    "has_stepped",
    "history",
    "is_set_aside",
    "kept_until",
    "largest_overhead",
    "latest_evaluations",
    "list_runs",
    "lock_holder",
    "lock_run",
    "make_durable",
    "metric_names",
    "metric_table",
    "next_attempt",
    "parse_ref",
    "read_ends",
    "read_evaluation_rows",
    "read_evaluations",
    "read_metric",
    "read_metrics",
    "read_plan",
    "read_recipe",
    "read_record",
    "read_run",
    "record_path",
    "run_id",
    "runs_root",
    "set_aside",
    "split_ref",
    "summarize",
    "take_back",
    "write_evaluation",
    "write_json",
    "write_plan",
]
