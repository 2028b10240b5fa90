"""How fast chats are rendered, encoded and packed, beside datasets.map and TRL, and whether all ids are equal.

    python benchmarks/chat_data.py MODEL TEXT... [--chats 20000] [--seq 4096] [--trl PYTHON] [--template FILE] [--json]

MODEL is a folder with a tokenizer and a chat template; chats of one or two turns are cut from the text. `--trl` names a
Python that has trl and datasets, which prepares the same chats as SFTTrainer does (assistant_only_loss, packing, one
process per core), with `--template`: the model's template with {% generation %} around the answers. Every sample's ids
and trained tokens are then compared. Wall time and CPU seconds of both are shown: other work on the machine slows both.
"""

import argparse
import hashlib
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path


def write_chats(path: Path, texts: list[str], count: int) -> None:
    """Write so many short chats, cut from the text at random places."""
    words = [word for text in texts for word in Path(text).read_text(errors="replace").split()]
    rng = random.Random(0)

    def said(least: int, most: int) -> str:
        size = rng.randint(least, most)
        start = rng.randrange(len(words) - size)
        return " ".join(words[start : start + size])

    with path.open("w") as file:
        for _ in range(count):
            messages = [{"role": "system", "content": "You answer briefly."}] if rng.random() < 0.3 else []
            for _ in range(rng.choice([1, 1, 1, 2])):
                messages.append({"role": "user", "content": said(5, 40)})
                messages.append({"role": "assistant", "content": said(10, 80)})
            file.write(json.dumps({"messages": messages}) + "\n")


def cpu_s() -> float:
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    )


def fingerprint(ids: list[int], trained: list[bool]) -> str:
    return hashlib.sha256(json.dumps([ids, [int(flag) for flag in trained]]).encode()).hexdigest()


def ours(arguments: argparse.Namespace, chats: Path, folder: Path) -> tuple[dict[str, object], Counter[str]]:
    import numpy as np

    from headway.data.chat_build import ChatOptions, build_chat_dataset
    from headway.data.packing import pack_dataset
    from headway.data.shards import open_dataset
    from headway.recipe.data import Data

    start, cpu = time.perf_counter(), cpu_s()
    built = build_chat_dataset(folder / "out", [chats], ChatOptions(arguments.model))
    dataset = open_dataset(built.path)
    packing = pack_dataset(dataset, Data(path=str(built.path), seq=arguments.seq, holdout=0))
    facts = {
        "wall_s": time.perf_counter() - start,
        "cpu_s": cpu_s() - cpu,
        "rows": packing.rows,
        "padding": packing.padding,
        "encoder": built.engine,
    }
    prints = Counter[str]()
    for shard, documents, samples, spans in zip(
        dataset.tokens, dataset.documents, dataset.samples, dataset.spans, strict=True
    ):
        begin = first = 0
        for end, last in zip(documents[:, 0].tolist(), samples["spans_end"].tolist(), strict=True):
            flags = np.zeros(end - begin, dtype=bool)
            for low, high, _, trained in spans[first:last].tolist():
                flags[low:high] = trained
            prints[fingerprint(shard[begin:end].tolist(), flags.tolist())] += 1
            begin, first = end, last
    return facts, prints


TRL = """
import json, resource, sys, time, types
from datasets import load_dataset
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer
chats, model, template, folder, seq, processes = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(model)
config = SFTConfig(
    output_dir=folder, packing=True, max_length=int(seq), assistant_only_loss=True, dataset_num_proc=int(processes),
    bf16=False, use_cpu=True, report_to=[],
)
start = time.perf_counter()
dataset = load_dataset("json", data_files=chats, split="train", cache_dir=folder)
trainer = types.SimpleNamespace(
    chat_template=open(template).read(), completion_only_loss=False, _tokenizer=tokenizer, _is_vlm=False
)
packed = SFTTrainer._prepare_dataset(trainer, dataset, tokenizer, config, True, None, "train")
wall = time.perf_counter() - start
usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
print(json.dumps({"wall_s": wall, "cpu_s": sum(u.ru_utime + u.ru_stime for u in usage), "rows": len(packed)}))
for row in packed:
    start = 0
    for length in row["seq_lengths"]:
        end = start + length
        print(json.dumps([row["input_ids"][start:end], [label != -100 for label in row["labels"][start:end]]]))
        start = end
"""


def theirs(arguments: argparse.Namespace, chats: Path, folder: Path) -> tuple[dict[str, object], Counter[str]]:
    command = [
        arguments.trl, "-c", TRL, str(chats), arguments.model, arguments.template, str(folder / "trl"),
        str(arguments.seq), str(os.cpu_count()),
    ]  # fmt: skip
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    first, *samples = done.stdout.splitlines()
    return json.loads(first), Counter(fingerprint(*json.loads(sample)) for sample in samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("texts", nargs="+", metavar="TEXT")
    parser.add_argument("--chats", type=int, default=20_000)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--trl", metavar="PYTHON")
    parser.add_argument("--template", help="the model's template with {%% generation %%}")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_chats(folder / "chats.jsonl", arguments.texts, arguments.chats)
        facts: dict[str, object] = {"chats": arguments.chats, "cores": os.cpu_count()}
        facts["headway"], prints = ours(arguments, folder / "chats.jsonl", folder)
        if arguments.trl:
            facts["trl"], others = theirs(arguments, folder / "chats.jsonl", folder)
            facts["equal_samples"] = (prints & others).total()
    print(json.dumps(facts, indent=1) if arguments.json else _table(facts))


def _table(facts: dict[str, object]) -> str:
    lines = [f"{facts['chats']:,} chats on {facts['cores']} cores"]
    for name in ("headway", "trl"):
        side = facts.get(name)
        if isinstance(side, dict):
            rate = float(str(facts["chats"])) / side["wall_s"]
            lines.append(f"{name:8} {rate:9,.0f} chats/s  {side['wall_s']:8.1f} s  {side['cpu_s']:8.1f} CPU-s")
    if "equal_samples" in facts:
        lines.append(f"samples with equal ids and trained tokens: {facts['equal_samples']:,}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
