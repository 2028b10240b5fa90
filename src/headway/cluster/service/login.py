"""Where a user has logged in: one service, in a private file below the user's configuration."""

import ipaddress
import json
import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from headway.cluster.engines.scripts import replace_file
from headway.errors import EngineError, UsageError

FORMAT = 1


@dataclass(frozen=True)
class Login:
    """A service, and who one is there."""

    url: str
    token: str
    fingerprint: str | None = None
    """SHA-256 of its certificate; None: one that this machine trusts."""


def login_file() -> Path:
    """The path of the file: $HEADWAY_LOGIN, else beside a user's other settings."""
    stated = os.environ.get("HEADWAY_LOGIN")
    base = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return Path(stated) if stated else base / "headway" / "login.json"


def read_login(file: Path) -> Login | None:
    """The login in a file; None if there is none."""
    try:
        fields = json.loads(file.read_text())
        if fields["format"] != FORMAT:
            raise ValueError(f"format {fields['format']}, this version reads {FORMAT}")
        return Login(fields["url"], fields["token"], fields.get("fingerprint"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineError(f"cannot read {file}: {error}", hint="headway login URL --token-file FILE") from None


def write_login(file: Path, login: Login) -> None:
    """Keep a login, for its user only."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fields = {"format": FORMAT, "url": login.url, "fingerprint": login.fingerprint, "token": login.token}
    replace_file(file, json.dumps(fields, indent=1) + "\n", private=True)


def check_url(url: str) -> str:
    """The URL of a service; UsageError if it is none, or would send the token unencrypted."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
    if host is None or parts.scheme not in ("http", "https") or parts.path not in ("", "/") or parts.query:
        raise UsageError(f"{url!r} is not the URL of a service", hint="https://HOST:PORT, as headway up prints it")
    if parts.username is not None:
        raise UsageError("a URL with a user in it", hint="--token-file says who you are")
    if parts.scheme == "http" and not is_loopback(host):
        raise UsageError(f"http would send the token to {host} unencrypted", hint=f"https://{parts.netloc}")
    return url.rstrip("/")


def is_loopback(host: str) -> bool:
    """Whether a host is this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
