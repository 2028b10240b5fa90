"""Chat datasets written sample by sample, and what their rows must hold by definition."""

import random
from typing import NamedTuple

import numpy as np

from headway.data.chat_samples import ASSISTANT
from headway.data.chat_tokens import EncodedSample
from headway.data.chat_writer import ChatWriter
from headway.data.loader import MASKED
from headway.data.manifest import CHAT_FORMAT, MANIFEST, ChatFacts, DatasetManifest
from headway.data.shards import open_dataset
from headway.data.writer import write_file
from headway.recipe.data import Data


class WrittenSample(NamedTuple):
    ids: list
    spans: list
    conversation: int
    weight: float
    desirable: bool


def chat_dataset(folder, kind, seed, conversations=30, first=1):
    """A dataset of random samples in several shards; ids count up, so that no two tokens are equal, and none is 0."""
    rng = random.Random(seed)
    folder.mkdir()
    writer = ChatWriter(folder, dtype="uint16", shard_tokens=300)
    samples = []
    for number in range(conversations):
        weight, desirable = rng.choice([1.0, 0.5, 2.0]), rng.random() < 0.5 or kind != "labelled"
        units = 1 if kind != "chat" else rng.choice([1, 1, 2])
        for _ in range(units):
            unit = []
            for _ in range(1 if kind == "chat" else 2):
                spans, position = [], 0
                for _ in range(rng.randint(1, 3)):
                    for role, trained in ((2, False), (ASSISTANT, True)):
                        length = rng.randint(1, 12)
                        spans.append((position, position + length, role, trained))
                        position += length
                ids = list(range(first, first + position))
                first += position
                unit.append(EncodedSample([np.array(ids, dtype=np.uint32)], spans, position))
                samples.append(WrittenSample(ids, spans, number, weight, desirable))
            writer.add(unit, conversation=number, weight=weight, desirable=desirable)
    writer.close()
    files = {name: write_file(folder / name, b"{}") for name in ("chat_template.jinja", "tokenizer_config.json")}
    facts = ChatFacts(kind, conversations, writer.trained_tokens, tuple(writer.chat_files), *files.values())
    manifest = DatasetManifest(
        "uint16", 60_000, 0, writer.tokens, writer.documents, writer.prompt_tokens, tuple(writer.files),
        write_file(folder / "tokenizer.json", b"{}"), CHAT_FORMAT, facts,
    )  # fmt: skip
    write_file(folder / MANIFEST, manifest.canonical())
    return open_dataset(folder), samples


def data_of(dataset, **more):
    return Data.model_validate({"path": str(dataset.path), **more})


def expected_rows(samples, kind, seq, over_length, loss_on):
    """(sample, inputs, labels) of all parts that must be in rows, by definition."""
    width = 1 if kind == "chat" else 2
    expected = []
    for start in range(0, len(samples), width):
        unit = samples[start : start + width]
        lengths = [len(sample.ids) for sample in unit]
        cuts = [[(0, length)] for length in lengths]
        if sum(lengths) > seq:
            if over_length == "drop":
                continue
            if over_length == "split":
                cuts = [[(low, min(low + seq, lengths[0])) for low in range(0, lengths[0], seq)]]
            elif width == 1:
                cuts = [[(0, seq)]]
            else:
                cuts = [[(0, min(n, max(seq // 2, seq - m)))] for n, m in zip(lengths, lengths[::-1], strict=True)]
        parts = []
        for offset, (sample, ranges) in enumerate(zip(unit, cuts, strict=True)):
            counted = counted_tokens(samples, start + offset, kind, loss_on)
            for low, high in ranges:
                labels = [sample.ids[i + 1] if i + 1 in counted and i + 1 < high else MASKED for i in range(low, high)]
                parts.append((start + offset, sample.ids[low:high], labels))
        if width == 1:
            expected += [part for part in parts if set(part[2]) != {MASKED}]
        elif all(set(labels) != {MASKED} for _, _, labels in parts):
            expected += parts
    return expected


def counted_tokens(samples, number, kind, loss_on):
    """Positions in a sample that the loss counts."""
    sample = samples[number]
    if loss_on == "all":
        return set(range(len(sample.ids)))
    spans = [span for span in sample.spans if span[3]]
    if loss_on == "last":
        following = samples[number + 1].conversation if number + 1 < len(samples) else None
        if kind == "chat" and following == sample.conversation:
            return set()
        spans = spans[-1:]
    return {position for low, high, _, _ in spans for position in range(low, high)}
