"""State: checkpoints that are written whole or not at all, checked when read, and load into any layout.

`headway.state.tensors` is the one file that knows torch, and is imported by workers only.
"""

from headway.state.box import Box
from headway.state.checkpoint import (
    Entry,
    Piece,
    abandon,
    begin,
    commit,
    find_checkpoint,
    list_checkpoints,
    partial_folder,
    prune,
    write_shard,
)
from headway.state.digest import digest_box, state_digest
from headway.state.manifest import Facts, FileEntry, Manifest, PieceEntry, TensorEntry
from headway.state.restore import Checkpoint, Verified, open_checkpoint, read_box, verify

__all__ = [
    "Box",
    "Checkpoint",
    "Entry",
    "Facts",
    "FileEntry",
    "Manifest",
    "Piece",
    "PieceEntry",
    "TensorEntry",
    "Verified",
    "abandon",
    "begin",
    "commit",
    "digest_box",
    "find_checkpoint",
    "list_checkpoints",
    "open_checkpoint",
    "partial_folder",
    "prune",
    "read_box",
    "state_digest",
    "verify",
    "write_shard",
]
