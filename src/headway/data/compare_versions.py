"""What differs between two datasets: sources, settings, documents by content, shards and tokens."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from headway.data.origins import Origins, read_origins, recorded_sources
from headway.data.shards import Dataset

EXAMPLES = 5
"""Documents that are named."""
EVERY = 10_000
"""Documents between reports of progress."""


@dataclass(frozen=True)
class DocumentDifference:
    """Documents of one dataset that the other has not."""

    documents: int = 0
    tokens: int = 0
    examples: tuple[tuple[int, str], ...] = ()
    """(number, source or beginning of the text) of the first few."""


@dataclass(frozen=True)
class VersionDiff:
    """The differences of two datasets."""

    versions: tuple[str, str]
    tokens: tuple[int, int]
    documents: tuple[int, int]
    shards: tuple[int, int]
    same_shards: int
    """Shards of the first with the same content in the second."""
    tokenizers_equal: bool
    """If not, token ids mean different texts, and documents are not compared."""
    settings: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """Build options that differ."""
    sources_removed: tuple[str, ...] = ()
    sources_added: tuple[str, ...] = ()
    sources_changed: tuple[str, ...] = ()
    """Files of the same path and another size or time of change."""
    removed: DocumentDifference | None = None
    added: DocumentDifference | None = None
    common: int = 0
    """Documents in both, wherever they are."""

    @property
    def equal(self) -> bool:
        """Whether both are the same version."""
        return self.versions[0] == self.versions[1]


def compare_versions(
    first: Dataset, second: Dataset, progress: Callable[[int, int], None] = lambda _done, _total: None
) -> VersionDiff:
    """Compare two datasets; documents are equal if their tokens are."""
    recorded = [recorded_sources(dataset.path) for dataset in (first, second)]
    files = [_files(record) for record in recorded]
    same_paths = files[0].keys() & files[1].keys()
    manifests = first.manifest, second.manifest
    hashes = [Counter(shard.sha256 for shard, _ in manifest.shards()) for manifest in manifests]
    same_tokenizer = manifests[0].tokenizer.sha256 == manifests[1].tokenizer.sha256
    diff = VersionDiff(
        versions=(first.version, second.version),
        tokens=(manifests[0].tokens, manifests[1].tokens),
        documents=(manifests[0].documents, manifests[1].documents),
        shards=(len(manifests[0].shards()), len(manifests[1].shards())),
        same_shards=(hashes[0] & hashes[1]).total(),
        tokenizers_equal=same_tokenizer,
        settings=_settings(*recorded),
        sources_removed=tuple(sorted(files[0].keys() - files[1].keys())),
        sources_added=tuple(sorted(files[1].keys() - files[0].keys())),
        sources_changed=tuple(sorted(path for path in same_paths if files[0][path] != files[1][path])),
    )
    if not same_tokenizer:
        return diff
    total = sum(diff.documents)
    first_hashes, second_hashes = (_hashes(dataset, start, total, progress)
                    for dataset, start in ((first, 0), (second, diff.documents[0])))  # fmt: skip
    left, right = list(first_hashes), list(second_hashes)
    counts = Counter(left), Counter(right)
    common = (counts[0] & counts[1]).total()
    removed = _missing(first, left, counts[1])
    added = _missing(second, right, counts[0])
    values = {name: getattr(diff, name) for name in VersionDiff.__dataclass_fields__}
    return VersionDiff(**values | {"removed": removed, "added": added, "common": common})


def _hashes(dataset: Dataset, done: int, total: int, progress: Callable[[int, int], None]) -> Iterator[bytes]:
    for tokens, table in zip(dataset.tokens, dataset.documents, strict=True):
        start = 0
        for end, prompt in table.tolist():
            yield xxhash.xxh3_128_digest(tokens[start:end].astype("<u4").tobytes(), seed=prompt)
            start, done = end, done + 1
            if done % EVERY == 0:
                progress(done, total)


def _missing(dataset: Dataset, hashes: list[bytes], other: Counter[bytes]) -> DocumentDifference:
    """Return the documents that the other dataset has fewer times, the last ones of equal documents."""
    left, documents, tokens = Counter(other), 0, 0
    examples: list[tuple[int, str]] = []
    origins = read_origins(dataset.path, dataset.manifest.documents)
    for number, digest in enumerate(hashes):
        if left[digest] > 0:
            left[digest] -= 1
            continue
        documents += 1
        ids = dataset.document(number).ids
        tokens += len(ids)
        if len(examples) < EXAMPLES:
            examples.append((number, _name(dataset, number, origins)))
    return DocumentDifference(documents, tokens, tuple(examples))


def _name(dataset: Dataset, number: int, origins: Origins | None) -> str:
    if origins is not None:
        return str(origins[number])
    return repr(dataset.tokenizer().decode(dataset.document(number).ids[:24]))


def _files(recorded: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    files = recorded.get("files")
    entries = [file for file in files if isinstance(file, dict)] if isinstance(files, list) else []
    return {str(file.get("path")): (file.get("bytes"), file.get("mtime_ns")) for file in entries}


def _settings(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    before, after = (record.get("options") for record in (first, second))
    if not isinstance(before, dict) or not isinstance(after, dict):
        return {}
    keys = dict.fromkeys([*before, *after])
    return {key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)}
