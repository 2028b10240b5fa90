"""`headway`: puts the verbs together, and turns errors into a sentence, a hint and an exit status."""

import errno
import gc
import os
import shutil
import sys
import textwrap
from typing import Annotated

import typer

from headway import __version__
from headway.cli import (
    agent,
    cancel,
    chaos,
    check,
    checkpoint,
    cluster,
    data,
    diff,
    doctor,
    fetch,
    hardware,
    jobs,
    kernels,
    logs,
    metrics,
    model,
    nodes,
    plan,
    ps,
    recipe,
    replay,
    report,
    requeue,
    resume,
    runs,
    sample,
    simulate,
    stacks,
    stop,
    submit,
    sweep,
    trace,
    train,
    why,
)
from headway.errors import HeadwayError

__all__ = ["app", "main"]

OF_THE_WORLD = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}
"""Errors of disks and permissions: nobody's bug, told without a traceback."""

app = typer.Typer(
    name="headway",
    help="Trains foundation models and accounts for every GPU-second.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

app.command()(plan.plan)
app.command()(train.train)
app.command()(resume.resume)
app.command()(submit.submit)
app.command()(sweep.sweep)
app.command()(jobs.jobs)
app.command()(cancel.cancel)
app.command()(requeue.requeue)
app.command()(fetch.fetch)
app.command()(nodes.nodes)
app.command()(stop.stop)
app.command()(runs.runs)
app.command()(ps.ps)
app.command()(agent.agent)
app.command()(report.report)
app.command()(metrics.metrics)
app.command()(logs.logs)
app.command()(stacks.stacks)
app.command()(diff.diff)
app.command()(check.check)
app.command()(doctor.doctor)
app.command()(chaos.chaos)
app.command()(sample.sample)
app.command()(kernels.kernels)
app.command()(simulate.simulate)
app.command()(replay.replay)
app.command()(why.why)
app.add_typer(recipe.app, name="recipe")
app.add_typer(cluster.app, name="cluster")
app.add_typer(trace.app, name="trace")
app.add_typer(data.app, name="data")
app.add_typer(model.app, name="model")
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(hardware.app, name="hardware")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"headway {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Trains foundation models and accounts for every GPU-second."""


def main() -> None:
    """Run one command; exit 0 done, 1 failed, 2 usage, 75 stopped early and worth resuming."""
    gc.set_threshold(50_000)  # what is imported stays: looking for garbage in it takes a tenth of a short verb's time
    try:
        app()
    except HeadwayError as error:
        _tell(error.message, error.hint)
        sys.exit(error.exit_status)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:
        if error.errno not in OF_THE_WORLD:
            raise
        _tell(f"{error.filename or 'writing'}: {error.strerror}", "free some space, or choose another place")
        sys.exit(1)


def _tell(message: str, hint: str | None) -> None:
    """An error for people on standard error, and for programs that asked for JSON on standard output."""
    for lead, text in (("error: ", message), ("hint:  ", hint)):
        if text:
            print(_wrapped(lead, text) if sys.stderr.isatty() else f"{lead}{text}", file=sys.stderr)
    if "--json" in sys.argv:
        import json

        try:
            print(json.dumps({"error": message, "hint": hint}), flush=True)
        except OSError:  # it is standard output that failed: the words above say so
            sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 (or the interpreter would try again at its end)


def _wrapped(lead: str, text: str) -> str:
    """Lines no wider than the terminal, those after the first below its words."""
    return textwrap.fill(
        text,
        max(40, shutil.get_terminal_size().columns),
        initial_indent=lead,
        subsequent_indent=" " * len(lead),
        break_long_words=False,
        break_on_hyphens=False,
    )


if __name__ == "__main__":
    main()
