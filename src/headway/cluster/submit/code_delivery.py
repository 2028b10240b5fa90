"""How code reaches machines: at a shared path, unpacked from an archive, or in a container. Set in engines.toml:

code = "staged"                  # or "shared", the default
stage_to = "$TMPDIR"             # where each machine unpacks staged code
container = "image.sif"          # or docker://...
runtime = "apptainer"            # or pyxis, on Slurm
mounts = ["/data"]               # for a container, beside the runs and the data
snapshot = true                  # copy the package of the model class into each run
"""

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headway.cluster.engines.settings import EngineSettings, engine_settings
from headway.errors import UsageError

CARRIED = ("PYTHONPATH", "VIRTUAL_ENV")
"""Variables of the submitter that locate code: a run trains with the submitter's code."""
STAGE_TO = "${TMPDIR:-/tmp}"
_STAGE_TO = re.compile(r"[A-Za-z0-9_./${}:-]+")
"""A path with variables, and nothing else that a shell would interpret."""
_MOUNT = re.compile(r"/[^,:\0\n]*(:/[^,:\0\n]*)?(:(ro|rw))?")


@dataclass(frozen=True)
class CodeDelivery:
    """How the python of a job is started."""

    command: tuple[str, ...]
    """Arguments before python's own."""
    environment: dict[str, str]
    site: dict[str, str] = field(default_factory=dict)
    """Settings for Slurm only."""


def code_for(
    settings: EngineSettings,
    engine: str,
    runs: Path,
    *,
    gpus: int,
    data: Sequence[str],
    snapshot: Path | None,
    pack: bool,
) -> CodeDelivery:
    """The delivery that engines.toml asks for. `snapshot` is a folder to import from first; without `pack` nothing is
    written."""
    check_code_settings(settings, engine)
    first = [] if snapshot is None else [str(snapshot)]
    if settings.container is not None:
        return _contained(settings, runs, gpus, data, first)
    if settings.code == "staged":
        from headway.cluster.submit import staging

        packed = staging.venv_archive(runs)
        if pack:
            staging.write_archive(packed, settings.stage_to or STAGE_TO)
        return CodeDelivery(("bash", str(packed.start)), {"HEADWAY_CODE": first[0]} if first else {})
    carried = {name: os.environ[name] for name in CARRIED if name in os.environ}
    if first:
        carried["PYTHONPATH"] = os.pathsep.join([*first, *filter(None, [carried.get("PYTHONPATH")])])
    return CodeDelivery((sys.executable,), carried)


def pack_code(engine: str, runs: Path) -> None:
    """Pack code beside the runs if it is staged."""
    settings = engine_settings(engine)
    if settings.code == "staged" and settings.container is None:
        code_for(settings, engine, runs, gpus=0, data=(), snapshot=None, pack=True)


def check_code_settings(settings: EngineSettings, engine: str) -> None:
    """Raise UsageError for settings that contradict each other."""
    for key, value, allowed in (
        ("code", settings.code, ("shared", "staged")),
        ("runtime", settings.runtime, ("apptainer", "pyxis")),
    ):
        if value is not None and value not in allowed:
            raise UsageError(f"engines.toml: {engine}.{key} is {value!r}", hint=f"expected {' or '.join(allowed)}")
    if settings.container is None:
        alone = "runtime" if settings.runtime else "mounts" if settings.mounts else None
        if alone:
            raise UsageError(
                f"engines.toml: {engine}.{alone} is set without a container", hint='add container = "image.sif"'
            )
    elif settings.code == "staged":
        raise UsageError(f"engines.toml: {engine} has both staged code and a container", hint="remove one of them")
    if settings.container is not None and engine == "kubernetes":
        raise UsageError("Kubernetes takes its image from `image`", hint="remove `container` from [kubernetes]")
    if settings.runtime == "pyxis" and engine != "slurm":
        raise UsageError(f"pyxis is a plugin of Slurm, but the engine is {engine}", hint='set runtime = "apptainer"')
    if settings.stage_to is not None and not _STAGE_TO.fullmatch(settings.stage_to):
        raise UsageError(
            f"engines.toml: {engine}.stage_to is {settings.stage_to!r}", hint="expected a path; $VARIABLES are allowed"
        )
    for mount in settings.mounts:
        if not _MOUNT.fullmatch(mount):
            raise UsageError(
                f"engines.toml: {engine}.mounts has {mount!r}", hint="/PATH or /PATH:/TARGET, perhaps with :ro"
            )


def _contained(settings: EngineSettings, runs: Path, gpus: int, data: Sequence[str], first: list[str]) -> CodeDelivery:
    image = _image(str(settings.container))
    needed = dict.fromkeys([str(runs.absolute()), *(path for path in data if Path(path).is_absolute())])
    mounts = [mount if ":/" in mount else f"{mount}:{mount}" for mount in (*needed, *settings.mounts)]
    variables = {"PYTHONPATH": first[0]} if first else {}
    if settings.runtime == "pyxis":
        return CodeDelivery(("python",), variables, {"container_image": image, "container_mounts": ",".join(mounts)})
    binds = [argument for mount in mounts for argument in ("--bind", mount)]
    return CodeDelivery(("apptainer", "exec", *(["--nv"] if gpus else []), *binds, image, "python"), variables)


def _image(name: str) -> str:
    """A file as an absolute path; an address unchanged."""
    if re.fullmatch(r"[a-z][a-z0-9+-]*://[^\s\0]+", name):
        return name
    path = Path(name).expanduser().absolute()
    if not path.exists():
        raise UsageError(f"container image {path} not found", hint="name a file or an address: docker://...")
    return str(path)
