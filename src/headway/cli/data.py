"""`headway data build | show | verify | mix | diff`: tokenized datasets and mixtures of them."""

import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from headway.cli.chat_view import chat_sample, packing_line, print_chat_sample, print_prompt, prompt_facts
from headway.cli.data_diff import diff_datasets
from headway.cli.data_mix import print_mix
from headway.cli.options import Json, Settings
from headway.cli.progress import terminal_bars
from headway.cli.text import columns, plural, print_json
from headway.cluster.engines.ray.encode import ray_encoders
from headway.cluster.engines.ray.engine import RayEngine
from headway.cluster.engines.settings import engine_settings
from headway.data import (
    BuildOptions,
    BuildProgress,
    Dataset,
    ReadOptions,
    build_dataset,
    open_dataset,
    verify,
)
from headway.data.build import RemoteEncoders
from headway.data.chat_build import ChatOptions, build_chat_dataset
from headway.data.manifest import DatasetManifest
from headway.data.own_source import own_sources
from headway.data.packing import Packing, compute_packing
from headway.data.prompts import PromptReader
from headway.data.tokenizer import limit_threads
from headway.errors import UsageError
from headway.recipe import Data
from headway.track.hub import hub_sources, local_model

app = typer.Typer(help="Build, inspect, verify, compare and mix datasets.", no_args_is_help=True)

DataPath = Annotated[Path, typer.Argument(metavar="PATH", help="Folder made by `headway data build`.")]
MANIFEST_FACTS = ("version", "tokens", "documents", "prompt_tokens", "vocab_size", "end_of_text", "dtype")
CHAT_FACTS = ("kind", "conversations", "trained_tokens")
BUILD_FACTS = ("sources", "source_bytes", "skipped", "engine", "changed")


@app.command("build")
def build_command(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to create.")],
    sources: Annotated[
        list[str],
        typer.Argument(metavar="SOURCES...", help="Files, quoted globs, hf:org/name, or package.module:name."),
    ],
    vocab_size: Annotated[int, typer.Option(help="Vocabulary size of the tokenizer to train.")] = 4096,
    tokenizer: Annotated[str | None, typer.Option(help="Use this tokenizer.json, or a folder with one.")] = None,
    end_of_text: Annotated[str | None, typer.Option(help="Its end-of-text token.")] = None,
    special_tokens: Annotated[bool, typer.Option(help="Parse special tokens in the text.")] = False,
    format: Annotated[
        Literal["auto", "text", "jsonl", "parquet"], typer.Option(help="File format; auto uses the file names.")
    ] = "auto",
    text_field: Annotated[str, typer.Option(help="JSONL field or Parquet column to train on.")] = "text",
    prompt_field: Annotated[str | None, typer.Option(help="Field or column before it, not trained on.")] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Glob of files to skip; repeatable.")] = None,
    shard_tokens: Annotated[int, typer.Option(help="Tokens per shard.")] = 100_000_000,
    tokenizer_engine: Annotated[
        Literal["auto", "tokenizers", "tiktoken"],
        typer.Option(help="Encoding library; auto uses tiktoken if it is faster and exact."),
    ] = "auto",
    engine: Annotated[
        Literal["local", "ray"],
        typer.Option("--engine", help="Encode on this machine or on a Ray cluster."),
    ] = "local",
    threads: Annotated[int | None, typer.Option(min=1, help="Encoder threads (default: all cores).")] = None,
    chat: Annotated[
        Path | None,
        typer.Option(metavar="MODEL", help="The sources are chats or preferences, for the model in this folder."),
    ] = None,
    prompts: Annotated[
        bool, typer.Option("--prompts", help="With --chat: the rows are prompts for reinforcement learning.")
    ] = False,
    template: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Chat template, if not the model's own.")
    ] = None,
    template_arguments: Annotated[
        str,
        typer.Option(metavar="JSON", help='Arguments of the chat template, for example {"enable_thinking": false}.'),
    ] = "{}",
    errors: Annotated[
        Literal["strict", "replace", "skip"], typer.Option(help="How to handle unreadable input.")
    ] = "strict",
    force: Annotated[bool, typer.Option("--force", help="Replace a dataset of another version.")] = False,
    as_json: Json = False,
) -> None:
    """Build a dataset from text, JSONL or Parquet files.

    JSONL may be plain, gzip or zstd. With --chat, rows are conversations, prompts with completions, or pairs of a
    chosen and a rejected answer, rendered by the chat template of a model's folder; with --prompts too, prompts with
    fields for the rewards of reinforcement learning.
    """
    if threads is not None:
        limit_threads(threads)
    reading = ReadOptions(format=format, text_field=text_field, prompt_field=prompt_field, errors=errors)
    settings: dict[str, Any] = {
        "force": force,
        "engine": tokenizer_engine,
        "on_skip": lambda sentence: print(f"skipped: {sentence}", file=sys.stderr),
        "on_note": lambda sentence: print(f"note: {sentence}", file=sys.stderr),
    }
    if chat is None and (prompts or template is not None or template_arguments != "{}"):
        raise UsageError(f"{'--prompts' if prompts else '--template'} is for chats", hint="add --chat MODEL")
    if chat is not None and (tokenizer is not None or engine != "local"):
        option = "--engine ray" if tokenizer is None else "--tokenizer"
        raise UsageError(f"{option} is for text; chats use the model's tokenizer on this machine", hint="leave it out")
    with own_sources(hub_sources(sources), out.absolute().parent) as files, _progress() as progress:
        if chat is not None:
            chats = ChatOptions(
                model=local_model(str(chat)),
                template=None if template is None else str(template),
                arguments=_arguments(template_arguments),
                exclude=tuple(exclude or ()),
                reading=reading,
                shard_tokens=shard_tokens,
                prompts=prompts,
            )
            built = build_chat_dataset(out, files, chats, processes=threads, progress=progress, **settings)
        else:
            options = BuildOptions(
                exclude=tuple(exclude or ()),
                reading=reading,
                tokenizer=None if tokenizer is None else local_model(tokenizer),
                end_of_text=end_of_text,
                special_tokens=special_tokens,
                vocab_size=vocab_size,
                shard_tokens=shard_tokens,
            )
            remote = _elsewhere(engine, tokenizer_engine)
            built = build_dataset(out, files, options, remote_encoders=remote, progress=progress, **settings)
    if as_json:
        print_json(_facts(built.path, built.manifest) | {key: getattr(built, key) for key in BUILD_FACTS})
        return
    _print_facts(built.path, built.manifest)
    print(f"sources    {plural(built.sources, 'file')}, {_size(built.source_bytes)}")
    print(f"encoder    {built.engine}")
    if built.skipped:
        print(f"skipped    {plural(built.skipped, 'input')} that could not be used")
    if not built.changed:
        print("unchanged  this version already exists")
    print(f"\nnext: {_next(built.manifest, out)}")


def _next(manifest: DatasetManifest, path: Path) -> str:
    """Return the command that trains on a dataset."""
    policy = ""
    if manifest.chat is not None and manifest.chat.kind == "prompts":
        policy = " --set objective.kind=grpo"
    return f"headway train RECIPE{policy} --set data.path={shlex.quote(str(path))}"


def _arguments(text: str) -> dict[str, Any]:
    """Return the template's arguments from JSON."""
    try:
        arguments = json.loads(text)
    except ValueError as error:
        raise UsageError(
            f"--template-arguments is not JSON: {error}", hint="""'{"enable_thinking": false}'"""
        ) from None
    if not isinstance(arguments, dict):
        raise UsageError("--template-arguments is not a JSON object", hint="""'{"enable_thinking": false}'""")
    return arguments


def _elsewhere(engine: str, tokenizer_engine: str) -> RemoteEncoders | None:
    """Return the encoder on a cluster; None for this machine."""
    if engine == "local":
        return None
    if tokenizer_engine == "tiktoken":
        raise UsageError("--engine ray encodes with tokenizers only", hint="leave out --tokenizer-engine")
    return ray_encoders(RayEngine(engine_settings("ray").site.get("address")))


@app.command("show")
def show_command(
    path: DataPath,
    samples: Annotated[int, typer.Option(min=0, help="Documents to preview.")] = 3,
    chat: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Print chat sample N with what is trained on in colour, or prompt N."),
    ] = None,
    seq: Annotated[int, typer.Option(min=1, help="Of chats, show how they fill rows of so many tokens.")] = 4096,
    as_json: Json = False,
) -> None:
    """Show counts and the beginnings of a few documents."""
    dataset = open_dataset(path)
    if chat is not None and dataset.kind == "prompts":
        prompt = prompt_facts(dataset, chat)
        print_json(prompt) if as_json else print_prompt(prompt)
        return
    if chat is not None:
        sample = chat_sample(dataset, chat)
        print_json(sample) if as_json else print_chat_sample(sample)
        return
    shown = list(_samples(dataset, samples))
    packing = None
    if dataset.kind not in ("text", "prompts"):
        packing = compute_packing(dataset, Data(path=str(path), seq=seq, holdout=0, over_length="drop"))
    if as_json:
        rows = {} if packing is None else {"packing": _packing_facts(packing)}
        print_json({**_facts(path, dataset.manifest), **rows, "samples": shown})
        return
    _print_facts(path, dataset.manifest)
    if packing is not None and dataset.manifest.chat is not None:
        print(f"packing    {packing_line(dataset.manifest.chat, packing)}")
    for sample in shown:
        print(f"\ndocument {sample['document']:,} ({plural(sample['tokens'], 'token')})")
        if sample["prompt"]:
            _print_text("prompt", sample["prompt"])
        _print_text("text" if sample["prompt"] else "", sample["text"])
        if "fields" in sample:
            _print_text("fields", json.dumps(sample["fields"], ensure_ascii=False))
    print(f"\nnext: {_next(dataset.manifest, path)}")


def _packing_facts(packing: Packing) -> dict[str, Any]:
    return {"seq": packing.seq, "rows": packing.rows, "padding": packing.padding, **asdict(packing.counts)}


@app.command("verify")
def verify_command(path: DataPath, as_json: Json = False) -> None:
    """Hash every file of a dataset and compare with its manifest."""
    manifest = verify(path).manifest
    if as_json:
        print_json({**_facts(path, manifest), "verified": True})
        return
    _print_facts(path, manifest)
    print(f"verified   {plural(len(manifest.all_files()), 'file')}, all match the manifest")
    print(f"\nnext: headway data show {path}")


@app.command("mix")
def mix_command(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe in TOML.")],
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Print the shares and epochs of a recipe's datasets."""
    print_mix(recipe, settings or [], as_json)


@app.command("diff")
def diff_command(
    first: Annotated[Path, typer.Argument(metavar="A", help="Folder made by `headway data build`.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    as_json: Json = False,
) -> None:
    """Compare the sources, documents and tokens of two datasets.

    Exits with 0 if they are the same version, 1 if not.
    """
    diff_datasets(first, second, as_json)


def _facts(path: Path, manifest: Any) -> dict[str, Any]:
    return {
        "path": str(path),
        **{key: getattr(manifest, key) for key in MANIFEST_FACTS},
        "shards": len(manifest.shards()),
        "bytes": sum(file.bytes for file in manifest.all_files()),
    } | ({} if manifest.chat is None else {"chat": {key: getattr(manifest.chat, key) for key in CHAT_FACTS}})


def _print_facts(path: Path, manifest: Any) -> None:
    facts = _facts(path, manifest)
    mean = facts["tokens"] / facts["documents"]
    print(f"dataset    {path}")
    print(f"version    {facts['version']}")
    print(f"tokens     {facts['tokens']:,} in {plural(facts['shards'], 'shard')}, {_size(facts['bytes'])}")
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


def _size(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:,.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


_STAGES = {"tokenizer": "training the tokenizer", "encode": "encoding"}


@contextmanager
def _progress() -> Iterator[Callable[[BuildProgress], None]]:
    """Yield what draws a bar on a terminal, else prints a line every few seconds; on stderr."""
    if not sys.stderr.isatty():
        yield _plain_progress()
        return
    with terminal_bars("{task.description:22}", "Bar", "Download", "TimeRemaining") as bars:
        tasks: dict[str, Any] = {}

        def draw(now: BuildProgress) -> None:
            if now.stage not in tasks:
                tasks[now.stage] = bars.add_task(_STAGES[now.stage], total=now.total_bytes)
            bars.update(tasks[now.stage], completed=now.done_bytes)

        yield draw


def _plain_progress(every_s: float = 5.0) -> Callable[[BuildProgress], None]:
    printed_s: dict[str, float] = {}

    def show(now: BuildProgress) -> None:
        due = now.stage not in printed_s or time.monotonic() - printed_s[now.stage] >= every_s
        if due:
            printed_s[now.stage] = time.monotonic()
            share = now.done_bytes / max(now.total_bytes, 1)
            print(f"{_STAGES[now.stage]}: {share:.0%} of {_size(now.total_bytes)}", file=sys.stderr)

    return show
