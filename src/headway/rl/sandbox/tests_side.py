"""Runs a row's tests in a sandbox of their own, against the answer's functions in another: a script, without Headway.

No code of the answer's runs here. Calls go to it as plain data over stdout, what they return comes back over stdin as
plain data, and all comparing is done here. Descriptor 3 takes the verdict: a line per test.
"""

import builtins
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headway.rl.sandbox.plain_data import MOST_BYTES, MOST_DIGITS, decode, encode, to_line

TESTS = "/box/tests.json"


class AnswerEnded(BaseException):
    """The answer's process has ended or sent no message: no `except Exception` of a test hides it."""


class AnswerRaised(Exception):
    """An exception of a class that Python does not have itself."""


class AnswerObject:
    """An object of the answer's: a function, a class, or what they return besides plain data.

    It is equal to itself alone and true, whatever its class says: neither is asked of the answer.
    """

    def __init__(self, link: "AnswerLink", number: int) -> None:
        self._link, self._number = link, number

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call it in the answer's process."""
        return self._link.ask("call", self._number, *arguments, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._link.ask("get", self._number, name)

    def __getitem__(self, key: Any) -> Any:
        return self._link.ask("item", self._number, key)

    def __len__(self) -> int:
        return int(self._link.ask("len", self._number))

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        items = self._link.ask("items", self._number)
        return iter(items if type(items) is list else [])

    def __str__(self) -> str:
        return str(self._link.ask("text", self._number))


class AnswerLink:
    """The pipes to the answer's process."""

    def __init__(self) -> None:
        self._replies, self._requests = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
        null = os.open("/dev/null", os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        self.ended = False
        self.asked = 0

    def read(self) -> dict[str, Any]:
        """Return the next message of the answer's process; raise AnswerEnded if there is none."""
        try:
            line = self._replies.readline(MOST_BYTES + 1)
            message = json.loads(line) if line.endswith(b"\n") else None
        except (ValueError, RecursionError, OSError):
            message = None
        if not isinstance(message, dict) or self.ended:
            self.ended = True
            raise AnswerEnded
        return message

    def ask(self, do: str, number: int, *arguments: Any, **named: Any) -> Any:
        """Have the answer's process do something with one of its objects; return or raise what comes of it."""
        self.asked += 1
        request = {
            "do": do,
            "ref": number,
            "arguments": [encode(argument, _number_of) for argument in arguments],
            "named": {name: encode(value, _number_of) for name, value in named.items()},
        }
        try:
            self._requests.write(to_line(request))
            self._requests.flush()
        except OSError:
            self.ended = True
            raise AnswerEnded from None
        reply = self.read()
        if "raised" in reply:
            raise _exception(reply["raised"], str(reply.get("text", "")))
        try:
            return decode(reply["value"], lambda number: AnswerObject(self, number))
        except (KeyError, ValueError, TypeError, RecursionError):
            self.ended = True
            raise AnswerEnded from None


def main() -> None:
    """Run the tests, and write of each whether it passed; or that the tests themselves cannot be run."""
    with Path(TESTS).open(encoding="utf-8") as file:
        tests = json.load(file)
    sys.set_int_max_str_digits(MOST_DIGITS)
    verdict = os.fdopen(3, "wb", buffering=0)
    link = AnswerLink()
    names: dict[str, Any] = {"__name__": "tests", "__builtins__": builtins}
    try:
        names |= _names(link, tests["entry_point"])
        exec(compile(tests["setup"], "setup", "exec"), names)
    except AnswerEnded:
        return
    except BaseException as error:
        verdict.write(to_line({"unusable": f"setup raises {type(error).__name__}: {error}"[:500]}))
        return
    for number, source in enumerate(tests["tests"]):
        try:
            test = compile(source, f"test {number}", "exec")
        except (SyntaxError, ValueError) as error:
            verdict.write(to_line({"unusable": f"test {number} is no Python: {error}"[:500]}))
            return
        verdict.write(to_line({"passed": _passes(link, test, names, tests["entry_point"])}))


def _names(link: AnswerLink, entry_point: str | None) -> dict[str, Any]:
    """Return the names that tests get from the answer: none that changes what they compare with, such as `abs`."""
    message = link.read()
    offered = message.get("names")
    if not isinstance(offered, dict):
        raise AnswerEnded
    taken = {
        name
        for name in offered
        if name == entry_point
        or (
            entry_point is None
            and not name.startswith("_")
            and not hasattr(builtins, name)
            and name not in sys.stdlib_module_names
        )
    }
    return {name: AnswerObject(link, offered[name]) for name in taken if type(offered[name]) is int}


def _passes(link: AnswerLink, test: Any, names: dict[str, Any], entry_point: str | None) -> bool:
    """Whether a test ends without an exception, and has asked anything of the answer at all."""
    asked, before = link.asked, set(names)
    try:
        exec(test, names)
        for name in sorted(set(names) - before):
            if name.startswith("test") and callable(names[name]):
                names[name]()
        if callable(check := names.get("check")) and "check" not in before and entry_point is not None:
            check(names[entry_point])
    except BaseException:
        return False
    return link.asked > asked and not link.ended


def _exception(kinds: Any, text: str) -> Exception:
    for name in kinds if isinstance(kinds, list) else []:
        kind = getattr(builtins, name, None) if isinstance(name, str) else None
        if isinstance(kind, type) and issubclass(kind, Exception):
            if kind is Exception:
                break
            try:
                return kind(text)
            except TypeError:  # UnicodeDecodeError takes five arguments
                break
    return AnswerRaised(text)


def _number_of(value: Any) -> int:
    if isinstance(value, AnswerObject):
        return value._number
    raise TypeError(f"a {type(value).__name__} cannot be passed to the answer's code")


if __name__ == "__main__":
    main()
