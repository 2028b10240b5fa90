"""Where a machine keeps the state of its node."""

import os
from pathlib import Path


def default_node_folder() -> Path:
    """Root's is in /var/lib, a user's in its own state folder."""
    if os.geteuid() == 0:
        return Path("/var/lib/headway/node")
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "headway" / "node"
