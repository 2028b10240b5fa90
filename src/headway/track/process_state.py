"""Whether a process runs, waits or is stopped."""

from pathlib import Path


def process_state(pid: int) -> str:
    """The kernel's state letter of a process: R, S, D, T (stopped), t (traced), Z; "" if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
