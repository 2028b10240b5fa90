"""Examine files one by one: their hash, and the facts that decoding them gives, or why they cannot be used."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headway.data.media.appearance import Appearance, Observer
from headway.data.media.decode import Undecodable
from headway.data.media.examine import examine
from headway.data.media.manifest import Kind
from headway.data.media.sources import MediaSource
from headway.data.media.writer import ClipFacts


@dataclass(frozen=True)
class Examined:
    """What is known of a file."""

    name: str
    sha256: str = ""
    facts: ClipFacts | None = None
    refused: str = ""
    """Why it cannot be used, if it has no facts."""
    appearance: Appearance | None = None

    def to_json(self) -> dict[str, Any]:
        """Serialize it."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Examined":
        """Restore it."""
        facts = values["facts"]
        if facts is not None:
            lists = {key: tuple(facts[key]) for key in ("times", "keyframes", "offsets")}
            facts = ClipFacts(**{**facts, **lists})
        seen = values["appearance"]
        return cls(**{**values, "facts": facts, "appearance": None if seen is None else Appearance(**seen)})


def examine_file(kind: Kind, source: MediaSource) -> Examined:
    """Read and decode one file."""
    try:
        content = source.path.read_bytes()
    except OSError as error:
        return Examined(source.name, refused=f"it cannot be read: {error.strerror}")
    return examine_content(kind, source.name, content)


def examine_content(kind: Kind, name: str, content: bytes) -> Examined:
    """Decode the bytes of one file."""
    observer = Observer()
    try:
        facts = examine(kind, content, observer.visit)
    except Undecodable as error:
        return Examined(name, refused=error.message)
    return Examined(name, hashlib.sha256(content).hexdigest(), facts, appearance=observer.appearance())


def examine_here(kind: Kind, sources: Sequence[MediaSource]) -> Iterator[Examined]:
    """Examine files in this process."""
    for source in sources:
        yield examine_file(kind, source)
