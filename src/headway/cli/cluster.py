"""`headway cluster`: generates configuration files for a cluster."""

import re
from pathlib import Path
from typing import Annotated

import typer

from headway.cli.options import Json
from headway.cli.text import print_json
from headway.cluster.engines.slurm import site_advice as slurm_site
from headway.errors import UsageError

app = typer.Typer(help="Generate configuration files for a cluster.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _cluster() -> None:
    """Generate configuration files for a cluster."""


@app.command(name="slurm-template")
def slurm_template(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write to; nothing is overwritten.")],
    controller: Annotated[str, typer.Option(help="Machine that slurmctld runs on.")] = "head",
    nodes: Annotated[str, typer.Option(help="Machines, as a Slurm host list.")] = "node[1-4]",
    gpus: Annotated[int, typer.Option(min=0, max=64, help="GPUs per machine.")] = 8,
    cpus: Annotated[int, typer.Option(min=1, help="CPUs per machine.")] = 64,
    memory_mb: Annotated[int, typer.Option(min=1000, help="Memory per machine in MB.")] = 512000,
    json: Json = False,
) -> None:
    """Write a Slurm configuration for preemptible runs.

    Creates a commented slurm.conf, gres.conf, cgroup.conf, prolog and epilog.
    """
    for option, value in (("--controller", controller), ("--nodes", nodes)):
        if not re.fullmatch(r"[A-Za-z0-9.,\[\]_()-]+", value):
            raise UsageError(f"{option} {value!r} is not a host list", hint="for example node[1-4]")
    files = slurm_site.slurm_template(controller, nodes, cpus=cpus, memory_mb=memory_mb, gpus=gpus)
    existing = [name for name in files if (folder / name).exists()]
    if existing:
        raise UsageError(f"{folder} already has {', '.join(existing)}", hint="choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
        if name.endswith(".sh"):
            (folder / name).chmod(0o755)
    if json:
        print_json({"folder": str(folder), "files": sorted(files)})
        return
    print(f"{folder}: {', '.join(sorted(files))}")
    print("next: copy them to /etc/slurm on every machine, then headway doctor --engine slurm")
