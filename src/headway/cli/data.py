"""`headway data build | show | probe | verify | mix | diff`: datasets of text, images or video, and mixtures."""

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from headway.cli.data_build import (
    BuildRun,
    build_chats,
    build_clips,
    build_text,
    check_text_sources,
    print_result,
    template_arguments_of,
)
from headway.cli.data_diff import diff_datasets
from headway.cli.data_mix import print_mix
from headway.cli.data_progress import build_progress
from headway.cli.data_view import PREVIEW, dataset_facts, print_facts, show_chat_sample, show_media, show_text
from headway.cli.media_view import media_facts, print_media, print_probe, probe_facts
from headway.cli.options import Json, Settings
from headway.cli.text import plural, print_json
from headway.data import BuildOptions, BuildProgress, ReadOptions, verify
from headway.data.chat_build import ChatOptions
from headway.data.media import MediaFilters, MediaOptions, is_media, open_media, read_media_manifest
from headway.data.media.probe import plot_media, probe_media
from headway.data.tokenizer import limit_threads
from headway.errors import UsageError
from headway.track.hub import local_model

app = typer.Typer(help="Build, inspect, verify, compare and mix datasets.", no_args_is_help=True)

DataPath = Annotated[Path, typer.Argument(metavar="PATH", help="Folder made by `headway data build`.")]


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
    run = BuildRun(engine, threads, tokenizer_engine, force)
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
        build_clips(out, sources, media, run, as_json=as_json)
        return
    check_text_sources(sources, captions)
    if threads is not None:
        limit_threads(threads)
    reading = ReadOptions(format=format, text_field=text_field, prompt_field=prompt_field, errors=errors)
    if chat is None and (prompts or template is not None or template_arguments != "{}"):
        raise UsageError(f"{'--prompts' if prompts else '--template'} is for chats", hint="add --chat MODEL")
    if chat is not None and (tokenizer is not None or engine != "local"):
        option = "--engine ray" if tokenizer is None else "--tokenizer"
        raise UsageError(f"{option} is for text; chats use the model's tokenizer on this machine", hint="leave it out")
    if chat is not None:
        chats = ChatOptions(
            model=local_model(str(chat)),
            template=None if template is None else str(template),
            arguments=template_arguments_of(template_arguments),
            exclude=tuple(exclude or ()),
            reading=reading,
            shard_tokens=shard_tokens,
            prompts=prompts,
        )
        built = build_chats(out, sources, chats, run)
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
        built = build_text(out, sources, options, run)
    print_result(built, out, as_json=as_json)


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
        show_media(path, samples, sheet, as_json=as_json)
        return
    if sheet is not None:
        read_media_manifest(path)  # raises: it holds text, or nothing
    if chat is not None:
        show_chat_sample(path, chat, as_json=as_json)
    else:
        show_text(path, PREVIEW if samples is None else samples, seq, as_json=as_json)


@app.command("probe")
def probe_command(
    path: Annotated[
        Path, typer.Argument(metavar="FOLDER|FILE|DATASET", help="A folder of files, one file, or a dataset.")
    ],
    kind: Annotated[
        Literal["image", "video"] | None,
        typer.Option(help="Which files of a folder (default: what most of them are)."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="OUT.png", help="Also draw the distributions.")] = None,
    as_json: Json = False,
) -> None:
    """Show durations, sizes and frame rates of images or video."""
    with build_progress() as progress:
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
        print_json({**dataset_facts(path, manifest), "verified": True})
        return
    print_facts(path, manifest)
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
