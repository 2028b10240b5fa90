"""`headway submit`: submits a run to the local queue, Slurm, Ray or Kubernetes, or anything to the service."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from headway.cli.options import Json, NoSharedFolder, Runs, Settings
from headway.cli.text import next_line, print_json
from headway.cluster.submit import runs as submitting
from headway.cluster.submit.commands import CommandResources, submit_command, with_user
from headway.errors import UsageError
from headway.hardware import Cluster, parse_on
from headway.recipe import load_recipe
from headway.track import command, runs_root

OF_SERVICE = "--tenant, --priority, --preemptible, --sizes, --after and --key are for --engine service"


def submit(
    what: Annotated[
        list[str], typer.Argument(metavar="RECIPE | -- COMMAND...", help="A recipe in TOML, or a command after --.")
    ],
    on: Annotated[
        str | None,
        typer.Option(
            "--on", metavar="CHIPxPERNODExNODES", help="Resources of a recipe's run: h100x8, h100x8x4 or cpux4."
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            metavar="ENGINE",
            help="What starts it: local (this machine, the default), service, slurm, ray or kubernetes.",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the run (default: the recipe's name and four digits) or command.")
    ] = None,
    spares: Annotated[
        int, typer.Option("--spares", min=0, metavar="N", help="Extra machines to request, to replace lost ones.")
    ] = 0,
    gpus: Annotated[int, typer.Option("--gpus", min=0, metavar="N", help="GPUs per machine of a command.")] = 0,
    machines: Annotated[int, typer.Option("--machines", min=1, metavar="N", help="Machines of a command.")] = 1,
    cpus: Annotated[
        int | None, typer.Option("--cpus", min=1, metavar="N", help="CPUs per machine of a command.")
    ] = None,
    memory_gib: Annotated[
        float | None, typer.Option("--memory-gib", min=0, metavar="GIB", help="Memory per machine of a command.")
    ] = None,
    tenant: Annotated[str | None, typer.Option("--tenant", help="Tenant of the service.")] = None,
    priority: Annotated[
        int | None, typer.Option("--priority", help="Priority at the service; higher goes first.")
    ] = None,
    preemptible: Annotated[
        bool | None,
        typer.Option(
            "--preemptible/--not-preemptible",
            help="Whether the service may stop and restart it (default: runs yes, commands no).",
        ),
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(
            "--sizes", metavar="GPUS:SPEED,...", help="An elastic command: --gpus first, for example 2:1,4:1.9."
        ),
    ] = None,
    after: Annotated[
        list[str] | None,
        typer.Option(
            "--after", metavar="JOB[:any]", help="Start once a job has succeeded (JOB:any: is over); repeatable."
        ),
    ] = None,
    key: Annotated[
        str | None, typer.Option("--key", metavar="TEXT", help="A command is submitted once per key, however often.")
    ] = None,
    secret: Annotated[
        list[str] | None,
        typer.Option("--secret", metavar="NAME", help="A secret that a command gets as a variable; repeatable."),
    ] = None,
    secret_file: Annotated[
        list[str] | None,
        typer.Option("--secret-file", metavar="NAME", help="A secret as a file, which NAME_FILE names; repeatable."),
    ] = None,
    upload: Annotated[
        bool, typer.Option("--upload", help="Run a command in a copy of this folder, as it is now.")
    ] = False,
    no_shared_folder: NoSharedFolder = False,
    runs: Runs = None,
    settings: Settings = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be submitted, and submit nothing.")
    ] = False,
    json: Json = False,
) -> None:
    """Submit a run to an engine: this machine's queue, the service, Slurm, Ray or Kubernetes.

    The service (headway up) takes any command, too. Settings of a site are in ~/.config/headway/engines.toml.
    """
    is_command, root = "--" in sys.argv, runs_root(runs)
    if (key is not None or sizes is not None) and not is_command:
        raise UsageError("--key and --sizes are for commands", hint="a run has a name: --name")
    engine = engine or ("service" if is_command else "local")
    only_service = {
        "tenant": tenant,
        "priority": None if priority is None else str(priority),
        "after": ",".join(after) if after else None,
        "key": key,
        "sizes": sizes,
        "secret_files": ",".join(secret_file) if secret_file else None,
    }
    site = _site(
        engine, {name: text for name, text in only_service.items() if text is not None}, preemptible, is_command
    )
    if is_command:
        if engine != "service":
            raise UsageError(f"--engine {engine} takes recipes, not commands", hint="--engine service")
        resources = CommandResources(machines, gpus, cpus, memory_gib, (*(secret or ()), *(secret_file or ())))
        submitted = submit_command(what, root, resources, name, site, upload=upload, dry=dry_run)
        name, job = submitted.request.name, submitted.job
        if dry_run:
            print_json({"engine": engine, "would_send": job}) if json else print(job, end="")
        elif json:
            print_json({"name": name, "engine": engine, "job": job, "repeated": submitted.repeated})
        else:
            print(
                f"already submitted as job {job} ({name})" if submitted.repeated else f"{name}: job {job} of {engine}"
            )
            print(next_line(*(command(root, words) for words in ("queue", f"logs {job} --follow", f"cancel {job}"))))
        return
    if secret or secret_file:
        raise UsageError("--secret is for commands", hint="recipes: secrets = [...] in engines.toml")
    if upload:
        raise UsageError("--upload is for commands", hint='recipes: code = "staged" in engines.toml')
    recipe, cluster = _recipe_and_cluster(what, on)
    loaded, shared = load_recipe(recipe, settings or ()), not no_shared_folder
    if dry_run:
        text = submitting.describe(loaded, root, cluster, engine, name, spares, shared=shared, site=site)
        print_json({"engine": engine, "would_send": text}) if json else print(text, end="")
        return
    submission = submitting.submit_run(loaded, root, cluster, engine, name, spares, shared=shared, site=site)
    run = submission.request.name
    if json:
        print_json({"run": run, "engine": engine, "job": submission.job, "on": cluster.name})
        return
    print(f"{run}: job {submission.job} of {engine}")
    listing = "queue" if engine == "service" else "jobs"
    print(next_line(*(command(root, words) for words in (listing, f"logs {run} --follow", f"cancel {run}"))))


def _recipe_and_cluster(what: list[str], on: str | None) -> tuple[Path, Cluster]:
    """Return the recipe and the devices of a run."""
    if len(what) > 1:
        raise UsageError(f"expected one recipe, got {' '.join(what)}", hint="put -- before a command")
    if on is None:
        raise UsageError("missing option '--on'", hint="the resources to request: h100x8, h100x8x4 or cpux4")
    return Path(what[0]), parse_on(on)


def _site(engine: str, stated: dict[str, str], preemptible: bool | None, is_command: bool) -> dict[str, str]:
    """Return the settings of a job that only the service has."""
    if engine != "service":
        if stated or preemptible is not None:
            raise UsageError(OF_SERVICE, hint="add --engine service")
        return {}
    stops = preemptible if preemptible is not None else not is_command
    return with_user({"preemptible": "yes" if stops else "no"} | stated)
