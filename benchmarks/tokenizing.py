"""How fast text is encoded by the two libraries that Headway can use, and whether they agree.

    python benchmarks/tokenizing.py TEXT... [--json] [--tokenizer DIR] [--vocab-size 32000] [--megabytes 8]

Encodes the same documents with `tokenizers` and with tiktoken through Headway's own encoders, on one thread and on all,
and compares every id. Without --tokenizer one is trained on the text first. Repeats are interleaved; the median is
shown. The time to prove the two equal and to compare them on the probes is shown beside it: a build pays it once.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np

DOCUMENT_CHARS = 4000


def documents(files: list[str], megabytes: float) -> list[str]:
    """About so much text, in documents of some kilobytes; repeated where there is less."""
    whole = "".join(Path(file).read_text(encoding="utf-8", errors="replace") for file in files)
    wanted = int(megabytes * 1e6)
    whole = (whole * (wanted // max(len(whole), 1) + 1))[:wanted]
    return [whole[start : start + DOCUMENT_CHARS] for start in range(0, len(whole), DOCUMENT_CHARS)]


def measure(arguments: argparse.Namespace) -> dict[str, object]:
    """In a process of its own, since the number of native threads is fixed when it first encodes."""
    from headway.data import load_tokenizer, train_tokenizer
    from headway.data.tiktoken_encoder import fast_encoder

    texts = documents(arguments.texts, arguments.megabytes)
    if arguments.tokenizer:
        slow = load_tokenizer(arguments.tokenizer, end_of_text=0)
    else:
        slow = train_tokenizer(texts, arguments.vocab_size)
    start = time.perf_counter()
    fast = fast_encoder(slow)
    proof = time.perf_counter() - start
    seen: dict[str, list[tuple[float, float]]] = {"tokenizers": [], "tiktoken": []}
    made = {}
    for _ in range(arguments.repeats):
        for name, encode in (("tokenizers", slow.encode_batch), ("tiktoken", fast.encode_batch)):
            cpu, wall = time.process_time(), time.perf_counter()
            made[name] = encode(texts)
            seen[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    size = sum(len(text.encode()) for text in texts) / 1e6
    rates = {
        name: {
            "megabytes_per_cpu_s": size / statistics.median(cpu for cpu, _ in found),
            "megabytes_per_s": size / statistics.median(wall for _, wall in found),
        }
        for name, found in seen.items()
    }
    equal = all(np.array_equal(a, b) for a, b in zip(made["tokenizers"], made["tiktoken"], strict=True))
    return {"megabytes": size, "vocabulary": slow.vocab_size, "proof_s": proof, "equal": equal, "rates": rates}


def in_process(threads: int) -> dict[str, object]:
    """This benchmark's own arguments with so many threads."""
    environment = os.environ | {"RAYON_NUM_THREADS": str(threads)}
    command = [sys.executable, __file__, *sys.argv[1:], "--inside"]
    return json.loads(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout)


def print_table(results: dict[int, dict]) -> None:
    for threads, result in results.items():
        size, words = result["megabytes"], "the same ids" if result["equal"] else "DIFFERENT IDS"
        print(f"{size:.1f} MB, vocabulary {result['vocabulary']:,}, {threads} threads: {words}")
        slow, fast = result["rates"]["tokenizers"], result["rates"]["tiktoken"]
        for name, found in result["rates"].items():
            print(f"  {name:12}{found['megabytes_per_s']:8.2f} MB/s{found['megabytes_per_cpu_s']:8.2f} MB/CPU-s")
        wall, cpu = (fast[key] / slow[key] for key in ("megabytes_per_s", "megabytes_per_cpu_s"))
        print(f"  {'ratio':12}{wall:8.2f} x   {cpu:8.2f} x")
        print(f"  proof and probes {result['proof_s']:.2f} s, once a build")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("texts", nargs="+", help="text files")
    parser.add_argument("--tokenizer", help="a tokenizer.json, or a folder holding one")
    parser.add_argument("--vocab-size", type=int, default=32_000, help="size of the tokenizer to train")
    parser.add_argument("--megabytes", type=float, default=8.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        print(json.dumps(measure(arguments)))
        return
    results = {threads: in_process(threads) for threads in sorted({1, os.cpu_count() or 1})}
    if arguments.json:
        machine = {"cpus": os.cpu_count(), "machine": platform.machine()}
        versions = {name: version(name) for name in ("tokenizers", "tiktoken")}
        print(json.dumps({**machine, **versions, "threads": results}, indent=2))
    else:
        print_table(results)


if __name__ == "__main__":
    main()
