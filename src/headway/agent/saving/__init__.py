"""Saves: snapshots in memory, replicas on a second node, checkpoints on disk and in the object store."""
