"""The available engines, and a site's settings for each in `~/.config/headway/engines.toml` (or $HEADWAY_ENGINES).

[slurm]
partition = "gpu"
account = "ml-team"
setup = ["module load cuda"]
secrets = ["HF_TOKEN"]
environment = { NCCL_DEBUG = "WARN" }
"""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from headway.cluster.engines.engine import Engine, did_you_mean
from headway.errors import UsageError


@dataclass(frozen=True)
class EngineSettings:
    """A site's settings for one engine."""

    setup: tuple[str, ...] = ()
    """Shell lines to run before the command."""
    secrets: tuple[str, ...] = ()
    """Names of variables that jobs take from the submitter's environment."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables for jobs; never secrets."""
    cpus: int | None = None
    """Per machine of a job."""
    memory_gib: float | None = None
    """Per machine of a job."""
    limit_s: float | None = None
    grace_s: float | None = None
    code: str | None = None
    """How code reaches machines: `shared` (the default), at the same path, or `staged`, unpacked on each."""
    stage_to: str | None = None
    """Where a machine unpacks staged code; by default $TMPDIR, or /tmp."""
    container: str | None = None
    """Image that jobs run in: a file or an address."""
    runtime: str | None = None
    """Container runtime: apptainer (the default) or pyxis."""
    mounts: tuple[str, ...] = ()
    """Paths that a container sees beside the runs and their data."""
    shared: bool = True
    """Whether all machines see the folder of runs. Otherwise runs travel through their object stores."""
    snapshot: bool = False
    """Whether each run gets a copy of the package of its custom model class."""
    site: Mapping[str, str] = field(default_factory=dict)
    """Settings that only this engine has."""


_SITE_MODULES = {
    "local": None,
    "service": "cluster.service.demand",
    "slurm": "cluster.engines.slurm.batch_script",
    "ray": "cluster.engines.ray.rules",
    "kubernetes": "cluster.engines.kubernetes.engine",
}
"""Every engine, and the module whose SITE lists the settings that only it has."""

_KINDS: Mapping[str, tuple[type | tuple[type, ...], str]] = {
    "setup": (list, "a list of lines"),
    "secrets": (list, "a list of variable names"),
    "environment": (dict, "a table of variables"),
    "cpus": (int, "a number"),
    "memory_gib": ((int, float), "a number"),
    "limit_s": ((int, float), "a number of seconds"),
    "grace_s": ((int, float), "a number of seconds"),
    "code": (str, "shared or staged"),
    "stage_to": (str, "a path on each machine"),
    "container": (str, "an image file or address"),
    "runtime": (str, "apptainer or pyxis"),
    "mounts": (list, "a list of paths"),
    "snapshot": (bool, "true or false"),
    "shared": (bool, "true or false: whether all machines see the folder of runs"),
}


def open_engine(name: str, runs: Path) -> Engine:
    """Open an engine by name, for the runs in a folder."""
    settings, given, runs = engine_settings(name), runs, runs.absolute()
    match name:  # imported late: each engine costs a start of its own
        case "local":
            from headway.cluster.engines.local.engine import LocalEngine

            return LocalEngine(runs / ".local")
        case "service":
            from headway.cluster.service.service_engine import ServiceEngine

            return ServiceEngine(runs, settings.site)
        case "slurm":
            from headway.cluster.engines.slurm.engine import SlurmEngine

            return SlurmEngine(runs / ".slurm")
        case "ray":
            from headway.cluster.engines.ray.engine import RayEngine

            return RayEngine(settings.site.get("address"), runs=given)
        case _:
            from headway.cluster.engines.kubernetes.engine import KubernetesEngine

            return KubernetesEngine()


def reach_engine(name: str, runs: Path) -> Engine:
    """Open an engine that answers; EngineUnreachable within seconds if it does not."""
    engine = open_engine(name, runs)
    engine.probe()
    return engine


def settings_file() -> Path:
    """The path of engines.toml."""
    stated = os.environ.get("HEADWAY_ENGINES")
    base = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return Path(stated) if stated else base / "headway" / "engines.toml"


def engine_settings(name: str, file: Path | None = None) -> EngineSettings:
    """A site's settings for an engine; the defaults if there is no such file."""
    if name not in _SITE_MODULES:
        raise UsageError(f"unknown engine {name!r}", hint=did_you_mean(name, _SITE_MODULES))
    path = file or settings_file()
    try:
        with path.open("rb") as stream:
            tables = tomllib.load(stream)
    except FileNotFoundError:
        if "HEADWAY_ENGINES" in os.environ and file is None:
            raise UsageError(f"HEADWAY_ENGINES: file {path} not found") from None
        return EngineSettings()
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None
    for other in tables:
        if other not in _SITE_MODULES:
            raise UsageError(f"{path}: unknown table [{other}]", hint=did_you_mean(other, _SITE_MODULES))
    return _parse(path, name, tables.get(name, {}))


def _parse(path: Path, name: str, table: Mapping[str, Any]) -> EngineSettings:
    module = _SITE_MODULES[name]
    site_keys = import_module(f"headway.{module}").SITE if module else {}
    common, site = dict[str, Any](), dict[str, str]()
    for key, value in table.items():
        where = f"{path}: {name}.{key}"
        if key in _KINDS:
            kind, expected = _KINDS[key]
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                raise UsageError(f"{where} is {value!r}", hint=f"expected {expected}")
            common[key] = _check_strings(where, value)
        elif key in site_keys:
            if not isinstance(value, str | int) or isinstance(value, bool):
                raise UsageError(f"{where} is {value!r}", hint=f"expected {site_keys[key]}")
            site[key] = str(value)
        else:
            raise UsageError(f"{path}: [{name}] has no key {key!r}", hint=did_you_mean(key, {**_KINDS, **site_keys}))
    return EngineSettings(**common, site=site)


def _check_strings(where: str, value: Any) -> Any:
    """The value, lists as tuples; UsageError if a list or table holds anything but strings."""
    items = value if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else []
    for item in items:
        if not isinstance(item, str):
            raise UsageError(f"{where} has {item!r} in it, not a string", hint="put it in quotes")
    return tuple(value) if isinstance(value, list) else value
