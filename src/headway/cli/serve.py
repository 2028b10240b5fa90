"""`headway serve RUN|FOLDER`: serves a model by the OpenAI API.

The server is a process of its own (`headway.inference.server`); this module starts it and shows how it stands.
"""

import ipaddress
import json as jsonlib
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from headway.cli.model_process import ModelProcess, adapters_of, model_of, model_process
from headway.cli.options import Json, ModelSource, Runs
from headway.cli.text import plural
from headway.errors import INTERRUPTED, UsageError

NEEDED = ("fastapi", "uvicorn", "prometheus_client", "jinja2")


def serve(
    model: ModelSource,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port (0 = any free one).")] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on; beyond loopback only with a key.")] = "127.0.0.1",
    api_key_file: Annotated[Path | None, typer.Option(help="File with the key that clients must send.")] = None,
    served_name: Annotated[str | None, typer.Option(help="Name of the model for clients.")] = None,
    lora: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PATH", help="An adapter (LoRA) by name: PEFT's folder, or a run; repeatable."),
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(min=2, help="Tokens of a sequence at most.")] = None,
    memory_share: Annotated[
        float | None, typer.Option(min=0.01, max=1.0, help="Share of the free memory for the KV cache.")
    ] = None,
    max_sequences: Annotated[int, typer.Option(min=1, help="Sequences that run at the same time.")] = 256,
    max_batch_tokens: Annotated[int, typer.Option(min=2, help="Tokens of a pass.")] = 2048,
    max_waiting: Annotated[int, typer.Option(min=0, help="Requests that may wait; more are answered with 429.")] = 1024,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Serve a model by the OpenAI API."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise UsageError(f"headway serve needs {missing[0]}", hint="pip install 'headway[serve]'")
    if api_key_file is None and not _is_loopback(host):
        raise UsageError(
            f"{host} can be reached from other machines", hint="give --api-key-file, or leave --host at 127.0.0.1"
        )
    source, name = model_of(model, runs)
    request = {
        **source,
        "name": served_name or name,
        "adapters": adapters_of(lora or [], served_name or name, runs),
        "host": host,
        "port": port,
        "api_key_file": None if api_key_file is None else str(api_key_file),
        "device": device,
        "dtype": dtype,
        "max_waiting": max_waiting,
        "options": {
            "max_length": max_model_len,
            "memory_share": memory_share,
            "max_sequences": max_sequences,
            "max_batch_tokens": max_batch_tokens,
        },
    }
    # In a session of its own: Ctrl-C comes here, and ends it in order.
    with model_process("headway.inference.server", "server", request, start_new_session=True) as running:
        stops = (signal.SIGTERM, signal.SIGINT)
        before = {which: signal.signal(which, lambda *_: running.end()) for which in stops}
        try:
            unfinished = _follow(running, json)
        finally:
            for which, handler in before.items():
                signal.signal(which, handler)
    if running.ended > 1 and unfinished:
        raise typer.Exit(INTERRUPTED)


def _follow(running: ModelProcess, json: bool) -> int:
    """Show what the server says until it ends; return how many requests it did not finish."""
    live, unfinished = sys.stdout.isatty() and not json, 0
    for message in running.messages():
        unfinished = message.get("unfinished", unfinished)
        if json:
            print(jsonlib.dumps(message), flush=True)
        elif "listening" in message:
            print("\n".join(start_lines(message)), flush=True)
        elif "draining" in message or "stopped" in message:
            print(("\r\x1b[K" if live else "") + ending_line(message), flush=True)
        elif live:
            print(f"\r\x1b[K{status_line(message)}", end="", flush=True)
    return unfinished


def start_lines(facts: dict[str, Any]) -> list[str]:
    """Return what is served, and where."""
    cache = f"KV cache of {facts['cache_tokens']:,} tokens" if facts["cached"] else "no KV cache: slow"
    size = _count(facts["parameters"])
    lines = [f"{facts['model']}  {size} parameters, {facts['dtype']} on {facts['device']}, {cache}"]
    if facts["adapters"]:
        lines.append(f"adapters: {', '.join(facts['adapters'])}")
    if not facts["chat"]:
        lines.append("no chat template: completions only")
    return [*lines, f"listening on {facts['listening']}   (OpenAI API; /metrics, /health)"]


def status_line(status: dict[str, Any]) -> str:
    """Return how a server stands, in one line."""
    return (
        f"{status['running']} running  {status['waiting']} waiting  cache {status['cache']:.0%}  "
        f"hits {status['hits']:.0%}  {status['tokens_per_s']:,} tok/s"
    )


def ending_line(message: dict[str, Any]) -> str:
    """Return how a server ends, in one line."""
    if "draining" in message:
        open_requests = message["draining"]
        return f"draining {plural(open_requests, 'request')}: new ones are refused" if open_requests else "stopping"
    left = message.get("unfinished", 0)
    return f"stopped; {plural(left, 'request')} did not finish" if left else "stopped"


def _count(parameters: int) -> str:
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if parameters >= size:
            return f"{parameters / size:.1f}{letter}"
    return str(parameters)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
