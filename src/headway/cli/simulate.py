"""`headway simulate`: simulates a job trace on a cluster under several policies."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from headway.cli.live_trial import try_live
from headway.cli.options import Json, Runs
from headway.cli.progress import terminal_bars
from headway.cli.text import plural, print_json
from headway.cluster.scheduler.policy import Policy
from headway.cluster.simulate import (
    JobTrace,
    SimulationResult,
    SimulationSetup,
    Site,
    compare_policies,
    find_policies,
    generate_trace,
    read_away,
    read_site,
    read_topology,
    read_trace,
    skip_oversized,
    summary,
    zero_wait_bound,
)
from headway.errors import UsageError
from headway.hardware import load_cluster, parse_on
from headway.track import runs_root

DEFAULT_POLICIES = "headway,slurm,kueue,fifo"
MAX_SKIPPED_LINES = 10
"""Skipped jobs that the table lists."""
TraceFile = Annotated[
    Path | None, typer.Argument(metavar="[TRACE]", help="Job trace as CSV, plain or gzip: see docs/scheduling.md.")
]
On = Annotated[str | None, typer.Option("--on", metavar="CHIPxPERNODExNODES", help="Cluster, e.g. a100x8x32.")]
ClusterFile = Annotated[
    Path | None,
    typer.Option("--cluster", metavar="FILE", help="Cluster as a cluster.toml, with tenants and topology."),
]
TopologyFile = Annotated[
    Path | None, typer.Option("--topology", metavar="FILE", help="Hosts and their switches as CSV.")
]
AwayFile = Annotated[
    Path | None, typer.Option("--away", metavar="FILE", help="Maintenance windows as CSV: node,from_s,to_s.")
]
Workload = Annotated[
    str | None,
    typer.Option("--generate", metavar="NAME", help="Generate a trace: acme-like, seren-like or single-gpu."),
]
Jobs = Annotated[int | None, typer.Option("--jobs", min=1, help="With --generate: number of jobs.")]
Load = Annotated[
    float | None,
    typer.Option(
        "--load",
        min=0.01,
        max=10,
        help="With --generate: requested share of the GPUs (default: 0.8; single-gpu: 0.7).",
    ),
]
PolicyNames = Annotated[
    str,
    typer.Option(
        "--policy",
        metavar="NAME,...",
        help="Policies: headway, slurm, kueue, fifo, las, edf; sjf and srtf are oracles.",
    ),
]
Preemptible = Annotated[float, typer.Option("--preemptible", min=0, max=1, help="Share of preemptible jobs.")]
Elastic = Annotated[
    float,
    typer.Option("--elastic", min=0, max=1, help="Share of jobs that scale from half to four times their GPUs."),
]
SaveEvery = Annotated[
    float, typer.Option("--save-every", min=1, metavar="SECONDS", help="Checkpoint interval of jobs.")
]
Restart = Annotated[float, typer.Option("--restart", min=0, metavar="SECONDS", help="Duration of a restart.")]
NodeDays = Annotated[
    float | None,
    typer.Option("--node-days", min=0.01, help="Mean days between failures of a node (default: none)."),
]
Repair = Annotated[float, typer.Option("--repair", min=0, metavar="SECONDS", help="Duration of a node's repair.")]
Spares = Annotated[int, typer.Option("--spares", min=0, help="Nodes held in reserve.")]
Start = Annotated[str, typer.Option("--start", metavar="DATE", help="Day of second 0, for monthly budgets.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of what a trace does not specify.")]
PlotFile = Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="Plot usage and queue over time.")]
RecordFolder = Annotated[
    Path | None,
    typer.Option("--record", metavar="DIR", help="Record decisions for headway replay and headway why."),
]
FromLive = Annotated[
    bool, typer.Option("--from-live", help="Try --add or one --policy on the service's cluster as it is now.")
]
AddedJob = Annotated[Path | None, typer.Option("--add", metavar="JOB.toml", help="With --from-live: a job to try.")]


def simulate(
    trace_file: TraceFile = None,
    on: On = None,
    cluster: ClusterFile = None,
    topology: TopologyFile = None,
    away: AwayFile = None,
    workload: Workload = None,
    jobs: Jobs = None,
    load: Load = None,
    policy: PolicyNames = DEFAULT_POLICIES,
    preemptible: Preemptible = 0.5,
    elastic: Elastic = 0.0,
    save_every: SaveEvery = 1800,
    restart: Restart = 120,
    node_days: NodeDays = None,
    repair: Repair = 14400,
    spares: Spares = 0,
    start: Start = "1970-01-01",
    seed: Seed = 0,
    plot: PlotFile = None,
    record: RecordFolder = None,
    from_live: FromLive = False,
    add: AddedJob = None,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Simulate a job trace under several policies: months in seconds.

    Or try a job or a policy on the service's cluster before changing anything: --from-live.
    """
    if from_live:
        if trace_file is not None or workload is not None or on is not None or cluster is not None:
            raise UsageError("--from-live simulates the service's cluster", hint="leave trace and cluster out")
        try_live(runs_root(runs), add, None if policy == DEFAULT_POLICIES else policy, json)
        return
    if add is not None:
        raise UsageError("--add is for --from-live", hint="add --from-live")
    policies = find_policies(policy)
    chip, per_node, nodes, site = _where(on, cluster, topology, away)
    setup = SimulationSetup(
        chip,
        per_node,
        nodes,
        site=site,
        preemptible=preemptible,
        elastic=elastic,
        save_every_s=save_every,
        restart_s=restart,
        node_days=node_days,
        repair_s=repair,
        spares=spares,
        unix_zero_s=_unix_s(start),
        seed=seed,
    )
    if spares >= nodes:
        raise UsageError(f"--spares {spares} leaves none of {plural(nodes, 'node')}", hint="use fewer spares")
    _compare(_jobs(trace_file, workload, setup, jobs, load), setup, policies, record, plot, json)


def _compare(
    trace: JobTrace,
    setup: SimulationSetup,
    policies: list[Policy],
    record: Path | None,
    plot: Path | None,
    json: bool,
) -> None:
    """Simulate a trace under each policy, and print what came of it."""
    trace, skipped = skip_oversized(trace, setup, policies)
    if record is not None:
        _new_folder(record)
    if plot is not None:
        _check_plot(plot)
    with _bars([chosen.name for chosen in policies], len(trace), quiet=json) as progress:
        outcomes = compare_policies(trace, setup, policies, progress, record)
    summaries = {name: summary(outcome) for name, outcome in outcomes.items()}
    if plot is not None:
        _draw(outcomes, plot)
    if json:
        limits = {"jobs": len(trace), "gpus": setup.gpus, "without_waiting": zero_wait_bound(trace)}
        limits |= {"skipped": [error.message for error in skipped]}
        print_json(limits | {"policies": summaries})
    else:
        print("\n".join(_table(trace, setup, summaries, zero_wait_bound(trace), skipped)))


def _unix_s(day: str) -> float:
    """Return when a day begins, in Unix seconds."""
    try:
        return datetime.strptime(day, "%Y-%m-%d").replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise UsageError(f"--start {day!r} is not a day", hint="for example --start 2026-11-01") from None


def _where(
    on: str | None, cluster: Path | None, topology: Path | None, away: Path | None
) -> tuple[str, int, int, Site]:
    """Return chip, GPUs per node, nodes and site."""
    if (on is None) == (cluster is None):
        problem = "no cluster given" if on is None else "--on and --cluster exclude each other"
        raise UsageError(problem, hint="for example --on a100x8x32")
    hardware = load_cluster(cluster) if cluster is not None else parse_on(on or "")
    site = read_site(cluster) if cluster is not None else Site()
    if topology is not None:
        read = read_topology(topology)
        site = replace(site, hosts=read.hosts, domains=read.domains)
    if away is not None:
        site = replace(site, away=read_away(away))
    return hardware.chip.name, hardware.per_node, hardware.nodes, site


def _jobs(
    file: Path | None, workload: str | None, setup: SimulationSetup, jobs: int | None, load: float | None
) -> JobTrace:
    """Read or generate a trace."""
    if (file is None) == (workload is None):
        problem = "no job trace given" if file is None else "a job trace and --generate exclude each other"
        raise UsageError(problem, hint="give a CSV file or --generate acme-like")
    if file is None:
        return generate_trace(workload or "", setup.gpus, jobs, load, setup.seed)
    if jobs is not None or load is not None:
        option = "--load" if jobs is None else "--jobs"
        raise UsageError(f"{option} needs --generate; {file} is a trace", hint="--generate acme-like")
    return read_trace(file)


def _new_folder(record: Path) -> None:
    """Create the folder for records of this simulation."""
    try:
        record.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--record {record}: {error.strerror}", hint="give a new folder") from None
    if any(record.glob("*.jsonl.gz")):
        raise UsageError(f"--record {record}: it has records of another simulation", hint="give a new folder")


@contextmanager
def _bars(names: list[str], jobs: int, quiet: bool) -> Iterator[Callable[[str, int], None]]:
    """Yield what advances one bar per policy on a terminal, else prints lines."""
    if quiet or not sys.stderr.isatty():
        yield (lambda *_: None) if quiet else _progress_lines(jobs)
        return
    with terminal_bars("{task.description:8}", "Bar", "MofNComplete", "TimeRemaining") as bars:
        tasks = {name: bars.add_task(name, total=jobs) for name in names}
        yield lambda name, count: bars.advance(tasks[name], count)


def _progress_lines(jobs: int, clock: Callable[[], float] = time.monotonic) -> Callable[[str, int], None]:
    """Return what prints the progress of a policy every ten seconds."""
    done, last = dict[str, int](), clock()

    def progress(name: str, count: int) -> None:
        nonlocal last
        done[name] = done.get(name, 0) + count
        if clock() - last >= 10:
            last = clock()
            again = ", with other limits" if done[name] > jobs else ""
            print(f"{name}: {(done[name] - 1) % jobs + 1:,} of {jobs:,} jobs{again}", file=sys.stderr, flush=True)

    return progress


def _table(
    trace: JobTrace,
    setup: SimulationSetup,
    summaries: dict[str, dict[str, Any]],
    bound: dict[str, Any],
    skipped: Sequence[UsageError] = (),
) -> Iterator[str]:
    span = _short(trace.submit_s[-1] - trace.submit_s[0])
    jobs = plural(len(trace), "job")
    spares = f", spare nodes: {setup.spares}" if setup.spares else ""
    tenants = plural(len(trace.tenants), "tenant")
    yield f"{jobs} of {tenants} in {span}, on {plural(setup.gpus, 'GPU')} ({setup.per_node} per node{spares})"
    if skipped:
        yield f"skipped {plural(len(skipped), 'job')} that cannot run here:"
        yield from (f"  {error.message}" for error in skipped[:MAX_SKIPPED_LINES])
        if len(skipped) > MAX_SKIPPED_LINES:
            yield f"  and {len(skipped) - MAX_SKIPPED_LINES:,} more, which --json lists"
    yield ""
    yield f"{'':8}{'completion':>18}  {'delay':>27}  {'GPUs':>5}  {'owed':>5}  {'stops':>6}"
    yield f"{'':8}{'mean':>9}{'p99':>9}  {'mean':>9}{'p99':>9}{'worst':>9}  {'used':>5}"
    for name, figures in summaries.items():
        completion = f"{_short(figures['mean_jct_s']):>9}{_short(figures['p99_jct_s']):>9}"
        delay = "".join(f"{_short(figures[f'{key}_delay_s']):>9}" for key in ("mean", "p99", "worst"))
        use = f"{figures['utilization']:>5.0%}  {figures['quota_deficit']:>5.1%}  {figures['preemptions']:>6,}"
        yield f"{name:8}{completion}  {delay}  {use}"
    yield f"{'no wait':8}{_short(bound['mean_jct_s']):>9}{_short(bound['p99_jct_s']):>9}"
    if known := next(iter(summaries.values()))["deadlines"]:
        misses = ", ".join(f"{name} {figures['deadline_misses']:,}" for name, figures in summaries.items())
        yield f"of {known:,} deadlines missed: {misses}"
    if setup.node_days is not None:
        for name, figures in summaries.items():
            lost = figures["lost_gpu_s"]["failure"] / 3600
            stopped = plural(figures["failures"], "job")
            yield f"{name}: node failures stopped {stopped}, which lost {lost:,.0f} GPU-hours"
    yield ""
    yield "delay: completion minus run time. owed: what tenants requested within their"
    yield "guarantees and did not get, as a share of all guarantees."
    yield "next: --plot FILE.png plots it, --json prints all numbers"


def _short(seconds: float) -> str:
    """Return seconds in a suitable unit."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def _check_plot(file: Path) -> None:
    """Check the file of a plot before the simulation."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        raise UsageError("--plot needs matplotlib", hint="pip install 'headway[plot]'") from None
    known = sorted(FigureCanvasAgg.get_supported_filetypes())
    if file.suffix.lower().lstrip(".") not in known:
        raise UsageError(f"--plot {file}: unknown file type", hint=f"use one of {', '.join(known)}")
    if file.is_dir():
        raise UsageError(f"--plot {file}: it is a folder")
    if not file.parent.is_dir():
        raise UsageError(f"--plot {file}: no such folder")


def _draw(outcomes: dict[str, SimulationResult], file: Path) -> None:
    """Plot usage and queue over time, and the distribution of completion times."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    last = max(float(outcome.times[-1] - outcome.trace.submit_s[0]) for outcome in outcomes.values())
    size, unit = (86400, "days") if last > 3 * 86400 else (3600, "hours")
    figure, (use, queue, done) = pyplot.subplots(3, 1, figsize=(9, 10), layout="constrained")
    for name, outcome in outcomes.items():
        days = (outcome.times - outcome.trace.submit_s[0]) / size
        use.step(days, outcome.used, where="post", label=name, linewidth=0.8)
        queue.step(days, outcome.waiting, where="post", label=name, linewidth=0.8)
        completion = np.sort(outcome.completion_s)
        done.plot(completion / 3600, np.arange(1, len(completion) + 1) / len(completion), label=name, linewidth=1.2)
    use.set(ylabel="GPUs in use", xlabel=unit)
    queue.set(ylabel="GPUs queued", xlabel=unit)
    done.set(
        ylabel="share of jobs done", xlabel="hours after submission", xscale="log", xlim=(0.01, None), ylim=(0, 1.005)
    )
    for axes in (use, queue, done):
        axes.grid(alpha=0.3)
        axes.legend(loc="best", fontsize=8)
    try:
        figure.savefig(file, dpi=130)
    except (OSError, ValueError) as error:
        raise UsageError(f"--plot {file}: {error}") from None
