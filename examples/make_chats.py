"""Questions and answers about Python's standard library, to tune a small model on.

    python examples/make_chats.py OUT

OUT/chats.jsonl has conversations, OUT/pairs.jsonl a plain and a wordy answer to each question, and OUT/chatml.jinja a
chat template for models that have none. The answers are the first sentences of docstrings.
"""

import importlib
import inspect
import json
import sys
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
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "data/chats")
    out.mkdir(parents=True, exist_ok=True)
    sentences = answers()
    with (out / "chats.jsonl").open("w") as chats, (out / "pairs.jsonl").open("w") as pairs:
        for name, sentence in sentences.items():
            question = {"role": "user", "content": f"What does {name} do?"}
            plain = {"role": "assistant", "content": sentence}
            wordy = {"role": "assistant", "content": f"That is a good question! {sentence} I hope that this helps."}
            print(json.dumps({"messages": [question, plain]}), file=chats)
            print(json.dumps({"prompt": [question], "chosen": [plain], "rejected": [wordy]}), file=pairs)
    (out / "chatml.jinja").write_text(CHATML)
    print(f"{out}: {len(sentences)} conversations, as many pairs of answers, and a chat template")


if __name__ == "__main__":
    main()
