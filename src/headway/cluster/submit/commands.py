"""Commands of any kind as jobs of the service: submitted from a folder, run there."""

import getpass
import re
import secrets
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.cluster.engines.engine import LaunchRequest
from headway.cluster.engines.settings import engine_settings, open_engine
from headway.cluster.service.connection import connect, job_path
from headway.cluster.submit.upload import pack_folder
from headway.errors import UsageError
from headway.track.run_folder import create_private_folder

FOLDER = ".commands"
"""Beside the runs: a folder per command, for its logs."""
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True)
class SubmittedCommand:
    """What became of a command."""

    request: LaunchRequest
    job: str
    """Id of the job; the script that would run, of a dry run."""
    repeated: bool = False
    """Whether its key was used before: the job is the one that was submitted then."""


@dataclass(frozen=True)
class CommandResources:
    """What a command gets on each of its machines."""

    machines: int = 1
    gpus: int = 0
    cpus: int | None = None
    memory_gib: float | None = None
    secrets: tuple[str, ...] = ()
    """Names, beside those that every job of the site gets."""


def submit_command(
    command: Sequence[str],
    root: Path,
    resources: CommandResources,
    name: str | None = None,
    site: Mapping[str, str] | None = None,
    *,
    upload: bool = False,
    dry: bool = False,
) -> SubmittedCommand:
    """Submit a command to the service; only try it if `dry`. With `upload` it runs in a copy of this folder, else in
    the folder itself."""
    if not command:
        raise UsageError("no command after --", hint="headway submit -- python train.py")
    name = name or _NOT_IN_NAMES.sub("-", Path(command[0]).name).strip("-.") or "command"
    settings, engine = engine_settings("service"), open_engine("service", root)
    memory = resources.memory_gib or settings.memory_gib
    folder = root.absolute() / FOLDER / f"{name}-{secrets.token_hex(4)}"
    digest, archive = pack_folder(Path.cwd()) if upload else ("", b"")
    place = '"$HEADWAY_UPLOAD"' if upload else shlex.quote(str(Path.cwd()))
    request = LaunchRequest(
        name=name,
        command=tuple(command),
        folder=folder,
        machines=resources.machines,
        gpus=resources.gpus,
        cpus=resources.cpus or settings.cpus or 1,
        memory_bytes=None if memory is None else int(memory * 2**30),
        limit_s=settings.limit_s,
        grace_s=LaunchRequest.grace_s if settings.grace_s is None else settings.grace_s,
        environment=settings.environment,
        secrets=tuple(dict.fromkeys((*settings.secrets, *resources.secrets))),
        setup=(f"cd -- {place} 2>/dev/null || {_complaint(place)}", *settings.setup),
        site=with_user(dict(site or {}) | ({"code": digest} if upload else {})),
    )
    if dry:
        return SubmittedCommand(request, engine.describe(request))
    engine.probe()
    if upload:
        connect(root).put_bytes(f"/api/v1/code/{digest}", archive)
    create_private_folder(folder.parent)
    folder.mkdir(mode=0o700)
    try:
        job = engine.launch(request)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    repeated = "key" in request.site and connect(root).get(job_path(job))[0]["folder"] != str(folder)
    if repeated:
        folder.rmdir()
    return SubmittedCommand(request, job, repeated)


def _complaint(place: str) -> str:
    """Shell that ends a command whose folder, a word of the shell, is not on its machine."""
    why = 'echo "headway: cannot enter" {} "on $(hostname): submit with --upload, or from a folder that is there" >&2'
    return f"{{ {why.format(place)}; exit 1; }}"


def with_user(site: Mapping[str, str]) -> dict[str, str]:
    """Settings of the service with the name of this process's user."""
    try:
        return {"user": getpass.getuser(), **site}
    except (OSError, KeyError):
        return dict(site)
