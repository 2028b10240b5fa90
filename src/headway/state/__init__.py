"""State: layouts and the moves between them, checkpoints that are whole or not there, stores, and what is read back.

`headway.state.tensors` is the one file that knows torch, and is imported by workers only.
"""

from headway.state.box import Box
from headway.state.buffer import Buffer, BufferPlan, InMemory, map_files, plan_buffer
from headway.state.checkpoint import (
    Entry,
    Piece,
    PieceShape,
    Save,
    Shard,
    abandon,
    begin,
    collect,
    commit,
    describe_shard,
    fence,
    find_checkpoint,
    image_of,
    leave,
    list_checkpoints,
    merge,
    partial_folder,
    prune,
    shard_name,
    write_shard,
)
from headway.state.digest import digest_box, state_digest
from headway.state.layout import Layout, Part, spread, whole
from headway.state.line import Line, LineClosed, Message
from headway.state.manifest import Facts, FileEntry, Manifest, PieceEntry, TensorEntry, dump_manifest
from headway.state.move import Move, all_moves, moves
from headway.state.restore import Checkpoint, Verified, open_checkpoint, read_box, verify
from headway.state.source import Folder, Source

__all__ = [
    "Box",
    "Buffer",
    "BufferPlan",
    "Checkpoint",
    "Entry",
    "Facts",
    "FileEntry",
    "Folder",
    "InMemory",
    "Layout",
    "Line",
    "LineClosed",
    "Manifest",
    "Message",
    "Move",
    "Part",
    "Piece",
    "PieceEntry",
    "PieceShape",
    "Save",
    "Shard",
    "Source",
    "TensorEntry",
    "Verified",
    "abandon",
    "all_moves",
    "begin",
    "collect",
    "commit",
    "describe_shard",
    "digest_box",
    "dump_manifest",
    "fence",
    "find_checkpoint",
    "image_of",
    "leave",
    "list_checkpoints",
    "map_files",
    "merge",
    "moves",
    "open_checkpoint",
    "partial_folder",
    "plan_buffer",
    "prune",
    "read_box",
    "shard_name",
    "spread",
    "state_digest",
    "verify",
    "whole",
    "write_shard",
]
