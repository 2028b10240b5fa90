"""`headway ui`: shows recorded runs in a browser."""

import ipaddress
import sys
import webbrowser
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from headway.cli.options import Json, Runs
from headway.cli.text import print_json
from headway.errors import UsageError
from headway.track import runs_root

if TYPE_CHECKING:
    from headway.cluster.service.connection import ServiceConnection

NEEDED = ("fastapi", "uvicorn")

LEAST_KEY = 16
"""Characters of a key."""


def ui(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port (0 = any free one).")] = 8321,
    host: Annotated[str, typer.Option(help="Address to listen on; beyond loopback only with a key.")] = "127.0.0.1",
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with the token (default: a new one at every start).")
    ] = None,
    data: Annotated[Path, typer.Option(metavar="DIR", help="Folder of datasets.")] = Path("data"),
    service: Annotated[
        str | None, typer.Option(metavar="URL", help="Cluster service to show (default: that of --runs).")
    ] = None,
    token_file: Annotated[Path | None, typer.Option(help="File with the token of --service.")] = None,
    fingerprint: Annotated[str | None, typer.Option(help="SHA-256 of the certificate of --service.")] = None,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Show runs, metrics, ledgers, samples, datasets and the cluster in a browser.

    Read only. Everybody on this machine can reach the port, so the page asks for the token in the printed address.
    The cluster's service is asked from here: the browser never has its token.
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise UsageError(f"headway ui needs {missing[0]}", hint="pip install 'headway[serve]'")
    if api_key_file is None and not _is_loopback(host):
        raise UsageError(
            f"{host} can be reached from other machines", hint="give --api-key-file, or leave --host at 127.0.0.1"
        )
    from headway.dashboard.app import make_app
    from headway.dashboard.server import new_token, serve
    from headway.http_server import listen, read_key

    root = runs_root(runs)
    token = new_token() if api_key_file is None else read_key(api_key_file, LEAST_KEY)
    app = make_app(root, token, data=data, host=host, service=_service(service, token_file, fingerprint))
    listener = listen(host, port)
    base = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}/"
    address = f"{base}?token={token}" if api_key_file is None else base

    def listening() -> None:
        if json:
            print_json({"listening": base, "address": address, "runs": str(root)})
        else:
            print(f"runs in {root}: {address}")
            print("Ctrl-C ends it; the runs go on" if api_key_file is None else "the page asks for the key in the file")
        sys.stdout.flush()
        if open_browser:
            webbrowser.open(address)

    serve(app, listener, listening)


def _service(
    url: str | None, token_file: Path | None, fingerprint: str | None
) -> Callable[[], "ServiceConnection"] | None:
    """Return what connects to the named service; None without one."""
    from headway.cluster.service.connection import ServiceConnection, read_fingerprint
    from headway.http_server import read_key

    if url is None:
        if token_file is not None or fingerprint is not None:
            raise UsageError(
                "--token-file and --fingerprint are for another service", hint="name it with --service URL"
            )
        return None
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
        raise UsageError(f"--service {url}: not the address of a service", hint="for example https://HOST:8324")
    if parts.scheme == "http" and not _is_loopback(parts.hostname):
        raise UsageError(
            f"--service {url} would send the token without encryption",
            hint="use https, or ssh -L and a loopback address",
        )
    if token_file is None:
        raise UsageError("--service needs the token of a user", hint="--token-file FILE")
    token, expected = read_key(token_file, LEAST_KEY), None if fingerprint is None else read_fingerprint(fingerprint)
    return lambda: ServiceConnection(url.rstrip("/"), token, fingerprint=expected)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
