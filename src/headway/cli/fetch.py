"""`headway fetch`: a run that other machines train, as its object store knows it."""

from typing import Annotated

import typer

from headway.cli.options import Json, Runs

__all__ = ["fetch"]


def fetch(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run here, or its address: s3://bucket/prefix/RUN.")],
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Bring a run's folder up to date from its object store: small files and records, no checkpoints.

    For runs whose machines see no common folder; what they recorded is there a minute later.
    """
    from headway.agent.mirror import bring
    from headway.agent.states import need_store
    from headway.cli.text import print_json
    from headway.state.address import is_in_store
    from headway.track import find_run, read_recipe, runs_root, summarize

    root = runs_root(runs)
    if not is_in_store(run):
        there = find_run(root, run)
        run = need_store(read_recipe(there), there.name)
    found = summarize(bring(run, root))
    if json:
        print_json({"run": found.name, "step": found.step, "attempts": found.attempts, "loss": found.loss})
        return
    print(f"{found.name}: step {found.step}, {found.attempts} attempt{'s' * (found.attempts != 1)}")
    print(f"next: headway report {found.name}, headway logs {found.name}, headway resume {found.name}")
