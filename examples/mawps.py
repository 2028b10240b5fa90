"""One-step arithmetic in words (MAWPS): prompts to learn from, and held-out questions to evaluate.

    python examples/mawps.py mawps_singleop.jsonl data/mawps-files --hold-out 161

Rows of the file have `input`, a question, and `target`, a number. The questions that are held out are drawn by --seed.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

TASK = """\
data = "held-out.jsonl"
metric = "math"
chat = true
max_tokens = {max_tokens}
"""


def split(rows: list[dict[str, Any]], hold_out: int, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows to learn from, and one of each of so many questions; no question is in both."""
    by_question = {row["question"]: row for row in rows}
    held = set(random.Random(seed).sample(sorted(by_question), hold_out))
    return [row for row in rows if row["question"] not in held], [by_question[question] for question in sorted(held)]


def main() -> None:
    """Write prompts.jsonl, held-out.jsonl and held-out.toml."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, metavar="MAWPS.jsonl")
    parser.add_argument("out", type=Path, metavar="FOLDER")
    parser.add_argument("--hold-out", type=int, default=161, help="questions (default: 161)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--max-tokens", type=int, default=200, help="of an answer to a held-out question (default: 200)"
    )
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.file.read_text().splitlines()]
    rows = [{"question": row["input"].strip(), "answer": row["target"]} for row in rows]
    learned, held = split(rows, options.hold_out, options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    prompts = [{"prompt": row["question"], "answer": row["answer"]} for row in learned]
    for name, entries in (("prompts.jsonl", prompts), ("held-out.jsonl", held)):
        (options.out / name).write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    (options.out / "held-out.toml").write_text(TASK.format(max_tokens=options.max_tokens))
    print(f"{options.out}: {len(learned)} prompts, {len(held)} held-out questions")


if __name__ == "__main__":
    main()
