"""`headway data build | show | probe | verify | mix | diff`: datasets of text, images or video, and mixtures."""

import json
import os
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
from headway.cli.media_view import (
    build_facts,
    kind_of,
    local_sources,
    media_facts,
    print_built,
    print_clip,
    print_media,
    print_probe,
    probe_facts,
    sample_clips,
    spread_over,
)
from headway.cli.options import Json, Settings
from headway.cli.progress import terminal_bars
from headway.cli.text import columns, plural, print_json
from headway.cluster.engines.ray.encode import ray_encoders
from headway.cluster.engines.ray.engine import RayEngine
from headway.cluster.engines.ray.examine import ray_examiners
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
from headway.data.media import (
    MediaFilters,
    MediaOptions,
    build_media,
    in_processes,
    is_media,
    open_media,
    read_media_manifest,
)
from headway.data.media.probe import plot_media, probe_media
from headway.data.media.sheet import full_page, write_sheet
from headway.data.own_source import own_sources
from headway.data.packing import Packing, compute_packing
from headway.data.prompts import PromptReader
from headway.data.tokenizer import limit_threads
from headway.errors import UsageError
from headway.recipe import Data
from headway.track.hub import hub_sources, local_model

app = typer.Typer(help="Build, inspect, verify, compare and mix datasets.", no_args_is_help=True)

DataPath = Annotated[Path, typer.Argument(metavar="PATH", help="Folder made by `headway data build`.")]
PREVIEW = 3
"""Documents or clips that `show` prints."""
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
    kind: Annotated[
        Literal["text", "image", "video"], typer.Option(help="What the sources are: text, or files of images or video.")
    ] = "text",
    captions: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="Media: JSONL or Parquet of file, caption, label, source; repeatable."),
    ] = None,
    shard_mb: Annotated[int, typer.Option(min=1, help="Media: megabytes per shard.")] = 1024,
    min_sharpness: Annotated[
        float | None, typer.Option(metavar="X", help="Media: leave out what is blurred (variance of the Laplacian).")
    ] = None,
    min_motion: Annotated[
        float | None, typer.Option(metavar="X", help="Media: leave out still videos (mean change of gray levels).")
    ] = None,
    near_duplicates: Annotated[
        int | None,
        typer.Option(min=0, max=16, metavar="BITS", help="Media: leave out look-alikes (hashes within BITS)."),
    ] = None,
    scorer: Annotated[
        str | None, typer.Option(metavar="MODULE:NAME", help="Media: your function from a path to a score.")
    ] = None,
    min_score: Annotated[float, typer.Option(metavar="X", help="Media: least score.")] = 0.0,
    force: Annotated[bool, typer.Option("--force", help="Replace a dataset of another version.")] = False,
    as_json: Json = False,
) -> None:
    """Build a dataset from text, JSONL, Parquet, images or video.

    JSONL may be plain, gzip or zstd. With --chat, rows are conversations, prompts with completions, or pairs of a
    chosen and a rejected answer, rendered by the chat template of a model's folder; with --prompts too, prompts with
    fields for the rewards of reinforcement learning.
    """
    if kind != "text":
        filters = MediaFilters(min_sharpness, min_motion, near_duplicates, scorer, min_score)
        media = MediaOptions(
            kind=kind,
            captions=tuple(captions or ()),
            exclude=tuple(exclude or ()),
            strict=errors == "strict",
            filters=filters,
            shard_bytes=shard_mb * 1_000_000,
        )
        _build_media(out, sources, media, engine=engine, processes=threads, force=force, as_json=as_json)
        return
    medium = kind_of(sources)
    if captions or medium is not None:
        what = "--captions is for images and video" if captions else f"{sources[0]} names no text"
        raise UsageError(what, hint=f"add --kind {medium or 'image or --kind video'}")
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


def _build_media(
    out: Path,
    sources: list[str],
    options: MediaOptions,
    *,
    engine: str,
    processes: int | None,
    force: bool,
    as_json: bool,
) -> None:
    """Build a dataset of images or video and print what it holds."""
    with local_sources(sources, options.kind, out) as files, _progress() as progress:
        built = build_media(
            out,
            files,
            options,
            force=force,
            examine=ray_examiners(_ray()) if engine == "ray" else in_processes(processes or os.cpu_count() or 1),
            progress=lambda now: progress(BuildProgress(*now)),
            on_skip=lambda sentence: print(f"skipped: {sentence}", file=sys.stderr),
        )
    print_json(build_facts(built)) if as_json else print_built(built, out)


def _next(manifest: DatasetManifest, path: Path) -> str:
    """Return the command that trains on a dataset."""
    objective = ""
    if manifest.chat is not None:
        usual = {"chat": "sft", "pairs": "dpo", "labelled": "kto", "prompts": "grpo"}
        objective = f" --set objective.kind={usual[manifest.chat.kind]}"
    return f"headway train RECIPE{objective} --set data.path={shlex.quote(str(path))}"


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
    return ray_encoders(_ray())


def _ray() -> RayEngine:
    cluster = RayEngine(engine_settings("ray").site.get("address"))
    cluster.probe()  # before a tokenizer is trained, which takes minutes
    return cluster


@app.command("show")
def show_command(
    path: DataPath,
    samples: Annotated[
        int | None, typer.Option(min=0, help="Documents or clips to preview (default: 3; of a sheet, a full page).")
    ] = None,
    chat: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Print chat sample N with what is trained on in colour, or prompt N."),
    ] = None,
    seq: Annotated[int, typer.Option(min=1, help="Of chats, show how they fill rows of so many tokens.")] = 4096,
    sheet: Annotated[
        Path | None,
        typer.Option(metavar="OUT.png", help="Of images and video, write a contact sheet."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show counts and the beginnings of a few documents, or a few clips."""
    if is_media(path):
        _show_media(path, samples, sheet, as_json)
        return
    if sheet is not None:
        read_media_manifest(path)  # raises: it holds text, or nothing
    dataset = open_dataset(path)
    if chat is not None and dataset.kind == "prompts":
        prompt = prompt_facts(dataset, chat)
        print_json(prompt) if as_json else print_prompt(prompt)
        return
    if chat is not None:
        sample = chat_sample(dataset, chat)
        print_json(sample) if as_json else print_chat_sample(sample)
        return
    shown = list(_samples(dataset, PREVIEW if samples is None else samples))
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


def _show_media(path: Path, samples: int | None, sheet: Path | None, as_json: bool) -> None:
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
        print_clip(clip)
    if sheet is not None:
        print(f"\ncontact sheet: {sheet}")
    print(f"\nnext: headway data probe {shlex.quote(str(path))}")


@app.command("probe")
def probe_command(
    path: Annotated[
        Path, typer.Argument(metavar="FOLDER|FILE|DATASET", help="A folder of files, one file, or a dataset.")
    ],
    kind: Annotated[
        Literal["image", "video"] | None,
        typer.Option(help="Which files of a folder (default: videos if there are any)."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="OUT.png", help="Also draw the distributions.")] = None,
    as_json: Json = False,
) -> None:
    """Show durations, sizes and frame rates of images or video."""
    with _progress() as progress:
        facts = probe_media(path, kind, lambda done, total: progress(BuildProgress("probe", done, total)))
    if plot is not None:
        plot_media(facts, plot)
    if as_json:
        print_json(probe_facts(facts))
        return
    print_probe(facts)
    if plot is not None:
        print(f"\nplot: {plot}")
    if not is_media(path):
        print(f"\nnext: headway data build OUT {shlex.quote(str(path))} --kind {facts.kind}")


def _packing_facts(packing: Packing) -> dict[str, Any]:
    return {"seq": packing.seq, "rows": packing.rows, "padding": packing.padding, **asdict(packing.counts)}


@app.command("verify")
def verify_command(path: DataPath, as_json: Json = False) -> None:
    """Hash every file of a dataset and compare with its manifest."""
    if is_media(path):
        media = open_media(path, verify="full").manifest
        if as_json:
            print_json({**media_facts(path, media), "verified": True})
            return
        print_media(path, media)
        print(f"verified   {plural(len(media.files), 'file')}, all match the manifest")
        print(f"\nnext: headway data show {path}")
        return
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


_STAGES = {
    "tokenizer": "training the tokenizer",
    "encode": "encoding",
    "decode": "decoding",
    "write": "writing",
    "probe": "reading headers",
}


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
    """Return what prints a line every few seconds, and none twice."""
    printed: dict[str, tuple[float, str]] = {}

    def show(now: BuildProgress) -> None:
        share = now.done_bytes / max(now.total_bytes, 1)
        total = plural(now.total_bytes, "file") if now.stage == "probe" else _size(now.total_bytes)
        line = f"{_STAGES[now.stage]}: {share:.0%} of {total}"
        at_s, last = printed.get(now.stage, (float("-inf"), ""))
        if line != last and time.monotonic() - at_s >= every_s:
            printed[now.stage] = time.monotonic(), line
            print(line, file=sys.stderr)

    return show
