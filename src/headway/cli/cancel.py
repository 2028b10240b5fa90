"""`headway cancel`: a submitted run, or all runs of a sweep, save and end, and are not started again."""

from headway.cli.options import Json, RunOrSweep, Runs

__all__ = ["cancel"]


def cancel(
    run: RunOrSweep,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Have the job of a run end, or of all runs of a sweep: it saves within its grace, and nobody starts it again."""
    from headway.cli.jobs import as_document, sweep_named, tell_of_sweep
    from headway.cli.text import print_json
    from headway.cluster.submit import runs as submit
    from headway.cluster.submit.sweeps import cancel_sweep
    from headway.track import find_run, runs_root

    root = runs_root(runs)
    sweep = sweep_named(root, run)
    if sweep is not None:
        tell_of_sweep(sweep, cancel_sweep(root, sweep), json)
        return
    after = submit.cancel(root, find_run(root, run))
    if json:
        print_json(as_document(after))
        return
    print(f"{after.run.name}: job {after.submission.job} is {after.status.state}")
    print(f"next: headway jobs, headway requeue {after.run.name}")
