"""Whether the folder at a run's path is still the one that its agent opened: by device, inode and the run's id.

A path alone does not tell. A renamed folder is gone although all of it exists, and under a file system that was
unmounted lies a bare mount point, in which nothing of the run may be created.
"""

from dataclasses import dataclass
from typing import Literal

from headway.track.run_folder import RunFolder, run_id


@dataclass(frozen=True)
class FolderIdentity:
    """Which folder this is."""

    device: int
    inode: int
    run: str
    """The id in it; empty if it has none."""


FolderState = Literal["here", "remounted", "gone", "replaced"]


def open_identity(run: RunFolder) -> FolderIdentity:
    """Return the identity of a run's folder, which gets an id if it has none."""
    number, status = run_id(run), run.path.stat()
    return FolderIdentity(status.st_dev, status.st_ino, number)


def identify(run: RunFolder) -> FolderIdentity | None:
    """Return the identity of whatever is at a run's path now, without changing it; None for nothing readable."""
    try:
        status = run.path.stat()
    except OSError:
        return None
    try:
        number = run.id_file.read_text().strip()
    except (OSError, ValueError):
        number = ""
    return FolderIdentity(status.st_dev, status.st_ino, number)


def compare_folders(opened: FolderIdentity, now: FolderIdentity | None) -> FolderState:
    """Tell whether the folder that was opened is still there, under another device number, gone, or replaced.

    A file system that is mounted again may get another device number, and its inodes keep theirs. A copy has the run's
    id too, but another inode: records and locks of the live run are not in it, so that it counts as another folder.
    """
    if now is None:
        return "gone"
    if (now.device, now.inode) == (opened.device, opened.inode):
        return "here"
    if now.inode == opened.inode and now.run and now.run == opened.run:
        return "remounted"
    return "replaced"
