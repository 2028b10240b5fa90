"""What `headway data show --chat N` prints: a sample message by message, with what is trained on in colour; or a prompt
with its fields."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from headway.cli.text import columns, plural
from headway.data import Dataset
from headway.data.chat_samples import ROLES
from headway.data.manifest import ChatFacts
from headway.data.prompts import PromptReader
from headway.errors import UsageError

_LABEL = 11
"""Columns of a role and its mark."""


def chat_sample(dataset: Dataset, number: int) -> dict[str, Any]:
    """Return a sample with its documents: two of a pair or a labelled answer, else one."""
    chat = dataset.manifest.chat
    if chat is None:
        raise UsageError(f"{dataset.path} holds text, not chats", hint="leave out --chat")
    width = chat.width
    count = dataset.manifest.documents // width
    if not 0 <= number < count:
        raise UsageError(f"there is no sample {number}", hint=f"0 to {count - 1}")
    documents = [_document(dataset, number * width + offset) for offset in range(width)]
    return {"sample": number, "of": count, "kind": chat.kind, "documents": documents}


def _document(dataset: Dataset, number: int) -> dict[str, Any]:
    ids = dataset.document(number).ids
    tokenizer = dataset.tokenizer(special_tokens=True)
    shard, within = 0, number
    while within >= len(dataset.samples[shard]):
        within -= len(dataset.samples[shard])
        shard += 1
    sample = dataset.samples[shard][within]
    first = int(dataset.samples[shard][within - 1]["spans_end"]) if within else 0
    spans = dataset.spans[shard][first : int(sample["spans_end"])].tolist()
    return {
        "document": number,
        "conversation": int(sample["conversation"]),
        "weight": float(sample["weight"]),
        "desirable": bool(sample["desirable"]),
        "tokens": ids.tolist(),
        "trained_tokens": sum(end - start for start, end, _, trained in spans if trained),
        "spans": [
            {
                "role": ROLES[role],
                "start": start,
                "end": end,
                "trained": bool(trained),
                "text": tokenizer.decode(ids[start:end]),
            }
            for start, end, role, trained in spans
        ],
    }


def print_chat_sample(sample: dict[str, Any]) -> None:
    """Print a sample: trained tokens are bright and marked with +, the others dim."""
    console = Console(highlight=False, markup=False, width=columns(), soft_wrap=True)
    for index, document in enumerate(sample["documents"]):
        kind = ("chosen", "rejected")[index] if sample["kind"] == "pairs" else ""
        if sample["kind"] == "labelled":
            label = "desirable" if document["desirable"] else "undesirable"
            kind = (label, "with another row's answer")[index]
        console.print(
            f"sample {sample['sample']:,} of {sample['of']:,}"
            + (f", {kind}" if kind else "")
            + f": {plural(len(document['tokens']), 'token')}, {document['trained_tokens']:,} trained on"
        )
        facts = f"conversation {document['conversation']:,}, weight {document['weight']:g}"
        console.print(Text(facts, style="dim"))
        before = None
        for span in document["spans"]:
            for position, line in enumerate(visible_lines(span["text"], columns() - _LABEL)):
                name = span["role"] if position == 0 and span["role"] != before else ""
                mark, style = ("+", "green") if span["trained"] else (" ", "dim")
                console.print(Text.assemble((f"{name:>9} ", "bold"), mark, (line, style)))
            before = span["role"]
        if index + 1 < len(sample["documents"]):
            console.print()


def visible_lines(text: str, width: int) -> Iterator[str]:
    """Yield the lines of a text, line ends and control characters visible, none wider than `width`."""
    for line in text.splitlines(keepends=True):
        body = line.rstrip("\r\n")
        plain = "".join(c if c.isprintable() else "\\t" if c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in body)
        plain += "\\n" * (len(line) - len(body))
        for start in range(0, len(plain), width):
            yield plain[start : start + width]


def prompt_facts(dataset: Dataset, number: int) -> dict[str, Any]:
    """Return a prompt as it is rendered, with its fields."""
    reader = PromptReader(dataset)
    if not 0 <= number < len(reader):
        raise UsageError(f"there is no prompt {number}", hint=f"0 to {len(reader) - 1}")
    prompt = reader.prompt(number)
    return {
        "prompt": number,
        "of": len(reader),
        "kind": dataset.kind,
        "tokens": list(prompt.ids),
        "rendered": dataset.tokenizer(special_tokens=True).decode(prompt.ids),
        "text": prompt.text,
        "fields": dict(prompt.fields),
    }


def print_prompt(prompt: dict[str, Any]) -> None:
    """Print a prompt as it is rendered, and its fields."""
    print(f"prompt {prompt['prompt']:,} of {prompt['of']:,}: {plural(len(prompt['tokens']), 'token')}")
    for name, text in (("rendered", prompt["rendered"]), *_fields(prompt["fields"])):
        for position, line in enumerate(visible_lines(text, columns() - _LABEL)):
            label = f"{name if len(name) < _LABEL else name[: _LABEL - 2] + '…'}" if position == 0 else ""
            print(f"{label:{_LABEL}}{line}".rstrip())


def _fields(fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in fields.items():
        yield name, value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def packing_line(chat: ChatFacts, packing: Any) -> str:
    """Return how samples fill rows, in one line."""
    counts = packing.counts
    unit = "pair" if chat.kind == "pairs" else "sample"
    line = f"{plural(packing.rows, 'row')} of {packing.seq:,} tokens, {packing.padding:.1%} padding"
    if counts.dropped:
        line += f"; {plural(counts.dropped // chat.width, unit)} longer than that"
    return line
