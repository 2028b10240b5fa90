"""`headway cluster`: files for people who set a cluster up."""

from pathlib import Path
from typing import Annotated

import typer

from headway.cli.options import Json

__all__ = ["app"]

app = typer.Typer(help="Files for people who set a cluster up.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _cluster() -> None:
    """Files for people who set a cluster up."""


@app.command(name="slurm-template")
def slurm_template(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write them; files that are there stay.")],
    controller: Annotated[str, typer.Option(help="The machine that slurmctld runs on.")] = "head",
    nodes: Annotated[str, typer.Option(help="The machines, as Slurm writes lists of them.")] = "node[1-4]",
    gpus: Annotated[int, typer.Option(min=0, max=64, help="Of each.")] = 8,
    cpus: Annotated[int, typer.Option(min=1, help="Of each.")] = 64,
    memory_mb: Annotated[int, typer.Option(min=1000, help="Of each.")] = 512000,
    json: Json = False,
) -> None:
    """Write a commented slurm.conf, gres.conf, cgroup.conf, prolog and epilog for runs that save and come back."""
    import re

    from headway.cli.text import print_json
    from headway.cluster.engines.slurm import site_advice as slurm_site
    from headway.errors import UsageError

    for option, value in (("--controller", controller), ("--nodes", nodes)):
        if not re.fullmatch(r"[A-Za-z0-9.,\[\]_()-]+", value):
            raise UsageError(f"{option} {value!r} names no machines", hint="for example node[1-4]")
    files = slurm_site.slurm_template(controller, nodes, cpus=cpus, memory_mb=memory_mb, gpus=gpus)
    there = [name for name in files if (folder / name).exists()]
    if there:
        raise UsageError(f"{folder} has {', '.join(there)} already", hint="name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
        if name.endswith(".sh"):
            (folder / name).chmod(0o755)
    if json:
        print_json({"folder": str(folder), "files": sorted(files)})
        return
    print(f"{folder}: {', '.join(sorted(files))}")
    print("next: put them into /etc/slurm on every machine, then headway doctor --engine slurm")
