"""`headway simulate`: a log of jobs on a cluster, under several policies."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli.options import Json

if TYPE_CHECKING:
    from headway.cluster.simulate import JobTrace, SimulationResult, SimulationSetup, Site

__all__ = ["simulate"]

USUAL_LOAD = 0.8


def simulate(
    log: Annotated[
        Path | None, typer.Argument(metavar="[TRACE]", help="Jobs as CSV, gzipped or not: see docs/scheduling.md.")
    ] = None,
    on: Annotated[
        str | None, typer.Option("--on", metavar="CHIPxPERNODExNODES", help="The cluster: a100x8x32.")
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option("--cluster", metavar="FILE", help="Or a cluster.toml, with tenants and topology.")
    ] = None,
    topology: Annotated[
        Path | None, typer.Option("--topology", metavar="FILE", help="Hosts and their switches as CSV.")
    ] = None,
    away: Annotated[
        Path | None, typer.Option("--away", metavar="FILE", help="Nodes that will be away as CSV: node,from_s,to_s.")
    ] = None,
    workload: Annotated[
        str | None, typer.Option("--generate", metavar="NAME", help="Make a log up: acme-like, seren-like.")
    ] = None,
    jobs: Annotated[int | None, typer.Option("--jobs", min=1, help="Of a log that is made up.")] = None,
    load: Annotated[
        float | None,
        typer.Option("--load", min=0.01, max=10, help="GPUs such a log asks for, of those there are; default 0.8."),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            "--policy", metavar="NAME,...", help="headway, slurm, kueue, fifo, las, edf; sjf and srtf are oracles."
        ),
    ] = "headway,slurm,kueue,fifo",
    preemptible: Annotated[
        float, typer.Option("--preemptible", min=0, max=1, help="Share of jobs that may be stopped and go on later.")
    ] = 0.5,
    elastic: Annotated[
        float,
        typer.Option("--elastic", min=0, max=1, help="Share of jobs that can have half to four times their GPUs."),
    ] = 0.0,
    save_every: Annotated[
        float, typer.Option("--save-every", min=1, metavar="SECONDS", help="Between a job's checkpoints.")
    ] = 1800,
    restart: Annotated[float, typer.Option("--restart", min=0, metavar="SECONDS", help="What a restart takes.")] = 120,
    node_days: Annotated[
        float | None, typer.Option("--node-days", min=0.01, help="Days between failures of a node; default never.")
    ] = None,
    repair: Annotated[
        float, typer.Option("--repair", min=0, metavar="SECONDS", help="What mending a node takes.")
    ] = 14400,
    spares: Annotated[int, typer.Option("--spares", min=0, help="Of the nodes, how many wait to replace one.")] = 0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of what a log does not say.")] = 0,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw what happened.")] = None,
    record: Annotated[
        Path | None, typer.Option("--record", metavar="DIR", help="Keep every decision: headway replay, headway why.")
    ] = None,
    json: Json = False,
) -> None:
    """Run a log of jobs through the scheduler, months in seconds, under several policies."""
    from headway.cli.text import print_json
    from headway.cluster.simulate import SimulationSetup, compare_policies, find_policies, summary, zero_wait_bound
    from headway.errors import UsageError

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
        seed=seed,
    )
    if spares >= nodes:
        raise UsageError(f"--spares {spares}, of {nodes} nodes", hint="leave some to work on")
    trace = _jobs(log, workload, setup, jobs, load)
    if record is not None:
        _new_folder(record)
    if plot is not None:
        _check_plot(plot)
    with _bars([one.name for one in policies], len(trace), quiet=json) as progress:
        outcomes = compare_policies(trace, setup, policies, progress, record)
    summaries = {name: summary(outcome) for name, outcome in outcomes.items()}
    if plot is not None:
        _draw(outcomes, plot)
    if json:
        limits = {"jobs": len(trace), "gpus": setup.gpus, "without_waiting": zero_wait_bound(trace)}
        print_json(limits | {"policies": summaries})
    else:
        print("\n".join(_table(trace, setup, summaries, zero_wait_bound(trace))))


def _where(
    on: str | None, cluster: Path | None, topology: Path | None, away: Path | None
) -> "tuple[str, int, int, Site]":
    """Chip, GPUs of a node, nodes, and what is known beside."""
    from dataclasses import replace

    from headway.cluster.simulate import Site, read_away, read_site, read_topology
    from headway.errors import UsageError
    from headway.hardware import load_cluster, parse_on

    if (on is None) == (cluster is None):
        what = "neither --on nor --cluster says" if on is None else "--on and --cluster both say"
        raise UsageError(f"{what} where the jobs run", hint="for example --on a100x8x32")
    found = load_cluster(cluster) if cluster is not None else parse_on(on or "")
    site = read_site(cluster) if cluster is not None else Site()
    if topology is not None:
        there = read_topology(topology)
        site = replace(site, hosts=there.hosts, domains=there.domains)
    if away is not None:
        site = replace(site, away=read_away(away))
    return found.chip.name, found.per_node, found.nodes, site


def _jobs(
    log: Path | None, workload: str | None, setup: "SimulationSetup", jobs: int | None, load: float | None
) -> "JobTrace":
    """A log that is read or made up."""
    from headway.cluster.simulate import generate_trace, read_trace
    from headway.errors import UsageError

    if (log is None) == (workload is None):
        what = "there is no log of jobs" if log is None else "there are a log of jobs and --generate"
        raise UsageError(what, hint="name a CSV file, or --generate acme-like")
    if log is None:
        return generate_trace(workload or "", setup.gpus, jobs, USUAL_LOAD if load is None else load, setup.seed)
    if jobs is not None or load is not None:
        option = "--load" if jobs is None else "--jobs"
        raise UsageError(f"{option} is of a log that is made up, and {log} is there", hint="--generate acme-like")
    return read_trace(log)


def _new_folder(record: Path) -> None:
    """For records of this log alone."""
    from headway.errors import UsageError

    try:
        record.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--record {record}: {error.strerror}", hint="it names a new folder") from None
    if any(record.glob("*.jsonl.gz")):
        raise UsageError(f"--record {record}: there are records of another simulation", hint="name a new folder")


@contextmanager
def _bars(names: list[str], jobs: int, quiet: bool) -> Iterator[Callable[[str, int], None]]:
    """A bar for each policy on a terminal, and elsewhere a line now and then."""
    if quiet or not sys.stderr.isatty():
        yield (lambda *_: None) if quiet else _told(jobs)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description:8}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks = {name: bars.add_task(name, total=jobs) for name in names}
        yield lambda name, count: bars.advance(tasks[name], count)


def _told(jobs: int, clock: Callable[[], float] = time.monotonic) -> Callable[[str, int], None]:
    """Says on standard error how far a policy is, every ten seconds."""
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
    trace: "JobTrace", setup: "SimulationSetup", found: dict[str, dict[str, Any]], bound: dict[str, Any]
) -> Iterator[str]:
    span = _short(trace.submit_s[-1] - trace.submit_s[0])
    jobs = "one job" if len(trace) == 1 else f"{len(trace):,} jobs"
    spares = f", spare nodes: {setup.spares}" if setup.spares else ""
    tenants = f"{len(trace.tenants)} tenants" if len(trace.tenants) > 1 else "one tenant"
    yield f"{jobs} of {tenants} in {span}, on {setup.gpus:,} GPUs ({setup.per_node} a node{spares})"
    yield ""
    yield f"{'':8}{'completion':>18}  {'delay':>27}  {'GPUs':>5}  {'owed':>5}  {'stops':>6}"
    yield f"{'':8}{'mean':>9}{'p99':>9}  {'mean':>9}{'p99':>9}{'worst':>9}  {'used':>5}"
    for name, one in found.items():
        completion = f"{_short(one['mean_jct_s']):>9}{_short(one['p99_jct_s']):>9}"
        delay = f"{_short(one['mean_delay_s']):>9}{_short(one['p99_delay_s']):>9}{_short(one['worst_delay_s']):>9}"
        use = f"{one['utilization']:>5.0%}  {one['quota_deficit']:>5.1%}  {one['preemptions']:>6,}"
        yield f"{name:8}{completion}  {delay}  {use}"
    yield f"{'no wait':8}{_short(bound['mean_jct_s']):>9}{_short(bound['p99_jct_s']):>9}"
    if known := next(iter(found.values()))["deadlines"]:
        misses = ", ".join(f"{name} {one['deadline_misses']:,}" for name, one in found.items())
        yield f"of {known:,} deadlines missed: {misses}"
    if setup.node_days is not None:
        for name, one in found.items():
            lost = one["lost_gpu_s"]["failure"] / 3600
            yield f"{name}: failing nodes stopped {one['failures']:,} jobs, which lost {lost:,.0f} GPU-hours"
    yield ""
    yield "delay: completion less the run time alone. owed: what tenants asked for within"
    yield "their guarantees and did not have, of all that is guaranteed."
    yield "next: --plot FILE.png draws it, --json has all numbers"


def _short(seconds: float) -> str:
    """Seconds in the unit that suits them."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def _check_plot(file: Path) -> None:
    """Before the hours are simulated that it will show."""
    from headway.errors import UsageError

    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        raise UsageError("--plot needs matplotlib", hint="pip install 'headway[plot]'") from None
    known = sorted(FigureCanvasAgg.get_supported_filetypes())
    if file.suffix.lower().lstrip(".") not in known:
        raise UsageError(f"--plot {file}: its name does not end with a known kind", hint=f"one of {', '.join(known)}")
    if file.is_dir():
        raise UsageError(f"--plot {file}: that is a folder")
    if not file.parent.is_dir():
        raise UsageError(f"--plot {file}: its folder is not there")


def _draw(outcomes: "dict[str, SimulationResult]", file: Path) -> None:
    """Use and queue over time, and how many jobs are done after how long."""
    import matplotlib

    from headway.errors import UsageError

    matplotlib.use("Agg")
    import numpy as np
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
    queue.set(ylabel="GPUs waited for", xlabel=unit)
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
