"""`headway agent`: what an engine starts on each machine of a run."""

import contextlib
import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headway.cli.options import Json, Runs

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

    from headway.agent.nodes.lease_record import LeaseRecord
    from headway.agent.nodes.node_agent import Things
    from headway.track import RunFolder

__all__ = ["agent"]

FIRST_S = 300.0
"""How long machines that a store tells who leads wait for the first one to do so."""


def agent(
    run: Annotated[
        str | None,
        typer.Option("--run", metavar="RUN", help="The run to work for; or its address in its object store."),
    ] = None,
    join: Annotated[
        str | None,
        typer.Option(
            "--join",
            metavar="HOST:PORT",
            help="Work for the run that the agent there leads, without its folder; $HEADWAY_KEY has its key.",
        ),
    ] = None,
    nodes: Annotated[int, typer.Option("--nodes", min=1, metavar="N", help="Machines that have workers.")] = 1,
    spares: Annotated[
        int, typer.Option("--spares", min=0, metavar="N", help="Machines that wait to take the place of a lost one.")
    ] = 0,
    rank: Annotated[
        int,
        typer.Option(
            "--rank",
            min=0,
            metavar="I",
            envvar="HEADWAY_MACHINE",
            show_envvar=False,
            help="Which of them this is, from 0 (default $HEADWAY_MACHINE); the first one leads, to begin with.",
        ),
    ] = 0,
    workers: Annotated[
        int | None,
        typer.Option("--workers", min=1, metavar="N", help="In all; default one a GPU, or one a machine without."),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            "--host",
            metavar="ADDRESS",
            envvar="HEADWAY_HOST",
            show_envvar=False,
            help="This machine's, for the others (default $HEADWAY_HOST, else that of its main network).",
        ),
    ] = None,
    port: Annotated[
        int,
        typer.Option(
            "--port", min=0, max=65535, metavar="PORT", help="Where the others call the first one; 0: a free one."
        ),
    ] = 0,
    apart: Annotated[
        bool,
        typer.Option(
            "--no-shared-folder",
            help="The machines see no common folder: the run's object store has leases, small files and records too.",
        ),
    ] = False,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Work for a run on this machine, from its newest checkpoint to its end. Engines start it; people use train.

    All machines see the run's folder, or join the one that does. Exits with 0 when the run is done, 1 when it failed,
    75 when it has saved and is worth starting again.
    """
    from headway.cluster.submit.store_runs import run_of_array_task
    from headway.errors import UsageError
    from headway.state.address import is_in_store

    if (run is None) == (join is None):
        what = "an agent needs" if run is None else "an agent has one of"
        raise UsageError(f"{what} --run RUN or --join HOST:PORT", hint="--join where the run's folder is not seen")
    if join is None and rank >= nodes + spares:
        raise UsageError(
            f"--rank {rank}, and there are {nodes + spares} machines", hint="ranks begin with 0; --nodes, --spares"
        )
    in_store = run is not None and is_in_store(run)
    if run is not None and in_store:
        run = run_of_array_task(run)  # of an array each copy has a run of its own
    with _heard_in_store(run or "", rank) if in_store else contextlib.nullcontext():
        if run is None or (in_store and rank):
            slots = -(-(workers or nodes) // nodes)
            sys.exit(_join(join or run or "", rank, slots, runs))
        _work(run, nodes, spares, rank, workers, host, port, apart=apart, runs=runs, json=json)


@contextlib.contextmanager
def _heard_in_store(address: str, rank: int) -> "Iterator[None]":
    """Have what goes wrong before a run begins told where somebody looks, who does not see this machine."""
    from headway.agent.remote.store_mirror import report_start_failure
    from headway.errors import HeadwayError

    try:
        yield
    except HeadwayError as error:
        with contextlib.suppress(HeadwayError):
            report_start_failure(
                address, rank, f"{_machine(rank)}: {error.message}" + (f" ({error.hint})" if error.hint else "")
            )
        raise


def _work(
    run: str,
    nodes: int,
    spares: int,
    rank: int,
    workers: int | None,
    host: str | None,
    port: int,
    *,
    apart: bool,
    runs: Path | None,
    json: bool,
) -> None:
    """Work for a run whose folder is here, or comes here from its store; the first machine leads."""
    from headway.agent import resume_run
    from headway.agent.launch.prepare import nodes_before
    from headway.agent.nodes.leader import leader_answers
    from headway.agent.nodes.node_agent import NodeAgent
    from headway.agent.saving.restore_points import need_store
    from headway.cli.launch import launch, start_launcher
    from headway.cli.run_lookup import folder_of, own_folder_of
    from headway.errors import UsageError
    from headway.hardware import Devices, devices
    from headway.hardware.network import main_address
    from headway.state.address import is_in_store
    from headway.track import lock_holder, read_recipe, summarize

    if is_in_store(run):
        folder, apart = own_folder_of(run, runs), True
    else:
        folder, from_store = folder_of(run, runs, alone=nodes + spares == 1)
        apart = apart or from_store
    if summarize(folder).state == "finished":
        print(f"run {folder.name} has finished already", file=sys.stderr)
        return
    if nodes + spares == 1:
        launch(resume_run(folder, [], workers=workers).model_copy(update={"apart": apart}), detach=False, json=json)
        return
    if apart:
        need_store(read_recipe(folder), folder.name)
        _need_key("machines that see no common folder")
    found = devices(read_recipe(folder).train.device)
    if found.kind == "cpu" and workers is None:
        workers = nodes
    slots = found.count if found.kind == "cuda" else -(-(workers or nodes) // nodes)
    # Without a common folder whoever began last leads, by the store: nobody here takes that back.
    start_lead = None if apart else _lead_instead
    node = NodeAgent(f"{socket.gethostname()}-{rank}", folder, slots, _machine(rank), start_lead=start_lead)
    if rank == 0 and (pid := lock_holder(folder)) is not None and leader_answers(folder):
        # Its machine's command is gone, or it began elsewhere: what is left of it needs workers more than another end.
        print(
            f"process {pid} leads run {folder.name} already: joining it (headway logs {folder.name} --follow shows "
            f"what it says, headway stop {folder.name} ends it)",
            file=sys.stderr,
            flush=True,
        )
    elif rank == 0:
        everywhere = Devices(found.kind, found.count * nodes, found.name)
        attempt = resume_run(folder, [], workers=workers, on=everywhere)
        if attempt.workers < nodes:
            raise UsageError(f"--nodes {nodes}, and {attempt.workers} workers", hint="fewer machines, or more workers")
        before = nodes_before(folder)
        changed = [] if before in (None, nodes) else [f"on {nodes} nodes now, and on {before} before"]
        here = -(-attempt.workers // nodes)  # cores were shared out as if all workers were on this machine
        update = {
            "nodes": nodes,
            "spares": spares,
            "host": host or main_address(),
            "port": port,
            "apart": apart,
            "threads": max(1, len(os.sched_getaffinity(0)) // here),
            "lead": node.name,
            "notes": [*attempt.notes, *changed],
        }
        node.leading = start_launcher(attempt.model_copy(update=update), shown=True)
    status = node.serve()
    _tell_engine(status, node.run)
    sys.exit(status)


def _lead_instead(things: "Things", lease: "LeaseRecord", door: int) -> "subprocess.Popen[bytes]":
    """Start an agent that leads, in the place of one on another machine that is lost."""
    from headway.agent import Attempt
    from headway.cli.launch import start_launcher

    left = {"lease": {"number": lease.number, "lead": lease.lead, "after": things.pop("after")["lead"]}}
    attempt = Attempt.model_validate(things["attempt"]["now"])
    return start_launcher(attempt, things | left, door, shown=True)


def _join(address: str, rank: int, slots: int, runs: Path | None) -> int:
    """Work for a run whose folder is elsewhere, until it is over; the status to exit with. `address` is that of the
    agent that leads, or the run's in its store, where the newest lease tells who does."""
    from headway.agent.nodes.node_agent import CALL_S, NodeAgent
    from headway.agent.remote.join import join_run, parse_address
    from headway.cli.run_lookup import own_root
    from headway.hardware import devices
    from headway.state.address import is_in_store
    from headway.track import read_recipe

    in_store = is_in_store(address)
    where = None if in_store else parse_address(address)
    key = _need_key("machines that see no common folder" if in_store else "--join")
    name = f"{socket.gethostname()}-{rank}"
    find = None
    if in_store:
        from headway.agent.nodes.store_lease import leader_finder  # only runs that name a store need its library

        find = leader_finder(address)
    there = join_run(where, key, own_root(runs).resolve(), name, FIRST_S if in_store else CALL_S, find)
    found = devices(read_recipe(there.run).train.device)
    node = NodeAgent(name, there.run, found.count if found.kind == "cuda" else slots, _machine(rank), visit=there)
    status = node.serve()
    _tell_engine(status, there.run)
    there.leave()
    return status


def _need_key(what: str) -> str:
    """The run's key, of which machines know each other that share no folder to read it from."""
    from headway.errors import UsageError
    from headway.state.handshake import KEY_VARIABLE, key_from_env

    key = key_from_env()
    if key is None:
        raise UsageError(
            f"{what}, and {KEY_VARIABLE} has no key",
            hint="the same on all machines, or what the file `key` of the run's folder says; never an argument",
        )
    return key


def _machine(rank: int) -> str:
    """What the engine calls this machine, if it says so."""
    names = os.environ.get("HEADWAY_MACHINES", "").split(",")
    return names[rank] if rank < len(names) and names[rank] else socket.gethostname()


def _tell_engine(status: int, run: "RunFolder") -> None:
    """How the run ended, for the engine that started this: it must not take the end of a lost machine for the run's.
    And the machines that the run suspects, which its next start should do without."""
    from headway.track.suspects import read_suspects

    file = os.environ.get("HEADWAY_END")
    if file:
        with contextlib.suppress(OSError):
            lines = [str(status), *read_suspects(run.path, time.time())]
            Path(f"{file}.partial").write_text("".join(f"{line}\n" for line in lines))
            Path(f"{file}.partial").replace(file)
