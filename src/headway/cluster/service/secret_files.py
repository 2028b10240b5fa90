"""Secrets that a node hands to a job as files: in a folder of the start's own, gone as soon as the start has ended."""

import os
import pwd
from collections.abc import Mapping
from pathlib import Path

from headway.cluster.engines.engine import LaunchRequest
from headway.cluster.service.isolation import remove_scratch

SETTING = "secret_files"


def names_of_files(request: LaunchRequest) -> list[str]:
    """The secrets that a job is to have as files instead of variables."""
    return [name.strip() for name in request.site.get(SETTING, "").split(",") if name.strip()]


def write_secret_files(folder: Path, values: Mapping[str, str], user: pwd.struct_passwd | None) -> dict[str, str]:
    """Write each value to a private file, and return the variables that name them: NAME_FILE for NAME.

    The folder becomes the user's when all is in it: until then, no other user can put links there."""
    remove_scratch(folder)
    folder.parent.mkdir(mode=0o711, exist_ok=True)
    folder.mkdir(mode=0o700)
    for name, value in values.items():
        with os.fdopen(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(value)
            if user is not None:
                os.fchown(file.fileno(), user.pw_uid, user.pw_gid)
    if user is not None:
        os.chown(folder, user.pw_uid, user.pw_gid)
    return {f"{name}_FILE": str(folder / name) for name in values}
