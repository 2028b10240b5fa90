"""Which engines there are, and what a site says of each in `~/.config/headway/engines.toml` (or $HEADWAY_ENGINES).

[slurm]
partition = "gpu"
account = "ml-team"
setup = ["module load cuda"]
secrets = ["HF_TOKEN"]
environment = { NCCL_DEBUG = "WARN" }
"""

import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from headway.cluster.engines.engine import Engine
from headway.errors import UsageError

__all__ = ["ENGINES", "EngineSettings", "engine_settings", "open_engine", "settings_file"]


@dataclass(frozen=True)
class EngineSettings:
    """What a site says of an engine."""

    setup: tuple[str, ...] = ()
    """Lines for the shell, before the command."""
    secrets: tuple[str, ...] = ()
    """Names of variables that jobs have from whoever submits them."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that jobs have; nothing secret."""
    cpus: int | None = None
    """Of each machine, for a job."""
    memory_gib: float | None = None
    """Of each machine, for a job."""
    limit_s: float | None = None
    grace_s: float | None = None
    code: str | None = None
    """How code gets to machines: `shared` (the default) at the same path, `staged` unpacked on each."""
    stage_to: str | None = None
    """Where a machine unpacks staged code; by default $TMPDIR, or /tmp."""
    container: str | None = None
    """An image that jobs run in: a file, or an address."""
    runtime: str | None = None
    """What runs it: apptainer (the default), or pyxis."""
    mounts: tuple[str, ...] = ()
    """What a container sees beside the runs and their data."""
    shared: bool = True
    """Whether all machines see the runs' folder. If not, runs go by their object stores."""
    snapshot: bool = False
    """Whether each run has a copy of the package of its own model class."""
    site: Mapping[str, str] = field(default_factory=dict)
    """What only this engine understands."""


def _local(runs: Path, _: EngineSettings) -> Engine:
    from headway.cluster.engines.local.engine import LocalEngine

    return LocalEngine(runs / ".local")


def _slurm(runs: Path, _: EngineSettings) -> Engine:
    from headway.cluster.engines.slurm.engine import SlurmEngine

    return SlurmEngine(runs / ".slurm")


def _ray(_: Path, settings: EngineSettings) -> Engine:
    from headway.cluster.engines.ray.engine import RayEngine

    return RayEngine(settings.site.get("address"))


def _ray_keys() -> Mapping[str, str]:
    from headway.cluster.engines.ray.rules import SITE

    return SITE


def _kubernetes(_: Path, __: EngineSettings) -> Engine:
    from headway.cluster.engines.kubernetes.engine import KubernetesEngine

    return KubernetesEngine()


def _kubernetes_keys() -> Mapping[str, str]:
    from headway.cluster.engines.kubernetes.engine import SITE

    return SITE


def _slurm_keys() -> Mapping[str, str]:
    from headway.cluster.engines.slurm.batch_script import SITE

    return SITE


ENGINES: Mapping[str, tuple[Callable[[Path, EngineSettings], Engine], Callable[[], Mapping[str, str]]]] = {
    "local": (_local, dict),
    "slurm": (_slurm, _slurm_keys),
    "ray": (_ray, _ray_keys),
    "kubernetes": (_kubernetes, _kubernetes_keys),
}
"""Each engine by its name: how it is opened for a folder of runs, and the settings that only it understands."""

_KINDS: Mapping[str, tuple[type | tuple[type, ...], str]] = {
    "setup": (list, "a list of lines"),
    "secrets": (list, "a list of names of variables"),
    "environment": (dict, "a table of variables"),
    "cpus": (int, "a number"),
    "memory_gib": ((int, float), "a number"),
    "limit_s": ((int, float), "a number of seconds"),
    "grace_s": ((int, float), "a number of seconds"),
    "code": (str, "shared, or staged"),
    "stage_to": (str, "a path on each machine"),
    "container": (str, "an image's file or address"),
    "runtime": (str, "apptainer, or pyxis"),
    "mounts": (list, "a list of paths"),
    "snapshot": (bool, "true or false"),
    "shared": (bool, "true or false: whether all machines see the runs' folder"),
}


def open_engine(name: str, runs: Path) -> Engine:
    """An engine by its name, for the runs in a folder."""
    return _known(name)[0](runs.absolute(), engine_settings(name))


def settings_file() -> Path:
    """Where a site says what its engines need."""
    stated = os.environ.get("HEADWAY_ENGINES")
    base = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return Path(stated) if stated else base / "headway" / "engines.toml"


def engine_settings(name: str, file: Path | None = None) -> EngineSettings:
    """What a site says of an engine; nothing where there is no such file."""
    _known(name)
    path = file or settings_file()
    try:
        with path.open("rb") as stream:
            tables = tomllib.load(stream)
    except FileNotFoundError:
        if "HEADWAY_ENGINES" in os.environ and file is None:
            raise UsageError(f"HEADWAY_ENGINES names {path}, which is not there") from None
        return EngineSettings()
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    for other in tables:
        if other not in ENGINES:
            raise UsageError(f"{path} has a table [{other}]", hint=_near(other, ENGINES))
    return _settings(path, name, tables.get(name, {}))


def _settings(path: Path, name: str, table: Mapping[str, Any]) -> EngineSettings:
    keys, common, site = ENGINES[name][1](), dict[str, Any](), dict[str, str]()
    for key, value in table.items():
        where = f"{path}: {name}.{key}"
        if key in _KINDS:
            kind, words = _KINDS[key]
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                raise UsageError(f"{where} is {value!r}", hint=f"it is {words}")
            common[key] = _plain(where, value)
        elif key in keys:
            if not isinstance(value, str | int) or isinstance(value, bool):
                raise UsageError(f"{where} is {value!r}", hint=f"it is {keys[key]}")
            site[key] = str(value)
        else:
            raise UsageError(f"{path}: [{name}] has no key {key!r}", hint=_near(key, {**_KINDS, **keys}))
    return EngineSettings(**common, site=site)


def _plain(where: str, value: Any) -> Any:
    """Lists and tables of words; numbers as they are."""
    words = value if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else []
    for word in words:
        if not isinstance(word, str):
            raise UsageError(f"{where} has {word!r} in it", hint="put it between quotes")
    return tuple(value) if isinstance(value, list) else value


def _known(name: str) -> tuple[Callable[[Path, EngineSettings], Engine], Callable[[], Mapping[str, str]]]:
    if name not in ENGINES:
        raise UsageError(f"there is no engine {name!r}", hint=_near(name, ENGINES))
    return ENGINES[name]


def _near(word: str, known: Mapping[str, Any]) -> str:
    near = get_close_matches(word, known, n=3, cutoff=0.5) or list(known)
    return f"did you mean {' or '.join(near)}?"
