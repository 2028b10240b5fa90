"""As whom jobs run on a node, and what keeps them apart.

An agent of root runs each tenant's jobs as that tenant's Unix user, in control groups. Any other agent runs jobs as
itself, and so takes those of one tenant only; one of root does so only if root is meant. Nothing that a job can change
is trusted: its files are made by its user.
"""

import os
import pwd
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headway.cluster.service.cgroups import Cgroups, find_cgroups
from headway.errors import UsageError


@dataclass(frozen=True)
class Isolation:
    """The rules of one node."""

    tenants: tuple[str, ...] | None = None
    """Whose jobs it runs; None: everybody's."""
    users: Mapping[str, str] = field(default_factory=dict)
    """Unix user of each tenant; without any, jobs run as the agent's."""
    cgroups: Cgroups | None = None

    def check(self, tenant: str) -> None:
        """Raise UsageError for a tenant whose jobs this node does not run."""
        if self.tenants is not None and tenant not in self.tenants:
            raise UsageError(f"this node runs jobs of {', '.join(self.tenants)} only, not of {tenant}")

    def user(self, tenant: str) -> pwd.struct_passwd | None:
        """The Unix user that a tenant's jobs run as; None: the agent's own."""
        return find_user(self.users[tenant]) if self.users else None


def isolation_of(
    folder: Path, tenants: Sequence[str], users: Mapping[str, str], *, jobs_as_root: bool = False
) -> Isolation:
    """The rules of a node that has joined; UsageError if they cannot be kept here."""
    if not users:
        if len(tenants) != 1:
            raise UsageError(
                "without Unix users of their own, a node runs jobs of one tenant only", hint="--tenant NAME"
            )
        if os.geteuid() == 0 and not jobs_as_root:
            raise UsageError(
                "jobs would run as root on this node",
                hint="--tenant-user TENANT=USER runs them as that user; --jobs-as-root if root is meant",
            )
        return Isolation(tuple(tenants), {}, find_cgroups(folder))
    if os.geteuid() != 0:
        raise UsageError("only root's agent can run jobs as other users", hint="--tenant NAME runs them as yours")
    if shutil.which("setpriv") is None:
        raise UsageError("setpriv is not installed: jobs cannot run as other users", hint="install util-linux")
    cgroups = find_cgroups(folder)
    if cgroups is None and len(users) > 1:
        raise UsageError(
            "this machine has no control groups that root may change: tenants cannot be kept apart",
            hint="join it for one tenant, with --tenant NAME",
        )
    for tenant, name in users.items():
        if find_user(name).pw_uid == 0:
            raise UsageError(f"tenant {tenant} would run jobs as root", hint="give it a Unix user of its own")
    return Isolation(tuple(tenants), dict(users), cgroups)


def find_user(name: str) -> pwd.struct_passwd:
    """A Unix user; UsageError if there is none of that name."""
    try:
        return pwd.getpwnam(name)
    except KeyError:
        raise UsageError(f"no Unix user '{name}' on this machine", hint=f"useradd --create-home {name}") from None


def run_as(user: pwd.struct_passwd) -> list[str]:
    """The command before a command that is to run as a user, with its groups and nothing of ours."""
    return ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--init-groups", "--inh-caps=-all"]


def variables_of(user: pwd.struct_passwd) -> dict[str, str]:
    """The variables that tell a command who it runs as."""
    return {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name, "SHELL": user.pw_shell}


def make_scratch(folder: Path, user: pwd.struct_passwd | None) -> None:
    """Make the private folder of a start, empty."""
    remove_scratch(folder)
    folder.parent.mkdir(mode=0o711, exist_ok=True)
    folder.mkdir(mode=0o700)
    if user is not None:
        os.chown(folder, user.pw_uid, user.pw_gid)


def remove_scratch(folder: Path) -> None:
    """Remove the private folder of a start; links in it are not followed."""
    assert shutil.rmtree.avoids_symlink_attacks
    shutil.rmtree(folder, ignore_errors=True)
