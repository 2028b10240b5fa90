"""`headway node`: makes this machine a node of a service, and keeps jobs off nodes."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from headway.cli.options import Json, Runs, TokenFile
from headway.cli.text import print_json
from headway.cli.tokens import check_new
from headway.cluster.engines.scripts import replace_file
from headway.cluster.service.connection import connect, node_path, read_fingerprint
from headway.errors import UsageError
from headway.http_server import read_key
from headway.track import command, runs_root

app = typer.Typer(help="Join a service as a node, and manage its nodes.", no_args_is_help=True, rich_markup_mode=None)
NodeName = Annotated[str, typer.Argument(metavar="NODE", help="Name of a node.")]
Folder = Annotated[
    Path | None,
    typer.Option(
        "--folder",
        metavar="DIR",
        help="State of the node (default: /var/lib/headway/node, or ~/.local/state/headway/node unless root).",
    ),
]

JobsAsRoot = Annotated[
    bool, typer.Option("--jobs-as-root", help="As root, without --tenant-user: jobs may do what root may.")
]


@app.callback()
def _node() -> None:
    """Join a service as a node, and manage its nodes."""


@app.command()
def token(
    replace: Annotated[
        str | None, typer.Option("--replace", metavar="NODE", help="Let a new machine take a node's place.")
    ] = None,
    out: TokenFile = None,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Make a token with which one node may join, within ten minutes."""
    check_new(out)
    answer = connect(runs_root(runs)).post("/api/v1/join-tokens", {"replace": replace})
    if out is not None:
        replace_file(out, answer.pop("token") + "\n", private=True)
        answer["file"] = str(out)
    if json:
        print_json(answer)
        return
    print(answer["token"] if out is None else f"written to {out}")


@app.command()
def join(
    url: Annotated[str, typer.Argument(metavar="URL", help="Where the service listens: https://...")],
    token_file: Annotated[
        Path, typer.Option("--token-file", metavar="FILE", help="File with a token of headway node token.")
    ],
    fingerprint: Annotated[
        str | None,
        typer.Option(
            "--fingerprint", metavar="SHA256", help="Of the service (default: a certificate this machine trusts)."
        ),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the node (default: the host's).")] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", min=0, metavar="N", help="GPUs that jobs may use (default: all).")
    ] = None,
    cpus: Annotated[
        int | None, typer.Option("--cpus", min=1, metavar="N", help="CPUs that jobs may use (default: all).")
    ] = None,
    tenant: Annotated[
        str | None, typer.Option("--tenant", help="Whose jobs it runs, as your user (default: the only one).")
    ] = None,
    tenant_user: Annotated[
        list[str] | None,
        typer.Option("--tenant-user", metavar="TENANT=USER", help="As root: a tenant, and who its jobs run as."),
    ] = None,
    jobs_as_root: JobsAsRoot = False,
    no_run: Annotated[bool, typer.Option("--no-run", help="Only join; headway node run starts the agent.")] = False,
    folder: Folder = None,
) -> None:
    """Make this machine a node of a service, and run its agent."""
    place = _place(folder)
    from headway.cluster.service.local_cluster import this_machine
    from headway.cluster.service.node_agent import NodeSettings, join_cluster, run_node

    spec = this_machine(gpus, cpus)
    pin = None if fingerprint is None else read_fingerprint(fingerprint)
    users = _users(tenant_user or [], tenant)
    spec["name"], tenants = name or spec["name"], list(users) or ([tenant] if tenant else None)
    spec |= {} if tenants is None else {"tenants": tenants}
    settings = NodeSettings(url.rstrip("/"), spec["name"], pin, spec, users, jobs_as_root)
    join_cluster(place, settings, read_key(token_file, 16))
    print(f"joined {settings.url} as node {settings.name}")
    if not no_run:
        raise typer.Exit(run_node(place))


@app.command()
def run(jobs_as_root: JobsAsRoot = False, folder: Folder = None) -> None:
    """Run the agent of a node that has joined; jobs go on when it ends."""
    place = _place(folder)
    from headway.cluster.service.node_agent import run_node

    raise typer.Exit(run_node(place, jobs_as_root=jobs_as_root))


@app.command()
def trust(
    fingerprint: Annotated[str, typer.Argument(metavar="SHA256", help="Of the service, as headway up prints it.")],
    folder: Folder = None,
    json: Json = False,
) -> None:
    """Have this node expect another certificate of its service."""
    place, pin = _place(folder), read_fingerprint(fingerprint)
    from headway.cluster.service.node_agent import trust_service

    before = trust_service(place, pin)
    if json:
        print_json({"node": before.name, "fingerprint": pin, "before": before.fingerprint})
        return
    print(f"node {before.name} of {before.url} expects another fingerprint of it:")
    print(pin)
    print("next: restart headway node run")


@app.command()
def cordon(node: NodeName, runs: Runs = None, json: Json = False) -> None:
    """Give a node no new jobs; those that it has go on."""
    _change(node, "cordon", runs, json)


@app.command()
def uncordon(node: NodeName, runs: Runs = None, json: Json = False) -> None:
    """Give a node jobs again."""
    _change(node, "uncordon", runs, json)


@app.command("remove", hidden=True)
@app.command()
def rm(node: NodeName, runs: Runs = None, json: Json = False) -> None:
    """Forget a node without jobs; its certificate is worth nothing then."""
    answer = connect(runs_root(runs)).delete(node_path(node))
    print_json(answer) if json else print(f"node {node} is removed")


def _change(node: str, verb: str, runs: Path | None, json: bool) -> None:
    root = runs_root(runs)
    answer = connect(root).post(node_path(node, verb))
    if not answer["changed"]:
        raise UsageError(f"node {node} is cordoned already" if verb == "cordon" else f"node {node} is not cordoned")
    if json:
        print_json(answer)
        return
    print(f"node {node} is cordoned" if verb == "cordon" else f"node {node} is uncordoned")
    print(f"next: {command(root, 'nodes')} --engine service")


def _users(pairs: list[str], tenant: str | None) -> dict[str, str]:
    """Return the Unix user of each tenant."""
    users = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    if len(users) != len(pairs) or not all((*users, *users.values())):
        raise UsageError(f"--tenant-user {' '.join(pairs)}: not TENANT=USER, each tenant once")
    if users and tenant:
        raise UsageError("--tenant runs jobs as your user, --tenant-user as theirs", hint="give one of them")
    return users


def _place(folder: Path | None) -> Path:
    """Return the folder of this machine's node; UsageError if nodes cannot run here."""
    missing = [name for name in ("cryptography", "fastapi", "sqlalchemy") if find_spec(name) is None]
    if missing:
        raise UsageError(f"headway node needs {missing[0]}", hint="pip install 'headway[control]'")
    from headway.cluster.service.node_folder import default_node_folder

    return (folder or default_node_folder()).absolute()
