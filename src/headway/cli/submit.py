"""`headway submit`: submits a run to the local queue, Slurm, Ray or Kubernetes, or anything to the service."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from headway.cli.options import Json, NoSharedFolder, Runs, Settings
from headway.cli.text import next_line, print_json
from headway.cluster.submit.commands import CommandResources, SubmittedCommand, submit_command, with_user
from headway.errors import UsageError
from headway.hardware import Cluster, parse_on
from headway.track import command, runs_root

OF_SERVICE = "--tenant, --priority, --preemptible, --sizes, --spread, --after and --key are for --engine service"
RecipeOrCommand = Annotated[
    list[str], typer.Argument(metavar="RECIPE | -- COMMAND...", help="A recipe in TOML, or a command after --.")
]
On = Annotated[
    str | None,
    typer.Option("--on", metavar="CHIPxPERNODExNODES", help="Resources of a recipe's run: h100x8, h100x8x4 or cpux4."),
]
Engine = Annotated[
    str | None,
    typer.Option(
        "--engine",
        metavar="ENGINE",
        help="What starts it: local (this machine, the default), service, slurm, ray or kubernetes.",
    ),
]
Name = Annotated[
    str | None, typer.Option(help="Name of the run (default: the recipe's name and four digits) or command.")
]
Spares = Annotated[
    int, typer.Option("--spares", min=0, metavar="N", help="Extra machines to request, to replace lost ones.")
]
Gpus = Annotated[int, typer.Option("--gpus", min=0, metavar="N", help="GPUs per machine of a command.")]
Machines = Annotated[int, typer.Option("--machines", min=1, metavar="N", help="Machines of a command.")]
Cpus = Annotated[int | None, typer.Option("--cpus", min=1, metavar="N", help="CPUs per machine of a command.")]
MemoryGib = Annotated[
    float | None, typer.Option("--memory-gib", min=0, metavar="GIB", help="Memory per machine of a command.")
]
Tenant = Annotated[str | None, typer.Option("--tenant", help="Tenant of the service.")]
Priority = Annotated[int | None, typer.Option("--priority", help="Priority at the service; higher goes first.")]
Preemptible = Annotated[
    bool | None,
    typer.Option(
        "--preemptible/--not-preemptible",
        help="Whether the service may stop and restart it (default: runs yes, commands no).",
    ),
]
Sizes = Annotated[
    str | None,
    typer.Option(
        "--sizes",
        metavar="GPUS[:SPEED],...",
        help="GPUs of an elastic job, smallest first, and speeds: 2:1,4:1.9; plans of a recipe predict them: 2,4.",
    ),
]
Spread = Annotated[
    bool, typer.Option("--spread", help="An elastic command may be on several machines, as recipes may.")
]
After = Annotated[
    list[str] | None,
    typer.Option("--after", metavar="JOB[:any]", help="Start once a job has succeeded (JOB:any: is over); repeatable."),
]
SubmissionKey = Annotated[
    str | None, typer.Option("--key", metavar="TEXT", help="A command is submitted once per key, however often.")
]
Secrets = Annotated[
    list[str] | None,
    typer.Option("--secret", metavar="NAME", help="A secret that a command gets as a variable; repeatable."),
]
SecretFiles = Annotated[
    list[str] | None,
    typer.Option("--secret-file", metavar="NAME", help="A secret as a file, which NAME_FILE names; repeatable."),
]
Upload = Annotated[bool, typer.Option("--upload", help="Run a command in a copy of this folder, as it is now.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be submitted, and submit nothing.")]


def submit(
    what: RecipeOrCommand,
    on: On = None,
    engine: Engine = None,
    name: Name = None,
    spares: Spares = 0,
    gpus: Gpus = 0,
    machines: Machines = 1,
    cpus: Cpus = None,
    memory_gib: MemoryGib = None,
    tenant: Tenant = None,
    priority: Priority = None,
    preemptible: Preemptible = None,
    sizes: Sizes = None,
    spread: Spread = False,
    after: After = None,
    key: SubmissionKey = None,
    secret: Secrets = None,
    secret_file: SecretFiles = None,
    upload: Upload = False,
    no_shared_folder: NoSharedFolder = False,
    runs: Runs = None,
    settings: Settings = None,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Submit a run to an engine: this machine's queue, the service, Slurm, Ray or Kubernetes.

    The service (headway up) takes any command, too. Settings of a site are in ~/.config/headway/engines.toml.
    """
    is_command, root = "--" in sys.argv, runs_root(runs)
    if key is not None and not is_command:
        raise UsageError("--key is for commands", hint="a run has a name: --name")
    engine = engine or ("service" if is_command else "local")
    only_service = {
        "tenant": tenant,
        "priority": None if priority is None else str(priority),
        "after": ",".join(after) if after else None,
        "key": key,
        "sizes": sizes,
        "spread": "yes" if spread else None,
        "secret_files": ",".join(secret_file) if secret_file else None,
    }
    stated = {name: text for name, text in only_service.items() if text is not None}
    site = _site(engine, stated, preemptible, is_command)
    if is_command:
        if engine != "service":
            raise UsageError(f"--engine {engine} takes recipes, not commands", hint="--engine service")
        resources = CommandResources(machines, gpus, cpus, memory_gib, (*(secret or ()), *(secret_file or ())))
        submitted = submit_command(what, root, resources, name, site, upload=upload, dry=dry_run)
        _print_command(submitted, root, dry_run, json)
        return
    if secret or secret_file:
        raise UsageError("--secret is for commands", hint="recipes: secrets = [...] in engines.toml")
    if upload:
        raise UsageError("--upload is for commands", hint='recipes: code = "staged" in engines.toml')
    from headway.cluster.submit import runs as submitting  # which a command does not wait for
    from headway.recipe import load_recipe

    recipe, cluster = _recipe_and_cluster(what, on)
    loaded, shared = load_recipe(recipe, settings or ()), not no_shared_folder
    if dry_run:
        text = submitting.describe(loaded, root, cluster, engine, name, spares, shared=shared, site=site)
        print_json({"engine": engine, "would_send": text}) if json else print(text, end="")
        return
    submission = submitting.submit_run(loaded, root, cluster, engine, name, spares, shared=shared, site=site)
    run, job = submission.request.name, submission.job
    curve = [part.split(":") for part in submission.request.site.get("sizes", "").split(",") if part]
    if json:
        elastic = {"sizes": [[int(gpus), float(speed)] for gpus, speed in curve]} if curve else {}
        print_json({"run": run, "engine": engine, "job": job, "on": cluster.name} | elastic)
        return
    print(f"{run}: job {job} of {engine}")
    if curve:
        larger = "".join(f"; {gpus} GPUs, {speed} times as fast" for gpus, speed in curve[1:])
        print(f"sizes: {curve[0][0]} GPUs{larger}")
    print(_next(root, "queue" if engine == "service" else "jobs", run))


def _print_command(submitted: SubmittedCommand, root: Path, dry_run: bool, json: bool) -> None:
    """Print what became of a command, or would."""
    name, job = submitted.request.name, submitted.job
    if dry_run:
        print_json({"engine": "service", "would_send": job}) if json else print(job, end="")
    elif json:
        print_json({"name": name, "engine": "service", "job": job, "repeated": submitted.repeated})
    else:
        print(f"already submitted as job {job} ({name})" if submitted.repeated else f"{name}: job {job} of service")
        print(_next(root, "queue", job))


def _next(root: Path, listing: str, job: str) -> str:
    """Return the commands that follow a submission."""
    return next_line(*(command(root, words) for words in (listing, f"logs {job} --follow", f"cancel {job}")))


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
            raise UsageError(OF_SERVICE, hint="add --engine service for a recipe, and -- before a command: -- true")
        return {}
    stops = preemptible if preemptible is not None else not is_command
    return with_user({"preemptible": "yes" if stops else "no"} | stated)
