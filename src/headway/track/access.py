"""Who may read a run: its folder's mode, and the files that processes of the run create in it.

Run folders are created with mode 0700, or with `runs.mode` of `~/.config/headway/settings.toml` ($HEADWAY_SETTINGS
names another file):

    [runs]
    mode = "0750"

From then on the folder itself says it: every process that writes into a run takes its umask from the folder's mode, so
files in a folder of mode 0700 have mode 0600, and `chmod` changes it for what is written later.
"""

import contextlib
import os
import re
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path

from headway.errors import UsageError

PRIVATE = 0o700
_MODE = re.compile(r"0?7[0-7][0-5]")


def settings_file() -> Path:
    """The path of a user's settings."""
    stated = os.environ.get("HEADWAY_SETTINGS")
    base = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return Path(stated) if stated else base / "headway" / "settings.toml"


def new_run_mode(file: Path | None = None) -> int:
    """The mode of new run folders: `runs.mode`, else 0700."""
    path = file or settings_file()
    try:
        with path.open("rb") as stream:
            settings = tomllib.load(stream)
    except FileNotFoundError:
        if "HEADWAY_SETTINGS" in os.environ and file is None:
            raise UsageError(f"HEADWAY_SETTINGS: file {path} not found") from None
        return PRIVATE
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None
    runs = settings.get("runs", {})
    unknown = [f"[{table}]" for table in settings if table != "runs"]
    unknown += [f"runs.{key}" for key in runs if key != "mode"] if isinstance(runs, dict) else ["runs"]
    if unknown:
        raise UsageError(f"{path}: unknown setting {unknown[0]}", hint='the only one is mode = "0700" in [runs]')
    mode = runs.get("mode", "0700")
    if not isinstance(mode, str) or not _MODE.fullmatch(mode):
        raise UsageError(
            f"{path}: runs.mode is {mode!r}",
            hint='use a string such as "0700", "0750" or "0770"; others may never write',
        )
    return int(mode, 8)


def adopt_umask(folder: Path) -> None:
    """Have this process create files as private as a run's folder; no change if the folder is gone."""
    with contextlib.suppress(OSError):
        os.umask(~stat.S_IMODE(folder.stat().st_mode) & 0o777)


@contextlib.contextmanager
def umask_of(folder: Path) -> Iterator[None]:
    """The same until the end of a block."""
    before = os.umask(0o077)
    os.umask(before)
    adopt_umask(folder)
    try:
        yield
    finally:
        os.umask(before)
