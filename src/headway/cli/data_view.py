"""How `headway data` shows a dataset: its facts, a few documents or clips, and the command that trains on it."""

import json
import shlex
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headway.cli.chat_view import chat_sample, packing_line, print_chat_sample, print_prompt, prompt_facts
from headway.cli.media_view import media_facts, print_clip, print_media, sample_clips, spread_over
from headway.cli.text import columns, plural, print_json
from headway.data import Dataset, open_dataset
from headway.data.manifest import DatasetManifest
from headway.data.media import open_media, read_media_manifest
from headway.data.media.sheet import full_page, write_sheet
from headway.data.packing import Packing, compute_packing
from headway.data.prompts import PromptReader
from headway.errors import UsageError
from headway.recipe import Data

PREVIEW = 3
"""Documents or clips that `show` prints."""
MANIFEST_FACTS = ("version", "tokens", "documents", "prompt_tokens", "vocab_size", "end_of_text", "dtype")
CHAT_FACTS = ("kind", "conversations", "trained_tokens")


def show_text(path: Path, samples: int, seq: int, *, as_json: bool) -> None:
    """Print the facts of a dataset of text, of chats how they fill rows of `seq` tokens, and a few documents."""
    dataset = open_dataset(path)
    shown = list(_samples(dataset, samples))
    packing = None
    if dataset.kind not in ("text", "prompts"):
        packing = compute_packing(dataset, Data(path=str(path), seq=seq, holdout=0, over_length="drop"))
    if as_json:
        rows = {} if packing is None else {"packing": _packing_facts(packing)}
        print_json({**dataset_facts(path, dataset.manifest), **rows, "samples": shown})
        return
    print_facts(path, dataset.manifest)
    if packing is not None and dataset.manifest.chat is not None:
        print(f"packing    {packing_line(dataset.manifest.chat, packing)}")
    for sample in shown:
        print(f"\ndocument {sample['document']:,} ({plural(sample['tokens'], 'token')})")
        if sample["prompt"]:
            _print_text("prompt", sample["prompt"])
        _print_text("text" if sample["prompt"] else "", sample["text"])
        if "fields" in sample:
            _print_text("fields", json.dumps(sample["fields"], ensure_ascii=False))
    print(f"\nnext: {train_command(dataset.manifest, path)}")


def show_chat_sample(path: Path, number: int, *, as_json: bool) -> None:
    """Print a chat with what is trained on in colour, or a prompt."""
    dataset = open_dataset(path)
    if dataset.kind == "prompts":
        prompt = prompt_facts(dataset, number)
        print_json(prompt) if as_json else print_prompt(prompt)
        return
    sample = chat_sample(dataset, number)
    print_json(sample) if as_json else print_chat_sample(sample)


def show_media(path: Path, samples: int | None, sheet: Path | None, *, as_json: bool) -> None:
    """Print the facts of a dataset of images or video and a few clips; write a contact sheet of them."""
    shown = sample_clips(path, PREVIEW if samples is None else samples)
    manifest = read_media_manifest(path)
    if sheet is not None:
        if not sheet.absolute().parent.is_dir():
            raise UsageError(f"{sheet.parent} is not a folder", hint="make it, or name another file")
        most = full_page(manifest.kind) if samples is None else samples
        write_sheet(open_media(path), spread_over(manifest.clips, most), sheet)
    if as_json:
        print_json({**media_facts(path, manifest), "samples": shown, "sheet": None if sheet is None else str(sheet)})
        return
    print_media(path, manifest)
    for clip in shown:
        print_clip(clip, manifest.kind)
    if sheet is not None:
        print(f"\ncontact sheet: {sheet}")
    print(f"\nnext: headway data probe {shlex.quote(str(path))}")


def _packing_facts(packing: Packing) -> dict[str, Any]:
    return {"seq": packing.seq, "rows": packing.rows, "padding": packing.padding, **asdict(packing.counts)}


def dataset_facts(path: Path, manifest: DatasetManifest) -> dict[str, Any]:
    """Return the facts of a dataset of text that the verbs print."""
    return {
        "path": str(path),
        **{key: getattr(manifest, key) for key in MANIFEST_FACTS},
        "shards": len(manifest.shards()),
        "bytes": sum(file.bytes for file in manifest.all_files()),
    } | ({} if manifest.chat is None else {"chat": {key: getattr(manifest.chat, key) for key in CHAT_FACTS}})


def print_facts(path: Path, manifest: DatasetManifest) -> None:
    """Print the facts of a dataset of text."""
    facts = dataset_facts(path, manifest)
    mean = facts["tokens"] / facts["documents"]
    print(f"dataset    {path}")
    print(f"version    {facts['version']}")
    print(f"tokens     {facts['tokens']:,} in {plural(facts['shards'], 'shard')}, {source_size(facts['bytes'])}")
    print(f"documents  {facts['documents']:,}, {mean:,.0f} tokens each on average")
    chat = facts.get("chat")
    if chat and chat["kind"] == "prompts":
        print("kind       prompts for reinforcement learning")
    elif chat:
        print(
            f"chat       {chat['kind']}: {plural(chat['conversations'], 'conversation')}, "
            f"{chat['trained_tokens']:,} tokens of answers"
        )
    elif facts["prompt_tokens"]:
        print(f"prompts    {facts['prompt_tokens']:,} tokens, not trained on")
    print(f"vocabulary {facts['vocab_size']:,} ({facts['dtype']}), end of text is {facts['end_of_text']}")


def _samples(dataset: Dataset, count: int) -> Iterator[dict[str, Any]]:
    """Yield the beginnings of documents spread evenly over the dataset."""
    total = dataset.manifest.documents
    tokenizer = dataset.tokenizer()
    prompts = PromptReader(dataset) if dataset.kind == "prompts" else None
    for number in sorted({index * total // max(count, 1) for index in range(count)}):
        document = dataset.document(number)
        body = document.ids[document.prompt : document.prompt + 64]
        yield {
            "document": number,
            "tokens": len(document.ids),
            "prompt_tokens": document.prompt,
            "prompt": tokenizer.decode(document.ids[: min(document.prompt, 64)]),
            "text": tokenizer.decode(body),
            **({} if prompts is None else {"fields": prompts.prompt(number).fields}),
        }


def _print_text(label: str, text: str) -> None:
    """Print a few lines of a document, indented, as wide as the terminal at most, control characters visible."""
    lines = text.splitlines()[:6]
    for index, line in enumerate(lines):
        plain = "".join(c if c.isprintable() else "\\t" if c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in line)
        mark = f"{label}: " if label and index == 0 else ""
        print(f"  {mark}{plain}"[: columns()].rstrip())


def source_size(count: float) -> str:
    """Return bytes with one decimal: 812 bytes, 1.2 MB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:,.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


def train_command(manifest: DatasetManifest, path: Path) -> str:
    """Return the command that trains on a dataset."""
    objective = ""
    if manifest.chat is not None:
        usual = {"chat": "sft", "pairs": "dpo", "labelled": "kto", "prompts": "grpo"}
        objective = f" --set objective.kind={usual[manifest.chat.kind]}"
    return f"headway train RECIPE{objective} --set data.path={shlex.quote(str(path))}"
