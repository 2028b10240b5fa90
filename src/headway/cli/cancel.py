"""`headway cancel`: saves and cancels a submitted run, a sweep, or a job of the service."""

from headway.cli.jobs import as_document, print_sweep_jobs, sweep_named
from headway.cli.options import Json, RunOrSweep, Runs
from headway.cli.service_jobs import change_job, service_job
from headway.cli.text import next_line, print_json
from headway.cluster.submit import runs as submit
from headway.cluster.submit.sweeps import cancel_sweep
from headway.track import command, find_run, runs_root


def cancel(
    run: RunOrSweep,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Save and cancel a submitted run, all runs of a sweep, or a job of the service.

    Each saves within its grace period.
    """
    root = runs_root(runs)
    sweep = sweep_named(root, run)
    if sweep is not None:
        print_sweep_jobs(root, sweep, cancel_sweep(root, sweep), json)
        return
    if service_job(root, run) is not None:
        change_job(root, run, "cancel", json)
        return
    after = submit.cancel(root, find_run(root, run))
    if json:
        print_json(as_document(after))
        return
    print(f"{after.run.name}: job {after.submission.job} is {after.status.state}")
    print(next_line(command(root, "jobs"), after.run.command("requeue")))
