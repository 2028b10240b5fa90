"""Training state: tensor layouts, atomic checkpoints on disk and in object stores, and resharding on read.

Only `headway.state.tensors` imports torch, and only workers import it.
"""

from headway.state.box import Box
from headway.state.channel import Channel, ChannelClosed, Message, MessageChannel
from headway.state.digest import digest_box, state_digest
from headway.state.layout import sharded
from headway.state.manifest import (
    CheckpointFacts,
    CheckpointManifest,
    FileEntry,
    PieceEntry,
    TensorEntry,
    dump_manifest,
)
from headway.state.move import moves
from headway.state.read_checkpoint import OpenCheckpoint, open_checkpoint, read_box, verify_checkpoint
from headway.state.save_buffer import BufferPlan, MemoryCheckpoint, SaveBuffer, map_files, plan_buffer
from headway.state.source import CheckpointSource, FolderCheckpoint
from headway.state.write_checkpoint import (
    CheckpointEntry,
    PartialCheckpoint,
    Piece,
    PieceShape,
    ShardEntry,
    abandon,
    begin_checkpoint,
    collect_shard_entries,
    commit,
    describe_shard,
    fence,
    find_checkpoint,
    leave_shard_entry,
    list_checkpoints,
    merge,
    partial_folder,
    prune,
    shard_name,
    write_shard,
)

__all__ = [
    "Box",
    "BufferPlan",
    "Channel",
    "ChannelClosed",
    "CheckpointEntry",
    "CheckpointFacts",
    "CheckpointManifest",
    "CheckpointSource",
    "FileEntry",
    "FolderCheckpoint",
    "MemoryCheckpoint",
    "Message",
    "MessageChannel",
    "OpenCheckpoint",
    "PartialCheckpoint",
    "Piece",
    "PieceEntry",
    "PieceShape",
    "SaveBuffer",
    "ShardEntry",
    "TensorEntry",
    "abandon",
    "begin_checkpoint",
    "collect_shard_entries",
    "commit",
    "describe_shard",
    "digest_box",
    "dump_manifest",
    "fence",
    "find_checkpoint",
    "leave_shard_entry",
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
    "sharded",
    "state_digest",
    "verify_checkpoint",
    "write_shard",
]
