"""How `headway data build` builds: text and chats on this machine or a Ray cluster, images and video in processes."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.cli.data_progress import build_progress
from headway.cli.data_view import dataset_facts, print_facts, source_size, train_command
from headway.cli.media_view import build_facts, kind_of, local_sources, print_built
from headway.cli.text import plural, print_json
from headway.cluster.engines.ray.encode import ray_encoders
from headway.cluster.engines.ray.engine import RayEngine
from headway.cluster.engines.ray.examine import ray_examiners
from headway.cluster.engines.settings import engine_settings
from headway.data import BuildOptions, BuildProgress, BuildResult, build_dataset
from headway.data.build import RemoteEncoders
from headway.data.chat_build import ChatOptions, build_chat_dataset
from headway.data.media import MediaOptions, build_media, in_processes
from headway.data.own_source import own_sources
from headway.errors import UsageError
from headway.track.hub import hub_sources

BUILD_FACTS = ("sources", "source_bytes", "skipped", "engine", "changed")


@dataclass(frozen=True)
class BuildRun:
    """Where a build runs and how: nothing that changes the dataset."""

    engine: str = "local"
    """local, or ray."""
    threads: int | None = None
    """Threads or processes; None for all cores."""
    tokenizer_engine: str = "auto"
    """The library that encodes."""
    force: bool = False
    """Replace a dataset of another version."""


def build_text(out: Path, sources: Sequence[str], options: BuildOptions, run: BuildRun) -> BuildResult:
    """Build a dataset of text."""
    with own_sources(hub_sources(sources), out.absolute().parent) as files, build_progress() as progress:
        remote = _remote_encoders(run)
        return build_dataset(out, files, options, remote_encoders=remote, progress=progress, **_settings(run))


def build_chats(out: Path, sources: Sequence[str], options: ChatOptions, run: BuildRun) -> BuildResult:
    """Build a dataset of chats, pairs or prompts."""
    with own_sources(hub_sources(sources), out.absolute().parent) as files, build_progress() as progress:
        return build_chat_dataset(out, files, options, processes=run.threads, progress=progress, **_settings(run))


def build_clips(out: Path, sources: list[str], options: MediaOptions, run: BuildRun, *, as_json: bool) -> None:
    """Build a dataset of images or video and print what it holds."""
    on_ray = run.engine == "ray"
    try:
        with local_sources(sources, options.kind, out) as files, build_progress() as progress:
            built = build_media(
                out,
                files,
                options,
                force=run.force,
                examine=ray_examiners(_ray()) if on_ray else in_processes(run.threads or os.cpu_count() or 1),
                progress=lambda now: progress(BuildProgress(*now)),
                on_skip=_print_skipped,
            )
    except KeyboardInterrupt:
        raise KeyboardInterrupt("the same command continues the build") from None
    print_json(build_facts(built)) if as_json else print_built(built, out)


def print_result(built: BuildResult, out: Path, *, as_json: bool) -> None:
    """Print what a build of text or chats made."""
    if as_json:
        print_json(dataset_facts(built.path, built.manifest) | {key: getattr(built, key) for key in BUILD_FACTS})
        return
    print_facts(built.path, built.manifest)
    print(f"sources    {plural(built.sources, 'file')}, {source_size(built.source_bytes)}")
    print(f"encoder    {built.engine}")
    if built.skipped:
        print(f"skipped    {plural(built.skipped, 'input')} that could not be used")
    if not built.changed:
        print("unchanged  this version already exists")
    print(f"\nnext: {train_command(built.manifest, out)}")


def check_text_sources(sources: Sequence[str], captions: Sequence[str] | None) -> None:
    """Raise UsageError for sources of images or video without --kind."""
    medium = kind_of(sources)
    if captions or medium is not None:
        what = "--captions is for images and video" if captions else f"{sources[0]} names no text"
        raise UsageError(what, hint=f"add --kind {medium or 'image or --kind video'}")


def template_arguments_of(text: str) -> dict[str, Any]:
    """Return the arguments of a chat template from JSON."""
    try:
        arguments = json.loads(text)
    except ValueError as error:
        raise UsageError(
            f"--template-arguments is not JSON: {error}", hint="""'{"enable_thinking": false}'"""
        ) from None
    if not isinstance(arguments, dict):
        raise UsageError("--template-arguments is not a JSON object", hint="""'{"enable_thinking": false}'""")
    return arguments


def _settings(run: BuildRun) -> dict[str, Any]:
    return {
        "force": run.force,
        "engine": run.tokenizer_engine,
        "on_skip": _print_skipped,
        "on_note": lambda sentence: print(f"note: {sentence}", file=sys.stderr),
    }


def _print_skipped(sentence: str) -> None:
    print(f"skipped: {sentence}", file=sys.stderr)


def _remote_encoders(run: BuildRun) -> RemoteEncoders | None:
    """Return the encoder on a cluster; None for this machine."""
    if run.engine == "local":
        return None
    if run.tokenizer_engine == "tiktoken":
        raise UsageError("--engine ray encodes with tokenizers only", hint="leave out --tokenizer-engine")
    return ray_encoders(_ray())


def _ray() -> RayEngine:
    cluster = RayEngine(engine_settings("ray").site.get("address"))
    cluster.probe()  # before a tokenizer is trained, which takes minutes
    return cluster
