"""Countdown, make a number from others: problems for reinforcement learning, or with solutions to tune a model on.

    python examples/countdown.py data/countdown.jsonl --count 2000 --seed 0
    python examples/countdown.py data/solved.jsonl --count 2000 --seed 1 --solutions --without data/countdown.jsonl

Every problem has a solution, and occurs once in a file, in whichever order its numbers are given. Rows have `prompt`,
`numbers` and `target`; with --solutions, `messages` instead of the prompt. --model FOLDER also writes a small tokenizer
and a chat template, for a model that is trained from scratch.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from headway.data import train_tokenizer

MOST_TRIES = 200
"""Random problems in a row that are known already, after which there are no more."""
TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{{ message['content'] }}<|endoftext|>
{%- else -%}
{{ message['content'] }}
{% endif -%}
{%- endfor -%}
"""
STRENGTH = {"+": 1, "-": 1, "*": 2}
Problem = tuple[tuple[int, ...], int]
"""The numbers in ascending order, and the target."""


def problems(
    count: int, numbers: int, largest: int, seed: int, known: set[Problem], in_order: bool = False
) -> Iterator[tuple[list[int], int, str]]:
    """Yield (numbers, target, solution) of so many problems, fewer if there are no more; `known` ones are left out."""
    rng, known, tries = random.Random(seed), set(known), 0
    while count and tries < MOST_TRIES:
        given = [rng.randint(1, largest) for _ in range(numbers)]
        value, solution, _ = expression(given, rng)
        if not in_order:
            rng.shuffle(given)
        problem = tuple(sorted(given)), value
        if problem in known or not 1 <= value < 100:
            tries += 1
            continue
        known.add(problem)
        count, tries = count - 1, 0
        yield given, value, solution


def expression(numbers: Sequence[int], rng: random.Random) -> tuple[int, str, int]:
    """Return a random expression of the numbers in this order: its value, its text, and how strongly it binds."""
    if len(numbers) == 1:
        return numbers[0], str(numbers[0]), 3
    cut = rng.randint(1, len(numbers) - 1)
    left, left_text, left_binds = expression(numbers[:cut], rng)
    right, right_text, right_binds = expression(numbers[cut:], rng)
    sign = rng.choice("+-*")
    binds = STRENGTH[sign]
    if left_binds < binds:
        left_text = f"({left_text})"
    if right_binds < binds or (right_binds == binds and sign == "-"):
        right_text = f"({right_text})"
    value = {"+": left + right, "-": left - right, "*": left * right}[sign]
    return value, f"{left_text}{sign}{right_text}", binds


def row(numbers: list[int], target: int, solution: str | None, terse: bool = False) -> dict[str, object]:
    """Return a row: a prompt, or a conversation if there is a solution."""
    prompt = f"Make {target} from {', '.join(map(str, numbers))}."
    if terse:
        prompt = f"{','.join(map(str, numbers))}={target}"
    fields = {"numbers": numbers, "target": target}
    if solution is None:
        return {"prompt": prompt, **fields}
    answer = {"role": "assistant", "content": f"<answer>{solution}</answer>"}
    return {"messages": [{"role": "user", "content": prompt}, answer], **fields}


def write_model(folder: Path, texts: list[str], vocabulary: int) -> None:
    """Write what `headway data build --chat` needs of a model's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_bytes(train_tokenizer(texts, vocabulary).to_bytes())
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}\n')
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.jsonl", nargs="?", default=Path("data/countdown.jsonl"))
    parser.add_argument("--count", type=int, default=2000, help="problems (default: 2000)")
    parser.add_argument("--numbers", type=int, default=3, help="numbers of a problem (default: 3)")
    parser.add_argument("--largest", type=int, default=12, help="largest number (default: 12)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--solutions", action="store_true", help="conversations with a solution, to tune a model on")
    parser.add_argument("--in-order", action="store_true", help="give the numbers in the order of the solution")
    parser.add_argument("--guesses", action="store_true", help="as --solutions, with any expression of the numbers")
    parser.add_argument("--orders", type=int, default=1, help="write each problem in so many orders of its numbers")
    parser.add_argument("--terse", action="store_true", help="prompts such as 7,38=45, for a model that knows no words")
    parser.add_argument("--without", type=Path, action="append", default=[], help="leave out the problems of a file")
    parser.add_argument("--model", type=Path, help="folder to write a tokenizer and a chat template to")
    parser.add_argument("--vocabulary", type=int, default=320, help="of that tokenizer (default: 320)")
    options = parser.parse_args()
    known: set[Problem] = set()
    for file in options.without:
        lines = map(json.loads, file.read_text().splitlines())
        known |= {(tuple(sorted(line["numbers"])), line["target"]) for line in lines}
    asked = options.count, options.numbers, options.largest, options.seed, known, options.in_order
    made = list(problems(*asked))
    if len(made) < options.count:
        sys.exit(f"only {len(made)} problems of {options.numbers} numbers up to {options.largest}: raise --largest")
    terse, solved = options.terse, options.solutions or options.guesses
    rows, rng = list[dict[str, object]](), random.Random(options.seed)
    for numbers, target, solution in made:
        text = expression(numbers, rng)[1] if options.guesses else solution
        order = list(numbers)
        for _ in range(options.orders):
            rows.append(row(list(order), target, text if solved else None, terse))
            rng.shuffle(order)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("".join(json.dumps(entry) + "\n" for entry in rows))
    if options.model is not None:
        chats = [row(*problem) for problem in made]
        texts = ["\n".join(message["content"] for message in entry["messages"]) for entry in chats]  # type: ignore
        write_model(options.model, texts, options.vocabulary)
    print(f"{options.out}: {len(made)} problems" + (" with solutions" if options.solutions else ""))


if __name__ == "__main__":
    main()
