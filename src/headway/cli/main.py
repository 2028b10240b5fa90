"""`headway`: verbs in groups, imported when called; errors become a message, a hint and an exit status."""

import contextlib
import errno
import gc
import json
import os
import shutil
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from typer.completion import completion_init  # type: ignore[attr-defined]
from typer.core import TyperGroup

from headway import __version__
from headway.cli.lazy import LazyCommands
from headway.cli.text import wrap_lines
from headway.errors import INTERRUPTED, HeadwayError, UsageError

CLICK_USAGE_ERROR: Any = typer.BadParameter.__mro__[1]
"""Typer has a copy of Click's classes, and does not export this one."""
ENVIRONMENT_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}
"""Errors of disks and permissions, not bugs: reported without a traceback."""

VERBS: dict[str, dict[str, str]] = {
    "Plan and prepare": {
        "plan": "Find the fastest way to run a recipe on a cluster",
        "recipe": "List, copy and show recipes, or print their schema",
        "data": "Build, inspect, compare and mix datasets",
        "model": "Show, compare and name models",
        "hardware": "List known chips and benchmark this machine",
    },
    "Train and use": {
        "train": "Train a recipe on this machine",
        "resume": "Resume a stopped, killed or failed run",
        "stop": "Save a running run and stop it",
        "sample": "Generate text, images or video with a model",
        "generate": "Run a file of prompts through a model",
        "eval": "Evaluate a model on tasks from local files",
        "serve": "Serve a model by the OpenAI API",
        "checkpoint": "List, verify, compare, export and import checkpoints",
    },
    "Inspect runs": {
        "runs": "List, query and label runs; results of sweeps",
        "ps": "List active runs and processes on this machine",
        "report": "Show where every device-second of a run went",
        "metrics": "Print, plot or export metrics of runs",
        "compare": "Show what differs between runs, and its effect",
        "ui": "Show runs, ledgers and samples in a browser",
        "logs": "Show or follow a run's logs",
        "stacks": "Show what each worker is doing right now",
        "diff": "Compare two runs bit for bit",
        "explain": "Show the documents a step trained on",
        "lineage": "Show what a model came from, and what it became",
        "rl": "Show, compare and replay rollouts of a run",
        "fetch": "Sync a run's records from its object store",
    },
    "Submit jobs": {
        "up": "Start the service that schedules a cluster's jobs",
        "submit": "Submit a run, or a command, to an engine",
        "sweep": "Run a grid of settings as one job and rank it",
        "jobs": "List submitted jobs and their state",
        "queue": "List the jobs of the service",
        "events": "Print what happened on the service's cluster",
        "usage": "Print what tenants used in a month, and its price",
        "priority": "Change the priority of a job of the service",
        "port-forward": "Connect a local port to one of a running job",
        "hold": "Keep a waiting job of the service from starting",
        "release": "Let a held job of the service start",
        "cancel": "Save and cancel a submitted run or sweep",
        "requeue": "Restart a submitted run, or a sweep's failed runs",
        "login": "Say which service verbs ask, and who you are",
        "whoami": "Show your user, role and tenants at the service",
        "users": "List, add, change and remove users",
        "tokens": "List, make and revoke tokens of the service",
        "tenants": "List, add and change tenants and their limits",
        "budget": "Show and set GPU-hours per month of tenants",
        "secrets": "List, set and remove secrets that jobs get",
        "nodes": "List an engine's machines and what is free",
        "node": "Make this machine a node of a service",
        "drain": "Empty a node of the service, now or at a time",
        "agent": "Run the agent of one node, or have a node leave",
    },
    "Simulate and explain scheduling": {
        "simulate": "Simulate a job trace under several policies",
        "trace": "Import job traces from other schedulers",
        "replay": "Repeat recorded scheduling decisions and compare",
        "why": "Explain why a job waits and when it may start",
        "cluster": "Generate configuration files for a cluster",
    },
    "Verify and diagnose": {
        "check": "Verify that a mesh computes what one process does",
        "chaos": "Inject faults into small runs, verify recovery",
        "doctor": "Check storage, network or an engine before a run",
        "kernels": "Show which kernel runs each operation, and why",
        "completion": "Print the completion script of a shell",
    },
}
"""Every verb by group, with its help."""


@contextlib.contextmanager
def _own_errors() -> Iterator[None]:
    """Turn Click's usage errors into ours: a sentence, and where to read more."""
    try:
        yield
    except CLICK_USAGE_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # a group without a verb prints its help
            raise
        message = error.format_message().replace("Value error, ", "").strip().rstrip(".")
        verb = error.ctx.command_path if error.ctx is not None else "headway"
        hint = f"{verb} --help lists what it takes"
        if "requires an argument" in message:
            hint = f"give it a value: {getattr(error, 'option_name', None) or 'the option'} VALUE"
        raise UsageError(message[:1].lower() + message[1:], hint=hint) from None


class LazyGroup(TyperGroup):
    """Verbs that are imported when they are called, so that `headway report` does not pay for `headway plan`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options | {"commands": LazyCommands([verb for verbs in VERBS.values() for verb in verbs])})

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        """Parse the options before the verb; a mistake is an error of ours."""
        with _own_errors():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: Any) -> Any:
        """Parse and run the verb; a mistake is an error of ours."""
        with _own_errors():
            return super().invoke(ctx)

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """Write the verbs under the names of their groups; none is imported for that."""
        width = max(map(len, self.commands))
        for group, verbs in VERBS.items():
            with formatter.section(group):
                formatter.write_dl([(f"{verb:{width}}", text) for verb, text in verbs.items()])


app = typer.Typer(
    name="headway",
    cls=LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(requested: bool) -> None:
    if requested:
        print(f"headway {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train foundation models and account for every GPU-second."""


def main() -> None:
    """Run one command; exit with 0 done, 1 failed, 2 usage error, 75 stopped early and resumable, 130 interrupted."""
    gc.set_threshold(50_000)  # imports leave no garbage: looking for it takes a tenth of a short verb's time
    if "_HEADWAY_COMPLETE" in os.environ:  # a shell asks, through the script of `headway completion`
        completion_init()
    try:
        app()
    except HeadwayError as error:
        _print_error(error.message, error.hint)
        sys.exit(error.exit_status)
    except SystemExit as ended:
        interruption = _interruption(ended) if ended.code == INTERRUPTED else None
        if interruption is not None:
            print(": ".join(("interrupted", *map(str, interruption.args))), file=sys.stderr)
        raise
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:
        if error.errno not in ENVIRONMENT_ERRORS:
            raise
        _print_error(f"{error.filename or 'writing'}: {error.strerror}", "free some space or choose another location")
        sys.exit(1)


def _interruption(error: BaseException | None) -> KeyboardInterrupt | None:
    """Return the Ctrl-C that led to an error, if one did: Typer turns it into an exit."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error


def _print_error(message: str, hint: str | None) -> None:
    """Print an error on standard error, and on standard output too if JSON was requested."""
    for label, text in (("error: ", message), ("hint:  ", hint)):
        if text:
            print(_wrap(label, text) if sys.stderr.isatty() else f"{label}{text}", file=sys.stderr)
    if "--json" in sys.argv:
        try:
            print(json.dumps({"error": message, "hint": hint}), flush=True)
        except OSError:  # standard output itself failed, as reported above
            sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 (or the interpreter would try again at its end)


def _wrap(label: str, text: str) -> str:
    """Wrap the first line of a message at the width of the terminal, with a hanging indent; further lines point into
    a query, and stay as they are."""
    first, *further = text.split("\n")
    lines = wrap_lines(first, label, len(label), max(40, shutil.get_terminal_size().columns))
    return "\n".join([*lines, *further])


if __name__ == "__main__":
    main()
