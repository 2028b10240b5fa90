"""A process that scores answers, or is an environment: `python -m headway.rl.scorer_process PARENT`.

JSON lines on stdin and stdout. The first names the rewards or the environment; the answer is `ready`, or `refused` with
a sentence. Each further line is an answer and the terms to score it by, or a turn; the answer is one line per term,
with its value or its error, as soon as it is known. What rewards print goes to stderr, up to a limit, and never into
the protocol. It does not import torch, and imports only what is named.
"""

import ctypes
import importlib
import inspect
import io
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from headway.errors import HeadwayError, RecipeError
from headway.rl.environments import Turn, load_environment
from headway.rl.environments.checked_reply import checked_reply
from headway.rl.rewards import Answer, load_reward
from headway.rl.rewards.value import checked
from headway.track import user_log

PR_SET_PDEATHSIG = 1
MOST_PRINTED = 1 << 16
"""Characters of a process's rewards that reach the log; what they print afterwards is dropped."""
MOST_ERROR = 8000
"""Characters of a traceback that are kept: its beginning and its end."""

SIGNATURE = "def reward(answer, **args) -> float"


class LimitedText(io.TextIOBase):
    """A text stream that passes on so many characters, and drops what comes after them."""

    def __init__(self, stream: TextIO, most: int = MOST_PRINTED) -> None:
        self._stream = stream
        self._left = most

    def writable(self) -> bool:
        """As of any stream that is written to."""
        return True

    def write(self, text: str) -> int:
        """Write as much as is left of the limit."""
        if self._left > 0:
            with suppress(OSError, ValueError):
                self._stream.write(text[: self._left])
                if len(text) > self._left:
                    self._stream.write("\n[what rewards print from here on is dropped]\n")
                self._stream.flush()
        self._left -= len(text)
        return len(text)


def main() -> None:
    """Score answers until the parent closes the pipe."""
    _end_with(int(sys.argv[1]))
    requests, replies = _separate_protocol()

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message).encode() + b"\n")
        replies.flush()

    start = json.loads(requests.readline() or b"null")
    if start is None:
        return
    sys.path[:] = start["path"]
    if (log := start.get("log")) is not None:
        user_log.open_log(Path(log["run"]), log["attempt"], f"{log['process']}-score-{os.getpid()}")
    try:
        run = _calls(start)
    except HeadwayError as error:
        reply({"refused": error.message, "hint": error.hint})
        return
    reply({"ready": True})
    for line in requests:
        fields = json.loads(line)
        user_log.set_step(fields.pop("log_step", 0))
        for message in run(fields.pop("terms"), fields):
            reply(message)


def _calls(start: dict[str, Any]) -> Callable[[Sequence[int], dict[str, Any]], Iterator[dict[str, Any]]]:
    """Return what runs the calls of a process; raise HeadwayError if it cannot be imported."""
    if "environment" in start:
        environment = load_environment(**start["environment"])
        return lambda terms, fields: (result(term, partial(take_turn, environment, fields)) for term in terms)
    rewards = [_ready_reward(term["name"], term["args"]) for term in start["rewards"]]
    return lambda terms, fields: score(rewards, terms, Answer(**fields))


def _ready_reward(name: str, args: dict[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return a reward that will take its arguments, and that this machine can run; raise HeadwayError otherwise."""
    reward = load_reward(name)
    try:
        inspect.signature(reward).bind(None, **args)
    except TypeError as error:
        raise RecipeError(f"rl.rewards: {name} cannot be called with its args: {error}", hint=SIGNATURE) from None
    except ValueError:  # native code may have no signature
        pass
    if name == "code":
        from headway.rl.sandbox import check_sandbox  # only this reward needs it

        check_sandbox()
    return reward, args


def score(
    rewards: Sequence[tuple[Callable[..., Any], dict[str, Any]]], terms: Sequence[int], answer: Answer
) -> Iterator[dict[str, Any]]:
    """Yield the value or the error of each term."""
    for term in terms:
        reward, args = rewards[term]
        yield result(term, partial(_value, reward, answer, args))


def _value(reward: Callable[..., Any], answer: Answer, args: dict[str, Any]) -> float:
    return checked(reward(answer, **args))


def take_turn(environment: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Return an environment's reply to a turn, as JSON."""
    return checked_reply(environment.reply(Turn(**fields)))


def result(term: int, call: Callable[[], Any]) -> dict[str, Any]:
    """Return the value or the error of one call."""
    try:
        return {"term": term, "value": call()}
    except HeadwayError as error:
        return {"term": term, "error": error.message if error.hint is None else f"{error.message}; {error.hint}"}
    except BaseException as error:  # SystemExit of a library ends no scoring either
        return {"term": term, "error": _shorten(_trace(error))}


def _trace(error: BaseException) -> str:
    """Return a traceback from the user's code on."""
    inner = error.__traceback__
    while inner is not None and inner.tb_frame.f_code.co_filename == __file__:
        inner = inner.tb_next
    try:
        return "".join(traceback.format_exception(type(error), error, inner)).strip()
    except Exception:  # its __str__ may raise
        return type(error).__name__


def _shorten(text: str) -> str:
    return text if len(text) <= MOST_ERROR else f"{text[: MOST_ERROR // 2]}\n...\n{text[-MOST_ERROR // 2 :]}"


def _end_with(parent: int) -> None:
    """Die with the parent, whatever a reward is doing; Ctrl-C is for the parent alone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        with suppress(OSError):  # when memory runs out, the kernel takes this process and not the trainer
            Path("/proc/self/oom_score_adj").write_text("1000")
    if os.getppid() != parent:
        os._exit(1)


def _separate_protocol() -> tuple[BinaryIO, BinaryIO]:
    """Move the pipes to the parent away from stdin and stdout; return them. Printing goes to stderr, limited."""
    requests, replies, printed = os.dup(0), os.dup(1), os.dup(2)  # none is inherited by commands
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # 2 as well: what native code and commands print has no limit
        os.dup2(null, descriptor)
    os.close(null)
    stream = LimitedText(os.fdopen(printed, "w", encoding="utf-8", errors="backslashreplace"))
    sys.stdout = sys.stderr = stream
    return os.fdopen(requests, "rb"), os.fdopen(replies, "wb")


if __name__ == "__main__":
    # As a module of its own name, or a reward that imports this file would import it again.
    importlib.import_module("headway.rl.scorer_process").main()
