"""Questions and answers about Python's standard library, to tune a small model on.

    python examples/make_chats.py [OUT]

OUT/chats.jsonl has conversations, OUT/pairs.jsonl a plain and a wordy answer to each question, OUT/labels.jsonl one of
the two with a label, and OUT/chatml.jinja a chat template for models that have none. OUT/choices.toml is a task of
`headway eval`: which of four answers is the one? The answers are the first sentences of docstrings.
"""

import argparse
import contextlib
import importlib
import inspect
import json
import random
from pathlib import Path

MODULES = (
    "argparse", "bisect", "calendar", "collections", "copy", "csv", "datetime", "difflib", "fractions", "functools",
    "glob", "gzip", "hashlib", "heapq", "inspect", "io", "itertools", "json", "linecache", "logging", "math",
    "operator", "os", "os.path", "pathlib", "queue", "random", "re", "shutil", "socket", "statistics", "string",
    "struct", "subprocess", "tempfile", "textwrap", "threading", "time", "tokenize", "traceback", "types", "unittest",
    "uuid",
)  # fmt: skip
CHATML = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def answers() -> dict[str, str]:
    """Return the first sentence of the docstring of every documented function and class, by its name."""
    sentences = {}
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name, value in sorted(vars(module).items()):
            documented = inspect.isroutine(value) or inspect.isclass(value)
            if not name.startswith("_") and documented and (text := inspect.getdoc(value)):
                sentence = " ".join(text.split("\n\n")[0].split())
                if 20 <= len(sentence) <= 200:
                    sentences[f"{module_name}.{name}"] = sentence
    return sentences


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(
        description="Chats, preferences and a task of questions about Python's standard library."
    )
    parser.add_argument("out", metavar="OUT", nargs="?", default="data/chats", help="folder (%(default)s)")
    out = Path(parser.parse_args().out)
    out.mkdir(parents=True, exist_ok=True)
    sentences = answers()
    draw = random.Random(0)
    names = ("chats.jsonl", "pairs.jsonl", "labels.jsonl", "choices.jsonl")
    with contextlib.ExitStack() as files:
        chats, pairs, labels, choices = (files.enter_context((out / name).open("w")) for name in names)
        for number, (name, sentence) in enumerate(sentences.items()):
            question = {"role": "user", "content": f"What does {name} do?"}
            plain = {"role": "assistant", "content": sentence}
            wordy = {"role": "assistant", "content": f"That is a good question! {sentence} I hope that this helps."}
            print(json.dumps({"messages": [question, plain]}), file=chats)
            print(json.dumps({"prompt": [question], "chosen": [plain], "rejected": [wordy]}), file=pairs)
            good = number % 2 == 0
            answer = plain if good else wordy
            print(json.dumps({"prompt": [question], "completion": [answer], "label": good}), file=labels)
            if number % 9 == 0:
                others = draw.sample(sorted({*sentences.values()} - {sentence}), 3)
                row = {"question": question["content"], "choices": [sentence, *others], "answer": 0}
                print(json.dumps(row), file=choices)
    (out / "chatml.jinja").write_text(CHATML)
    (out / "choices.toml").write_text('data = "choices.jsonl"\nchat = true\n')
    print(f"{out}: {len(sentences)} conversations, as many pairs and labelled answers, and a chat template")


if __name__ == "__main__":
    main()
