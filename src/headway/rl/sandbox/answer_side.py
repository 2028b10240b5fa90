"""Runs an answer's code in a sandbox, and its functions as the tests ask for them: a script, without Headway.

Nothing here is trusted: the code that it runs can change all of it, and write what it likes to stdout. What it cannot
do is to know what a test compares a value with.
"""

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any, BinaryIO

from headway.rl.sandbox.plain_data import MOST_DIGITS, decode, encode, to_line

PROGRAM = "/box/answer.py"
MOST_ITEMS = 100_000
"""Of an iterator, such as an endless generator."""


def main() -> None:
    """Run the code, tell which names it defines, and answer requests until there are no more."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    sys.set_int_max_str_digits(MOST_DIGITS)
    objects: list[Any] = []

    def refer(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    names: dict[str, Any] = {"__name__": "answer", "__builtins__": __builtins__}
    sys.modules["answer"] = type(sys)("answer")
    try:
        with Path(PROGRAM).open(encoding="utf-8", errors="surrogatepass") as file:
            exec(compile(file.read(), PROGRAM, "exec"), names)
    except BaseException as error:
        _reply(replies, {"failed": type(error).__name__})
        return
    defined = {
        name: refer(value)
        for name, value in names.items()
        if not name.startswith("_") and callable(value) and not isinstance(value, type(sys))
    }
    _reply(replies, {"names": defined})
    for line in requests:
        try:
            value = _perform(json.loads(line), objects)
            reply = to_line({"value": encode(value, refer)})
        except BaseException as error:
            kinds = [kind.__name__ for kind in type(error).__mro__]
            with contextlib.suppress(Exception):
                _reply(replies, {"raised": kinds, "text": str(error)[:1000]})
                continue
            reply = to_line({"raised": kinds, "text": ""})
        replies.write(reply)
        replies.flush()


def _perform(request: dict[str, Any], objects: list[Any]) -> Any:
    target = objects[request["ref"]]
    arguments = [decode(argument, objects.__getitem__) for argument in request["arguments"]]
    match request["do"]:
        case "call":
            named = {name: decode(value, objects.__getitem__) for name, value in request["named"].items()}
            return target(*arguments, **named)
        case "get":
            return getattr(target, *arguments)
        case "item":
            return target[arguments[0]]
        case "len":
            return len(target)
        case "text":
            return str(target)
        case "items":
            items = [item for item, _ in zip(target, range(MOST_ITEMS + 1), strict=False)]
            if len(items) > MOST_ITEMS:
                raise ValueError(f"more than {MOST_ITEMS} items")
            return items
    raise ValueError(request["do"])


def _reply(replies: BinaryIO, message: dict[str, Any]) -> None:
    replies.write(to_line(message))
    replies.flush()


if __name__ == "__main__":
    main()
