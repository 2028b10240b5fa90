"""`headway resume`: continues a run from its newest checkpoint."""

from typing import Annotated

import typer

from headway.agent import resume_run, stated_recipe
from headway.cli.launch import launch
from headway.cli.mesh import parse_layout
from headway.cli.options import Detach, Json, Runs, Settings, complete_run
from headway.cli.run_lookup import folder_of
from headway.track import is_set_aside, take_back


def resume(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            autocompletion=complete_run,
            help="A run's name, a unique prefix of it, `last`, or its address in a store: s3://bucket/prefix/RUN.",
        ),
    ],
    workers: Annotated[
        int | None,
        typer.Option("--workers", min=1, metavar="N", help="Processes to train with (default: as before)."),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(metavar="AXIS=N,...", help="Resume on another mesh (default: as before)."),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option("--nodes", min=1, metavar="N", help="Emulate N nodes on this machine (default: as before)."),
    ] = None,
    spares: Annotated[
        int | None,
        typer.Option("--spares", min=0, metavar="N", help="Spare nodes that replace lost ones (default: as before)."),
    ] = None,
    runs: Runs = None,
    settings: Settings = None,
    detach: Detach = False,
    json: Json = False,
) -> None:
    """Resume a stopped, killed or failed run.

    Given an address in an object store (s3://bucket/prefix/RUN), the run's folder is first restored from the store.

    Some keys may change, others would make it another run: train.steps, train.microbatch, train.recompute,
    train.recompute_blocks, train.memory_gb, train.offload_optimizer, train.compile, train.update_in_backward,
    train.cuda_graphs, train.plain, train.deterministic, train.device, train.restarts, train.fewest_workers,
    train.silent_node_s, train.join_s, train.timeout_s, train.rate_cuts, train.schedule, train.decay_steps, train.decay,
    train.min_lr_ratio, rl.generators, inference.exact, data.path, data.mixture.*.path, data.media.decoders, data.skip,
    callbacks, parallel.*, model.layout.*, eval.*, checkpoint.*, health.*, track.*
    """
    folder, from_store = folder_of(run, runs, alone=True)
    layout = None if mesh is None else parse_layout(mesh, stated_recipe(folder).parallel)
    attempt = resume_run(folder, settings or [], workers=workers, mesh=layout, nodes=nodes, spares=spares)
    if is_set_aside(folder):
        attempt = attempt.model_copy(update={"run": take_back(folder).path})
    launch(attempt.model_copy(update={"apart": from_store}), detach=detach, json=json)
