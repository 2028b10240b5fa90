"""A source that notes what is read of it."""

from pathlib import Path

from headway.state import CheckpointSource, FolderCheckpoint


class Counting(CheckpointSource):
    """A checkpoint in a folder; `reads` has the file, first byte and end of each read."""

    def __init__(self, path: Path) -> None:
        self._folder = FolderCheckpoint(path)
        self.location = str(path)
        self.reads: list[tuple[str, int, int]] = []

    def manifest(self) -> bytes:
        return self._folder.manifest()

    def size(self, file: str) -> int:
        return self._folder.size(file)

    def read(self, file: str, begin: int, out: memoryview) -> None:
        self.reads.append((file, begin, begin + len(out)))
        self._folder.read(file, begin, out)
