"""`headway agent`: the agent of one node, which engines start on each machine; `leave` has a node leave a run."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from headway.agent import Attempt, resume_run
from headway.agent.launch.granted_gpus import granted_gpus
from headway.agent.launch.prepare import nodes_before
from headway.agent.live_runs import list_live_runs
from headway.agent.nodes.leader import leader_answers
from headway.agent.nodes.leader_search import SEARCH_S, LeaderSearch, SharedEntries
from headway.agent.nodes.lease import newest_lease
from headway.agent.nodes.lease_record import LeaseRecord
from headway.agent.nodes.node_agent import NodeAgent
from headway.agent.nodes.store_lease import leader_finder
from headway.agent.remote.join import join_run, parse_address
from headway.agent.remote.store_mirror import report_start_failure
from headway.agent.saving.restore_points import need_store
from headway.cli.launch import launch, start_launcher
from headway.cli.options import Json, Runs
from headway.cli.run_lookup import folder_of, own_folder_of, own_root
from headway.cli.text import plural, print_json
from headway.cluster.submit.store_runs import run_of_array_task
from headway.errors import HeadwayError, RunError, UsageError
from headway.hardware import Devices, devices
from headway.hardware.network import main_address
from headway.state.address import is_in_store
from headway.state.handshake import KEY_VARIABLE, HandshakeFailed, connect, key_from_env
from headway.state.peer_read import peer_request
from headway.state.signed_stream import SignedStream
from headway.track import RunFolder, find_run, lock_holder, read_recipe, runs_root, summarize
from headway.track.suspects import read_suspects

FIRST_S = 300.0
"""How long machines that find the leader through a store wait for the first lease."""


LEAVE_POLL_S, LEAVE_ANSWER_S = 0.3, 60.0
"""Between two questions whether a node has left, and how long the leader may take to answer one."""

app = typer.Typer(invoke_without_command=True)


@app.callback()
def agent(
    context: typer.Context,
    run: Annotated[
        str | None,
        typer.Option("--run", metavar="RUN", help="Run to work for, or its address in an object store."),
    ] = None,
    join: Annotated[
        str | None,
        typer.Option(
            "--join",
            metavar="HOST:PORT",
            help="Join the leader at this address, without the run's folder; needs its key in $HEADWAY_KEY.",
        ),
    ] = None,
    nodes: Annotated[int, typer.Option("--nodes", min=1, metavar="N", help="Machines with workers.")] = 1,
    spares: Annotated[
        int, typer.Option("--spares", min=0, metavar="N", help="Spare machines that replace lost ones.")
    ] = 0,
    rank: Annotated[
        int,
        typer.Option(
            "--rank",
            min=0,
            metavar="I",
            envvar="HEADWAY_MACHINE",
            show_envvar=False,
            help="Index of this machine, from 0 (default: $HEADWAY_MACHINE); 0 leads at first.",
        ),
    ] = 0,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers", min=1, metavar="N", help="Total workers (default: one per GPU, or one per machine on CPU)."
        ),
    ] = None,
    elastic: Annotated[
        bool,
        typer.Option("--elastic", help="A worker per GPU that the service has granted, on as many machines."),
    ] = False,
    host: Annotated[
        str | None,
        typer.Option(
            "--host",
            metavar="ADDRESS",
            envvar="HEADWAY_HOST",
            show_envvar=False,
            help="Address of this machine for the others (default: $HEADWAY_HOST, else its main network).",
        ),
    ] = None,
    port: Annotated[
        int,
        typer.Option("--port", min=0, max=65535, metavar="PORT", help="Port of the leader (0 = any free one)."),
    ] = 0,
    no_shared_folder: Annotated[
        bool,
        typer.Option(
            "--no-shared-folder",
            help="Machines share no folder; leases, small files and records go through the object store.",
        ),
    ] = False,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Run the agent of one node, from the run's newest checkpoint to its end. Engines start it; people use train.

    All machines share the run's folder, or join the one that has it. Exits with 0 if the run is done, 1 if it failed,
    75 if it was saved and can be restarted.
    """
    if context.invoked_subcommand is not None:
        return
    if (run is None) == (join is None):
        problem = "missing --run RUN or --join HOST:PORT" if run is None else "--run and --join exclude each other"
        raise UsageError(problem, hint="use --join on machines that do not share the run's folder")
    slots: int | None = None
    if elastic:
        shares = granted_gpus(os.environ)
        nodes, workers = len(shares), sum(shares)
        slots = shares[rank] if rank < nodes else None
    if join is None and rank >= nodes + spares:
        raise UsageError(
            f"--rank {rank} is out of range: {plural(nodes + spares, 'machine')}",
            hint="ranks start at 0; see --nodes and --spares",
        )
    in_store = run is not None and is_in_store(run)
    if run is not None and in_store:
        run = run_of_array_task(run)  # each task of a job array has its own run
    with _errors_in_store(run or "", rank) if in_store else contextlib.nullcontext():
        if run is None or (in_store and rank):
            sys.exit(_join(join or run or "", rank, slots or -(-(workers or nodes) // nodes), runs))
        apart = no_shared_folder
        _work(run, nodes, spares, rank, workers, slots, host, port, no_shared_folder=apart, runs=runs, json=json)


@app.command()
def leave(
    node: Annotated[
        str | None, typer.Argument(metavar="[NODE]", help="Node that leaves (default: the one of this machine).")
    ] = None,
    run: Annotated[
        str | None, typer.Option("--run", metavar="RUN", help="Run to leave (default: the only one on this machine).")
    ] = None,
    join: Annotated[
        str | None,
        typer.Option(
            "--join", metavar="HOST:PORT", help="Address of the leader, without the run's folder; needs $HEADWAY_KEY."
        ),
    ] = None,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Have one node leave a run, which continues without it.

    Workers save and start again on the other nodes; the command returns when the node has left. A spare takes over
    its workers; without one, the run continues with fewer workers, if its recipe allows that.
    """
    if run is not None and join is not None:
        raise UsageError("--run and --join exclude each other", hint="use --join without the run's folder")
    if join is not None:
        name, address, key = f"at {join}", parse_address(join), _need_key("--join")
    else:
        name, address, key = _leader_of(run, runs)
    request: dict[str, Any] = {"node": node} if node is not None else {"machine": socket.gethostname()}
    try:
        with contextlib.closing(connect(address, key)) as leader:
            leader.settimeout(LEAVE_ANSWER_S)
            answer = _ask_to_leave(leader, request)
            if not json:
                print(f"node {answer['node']} is leaving run {name}: {answer['text']}", file=sys.stderr, flush=True)
            state = answer["state"]
            while state != "left":
                time.sleep(LEAVE_POLL_S)
                try:
                    state = _ask_to_leave(leader, {"node": answer["node"], "again": True})["state"]
                except (OSError, ValueError):  # the leader has ended, and the nodes with it
                    break
    except (OSError, HandshakeFailed, ValueError) as error:
        raise RunError(
            f"the leader of run {name} does not answer: {error}", hint="headway ps shows whether it runs"
        ) from None
    facts = {"node": answer["node"], "workers": answer["workers"], "text": answer["text"], "state": state}
    if json:
        print_json(facts | {"run": name})
    elif state == "left":
        print(f"node {answer['node']} left run {name}")
    else:
        print(f"run {name} has ended")


def _leader_of(run: str | None, runs: Path | None) -> tuple[str, tuple[str, int], str]:
    """Return a run's name, the address of its leader, and its key."""
    if run is None:
        live = [live_run.run for live_run in list_live_runs()]
        if len(live) != 1:
            names = ", ".join(folder.name for folder in live) or "none"
            raise UsageError(
                f"{plural(len(live), 'run')} with an agent on this machine: {names}", hint="name one with --run RUN"
            )
        folder = live[0]
    else:
        folder = find_run(runs_root(runs), run)
    if (state := summarize(folder).state) in ("finished", "failed", "stopped"):
        raise RunError(f"run {folder.name} is not running: it has {state}", hint="headway ps lists active runs")
    lease = newest_lease(folder.leases)
    if lease is None or not lease.port:
        hint = "headway stop RUN saves and stops it; --join HOST:PORT on a machine without the run's folder"
        raise UsageError(f"run {folder.name} has no nodes that could leave", hint=hint)
    return folder.name, (lease.host, lease.port), folder.key_file.read_text().strip()


def _ask_to_leave(leader: SignedStream, request: dict[str, Any]) -> dict[str, Any]:
    answer = peer_request(leader, "leave", **request)
    if "error" in answer:
        nodes = ", ".join(answer.get("nodes", ()))
        raise UsageError(str(answer["error"]), hint=f"nodes of the run: {nodes}; headway stop saves and stops the run")
    return answer


@contextlib.contextmanager
def _errors_in_store(address: str, rank: int) -> Iterator[None]:
    """Report errors before the start in the run's store, for users who do not see this machine."""
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
    slots: int | None,
    host: str | None,
    port: int,
    *,
    no_shared_folder: bool,
    runs: Path | None,
    json: bool,
) -> None:
    """Work for a run whose folder is here or in its store; the first machine leads. `slots` are the workers here, if
    they are not as many on each machine."""
    if is_in_store(run):
        folder, no_shared_folder = own_folder_of(run, runs), True
    else:
        folder, from_store = folder_of(run, runs, alone=nodes + spares == 1)
        no_shared_folder = no_shared_folder or from_store
    if summarize(folder).state == "finished":
        print(f"run {folder.name} has already finished", file=sys.stderr)
        return
    if nodes + spares == 1:
        launch(
            resume_run(folder, [], workers=workers).model_copy(
                update={"apart": no_shared_folder, "engine_start": _engine_start()}
            ),
            detach=False,
            json=json,
            keep_name=True,
        )
        return
    if no_shared_folder:
        need_store(read_recipe(folder), folder.name)
        _need_key("a run without a shared folder")
    local = devices(read_recipe(folder).train.device)
    if local.kind == "cpu" and workers is None:
        workers = nodes
    here = slots or (local.count if local.kind == "cuda" else -(-(workers or nodes) // nodes))
    # Without a shared folder the newest lease in the store decides who leads: no takeover from here.
    start_leader = None if no_shared_folder else _lead_instead
    search = LeaderSearch(f"{socket.gethostname()}-{rank}", folder, start_leader=start_leader)
    if rank == 0 and (pid := lock_holder(folder)) is not None and leader_answers(folder):
        # Its command died, or it started elsewhere: the remaining leader needs workers, not a second leader.
        print(
            f"process {pid} already leads run {folder.name}: joining it ({folder.command('logs', '--follow')} shows "
            f"its output, {folder.command('stop')} stops it)",
            file=sys.stderr,
            flush=True,
        )
    elif rank == 0:
        granted = None if slots is None else workers
        everywhere = Devices(local.kind, granted or local.count * nodes, local.name)
        attempt = resume_run(folder, [], workers=workers, on=everywhere)
        if attempt.workers < nodes:
            raise UsageError(
                f"--nodes {nodes} is more than {plural(attempt.workers, 'worker')}",
                hint="use fewer nodes or more workers",
            )
        before = nodes_before(folder)
        changed = [] if before in (None, nodes) else [f"number of nodes changed from {before} to {nodes}"]
        each = -(-attempt.workers // nodes)  # cores were divided as if all workers were on this machine
        update = {
            "nodes": nodes,
            "spares": spares,
            "host": host or main_address(),
            "port": port,
            "apart": no_shared_folder,
            "engine_start": _engine_start(),
            "threads": max(1, len(os.sched_getaffinity(0)) // each),
            "lead": search.name,
            "notes": [*attempt.notes, *changed],
        }
        search.leader = start_launcher(attempt.model_copy(update=update), shown=True)
    node = NodeAgent(search, here, _machine(rank))
    status = node.serve()
    if not node.left:  # the run goes on without this machine
        _tell_engine(status, folder)
    sys.exit(status)


def _lead_instead(shared: SharedEntries, lease: LeaseRecord, listener: int) -> subprocess.Popen[bytes]:
    """Start a leading agent here, to replace a lost leader."""
    inherited = {"lease": {"number": lease.number, "lead": lease.lead, "after": shared.pop("after")["lead"]}}
    attempt = Attempt.model_validate(shared["attempt"]["now"])
    return start_launcher(attempt, shared | inherited, listener, shown=True)


def _join(address: str, rank: int, slots: int, runs: Path | None) -> int:
    """Work for a run whose folder is elsewhere until it ends; return the exit status. `address` is the leader's, or the
    run's in its store, whose newest lease names the leader."""
    in_store = is_in_store(address)
    leader = None if in_store else parse_address(address)
    key = _need_key("a run without a shared folder" if in_store else "--join")
    name = f"{socket.gethostname()}-{rank}"
    find_leader = None
    if in_store:
        find_leader = leader_finder(address)
    remote = join_run(leader, key, own_root(runs).resolve(), name, FIRST_S if in_store else SEARCH_S, find_leader)
    local = devices(read_recipe(remote.run).train.device)
    slots = local.count if local.kind == "cuda" else slots
    node = NodeAgent(LeaderSearch(name, remote.run, remote), slots, _machine(rank))
    status = node.serve()
    if not node.left:  # the run goes on without this machine
        _tell_engine(status, remote.run)
    remote.leave()
    return status


def _need_key(what: str) -> str:
    """Return the run's key, which machines without a shared folder prove to each other."""
    key = key_from_env()
    if key is None:
        raise UsageError(
            f"{what} needs a key in {KEY_VARIABLE}",
            hint="use the same on all machines, or the contents of the file `key` in the run's folder",
        )
    return key


def _engine_start() -> int:
    """Return which start of its engine's job this is, from 1."""
    number = os.environ.get("HEADWAY_START", "")
    return int(number) if number.isdecimal() else 1


def _machine(rank: int) -> str:
    """Return the engine's name of this machine, else its host name."""
    names = os.environ.get("HEADWAY_MACHINES", "").split(",")
    return names[rank] if rank < len(names) and names[rank] else socket.gethostname()


def _tell_engine(status: int, run: RunFolder) -> None:
    """Write the run's exit status for the engine, which must not mistake a lost machine's for it, and the suspect
    machines that the next start should avoid."""
    file = os.environ.get("HEADWAY_END")
    if file:
        with contextlib.suppress(OSError):
            lines = [str(status), *read_suspects(run.path, time.time())]
            Path(f"{file}.partial").write_text("".join(f"{line}\n" for line in lines))
            Path(f"{file}.partial").replace(file)
