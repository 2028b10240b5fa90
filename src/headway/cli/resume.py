"""`headway resume`: a run goes on from its newest checkpoint."""

from typing import Annotated

import typer

from headway.cli.options import Detach, Json, Runs, Settings

__all__ = ["resume"]


def resume(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="A run's name, a unique prefix of it, `last`, or its address in its store: s3://bucket/prefix/RUN.",
        ),
    ],
    workers: Annotated[
        int | None,
        typer.Option("--workers", min=1, metavar="N", help="Processes to train with (default: as before)."),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(metavar="AXIS=N,...", help="Go on with another layout of workers (default: as before)."),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option("--nodes", min=1, metavar="N", help="Emulate so many nodes here (default: as before)."),
    ] = None,
    spares: Annotated[
        int | None,
        typer.Option(
            "--spares", min=0, metavar="N", help="Nodes that wait to replace a lost one (default: as before)."
        ),
    ] = None,
    runs: Runs = None,
    settings: Settings = None,
    detach: Detach = False,
    json: Json = False,
) -> None:
    """Go on with a run that was stopped, killed or failed.

    Some settings may change; those that would make another run of it are refused by name. The address of a run in its
    object store (s3://bucket/prefix/RUN) has its folder made here, from what the store has.
    """
    from headway.agent import resume_run, stated_recipe
    from headway.cli.launch import launch
    from headway.cli.mesh import parse_layout
    from headway.cli.run_lookup import folder_of

    folder, apart = folder_of(run, runs, alone=True)
    wanted = None if mesh is None else parse_layout(mesh, stated_recipe(folder).parallel)
    attempt = resume_run(folder, settings or [], workers=workers, mesh=wanted, nodes=nodes, spares=spares)
    launch(attempt.model_copy(update={"apart": apart}), detach=detach, json=json)
