"""How code gets to machines: at a shared path, unpacked from an archive, or in a container. Said in engines.toml:

code = "staged"                  # or "shared", the default
stage_to = "$TMPDIR"             # where "staged" is unpacked on each machine
container = "image.sif"          # or docker://...
runtime = "apptainer"            # or pyxis, on Slurm
mounts = ["/data"]               # that a container sees beside the runs and the recipe's data
snapshot = true                  # a copy of the model class's package in each run
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headway.errors import UsageError

if TYPE_CHECKING:
    from headway.cluster.engines.settings import EngineSettings

__all__ = ["CARRIED", "CodeDelivery", "code_for", "pack_code"]

CARRIED = ("PYTHONPATH", "VIRTUAL_ENV")
"""Variables of whoever submits that say where code is: a run trains with the code that was there."""
STAGE_TO = "${TMPDIR:-/tmp}"
_STAGE_TO = re.compile(r"[A-Za-z0-9_./${}:-]+")
"""A path with variables, and nothing else that a shell would act on."""
_MOUNT = re.compile(r"/[^,:\0\n]*(:/[^,:\0\n]*)?(:(ro|rw))?")


class CodeDelivery:
    """How the python of a job is started: words before its own, variables, and what only Slurm is told."""

    def __init__(
        self, words: Sequence[str], environment: Mapping[str, str], site: Mapping[str, str] | None = None
    ) -> None:
        self.words, self.environment, self.site = tuple(words), dict(environment), dict(site or {})


def code_for(
    settings: "EngineSettings",
    engine: str,
    runs: Path,
    *,
    gpus: int,
    data: Sequence[str],
    snapshot: Path | None,
    pack: bool,
) -> CodeDelivery:
    """Whatever engines.toml says. `snapshot` is a folder to import from first; without `pack` nothing is written."""
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
    """Have code that is staged lie packed beside the runs."""
    from headway.cluster.engines.settings import engine_settings

    settings = engine_settings(engine)
    if settings.code == "staged" and settings.container is None:
        code_for(settings, engine, runs, gpus=0, data=(), snapshot=None, pack=True)


def check_code_settings(settings: "EngineSettings", engine: str) -> None:
    """Refuse what does not go together."""
    for key, value, allowed in (
        ("code", settings.code, ("shared", "staged")),
        ("runtime", settings.runtime, ("apptainer", "pyxis")),
    ):
        if value is not None and value not in allowed:
            raise UsageError(f"engines.toml: {engine}.{key} is {value!r}", hint=f"it may be {' or '.join(allowed)}")
    if settings.container is None:
        alone = "runtime" if settings.runtime else "mounts" if settings.mounts else None
        if alone:
            raise UsageError(
                f"engines.toml: {engine}.{alone} is there, and no container", hint='container = "image.sif"'
            )
    elif settings.code == "staged":
        raise UsageError("engines.toml: staged code and a container", hint="the code is in the one or in the other")
    if settings.container is not None and engine == "kubernetes":
        raise UsageError("Kubernetes has its image from `image`", hint="leave `container` out of [kubernetes]")
    if settings.runtime == "pyxis" and engine != "slurm":
        raise UsageError(f"pyxis is a part of Slurm, and the engine is {engine}", hint='runtime = "apptainer"')
    if settings.stage_to is not None and not _STAGE_TO.fullmatch(settings.stage_to):
        raise UsageError(
            f"engines.toml: {engine}.stage_to is {settings.stage_to!r}", hint="a path; it may have $VARIABLES in it"
        )
    for mount in settings.mounts:
        if not _MOUNT.fullmatch(mount):
            raise UsageError(f"engines.toml: {engine}.mounts has {mount!r}", hint="/PATH, or /PATH:/THERE, or with :ro")


def _contained(
    settings: "EngineSettings", runs: Path, gpus: int, data: Sequence[str], first: list[str]
) -> CodeDelivery:
    image = _image(str(settings.container))
    seen = dict.fromkeys([str(runs.absolute()), *(path for path in data if Path(path).is_absolute())])
    mounts = [
        *(f"{path}:{path}" for path in seen),
        *(one if ":/" in one else f"{one}:{one}" for one in settings.mounts),
    ]
    variables = {"PYTHONPATH": first[0]} if first else {}
    if settings.runtime == "pyxis":
        return CodeDelivery(("python",), variables, {"container_image": image, "container_mounts": ",".join(mounts)})
    binds = [word for mount in mounts for word in ("--bind", mount)]
    return CodeDelivery(("apptainer", "exec", *(["--nv"] if gpus else []), *binds, image, "python"), variables)


def _image(named: str) -> str:
    """A file as an absolute path; an address as it is."""
    if re.fullmatch(r"[a-z][a-z0-9+-]*://[^\s\0]+", named):
        return named
    path = Path(named).expanduser().absolute()
    if not path.exists():
        raise UsageError(f"there is no container image {path}", hint="name a file, or an address: docker://...")
    return str(path)
