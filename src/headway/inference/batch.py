"""`python -m headway.inference.batch`: the process behind `headway generate`.

Reads one request, a JSON object, from stdin; appends a line to the output file as each input is complete. Writes JSON
lines to stdout: {"total", "done"} once it begins and after each input, or on an error a last {"error", "hint"} and the
error's exit status. Inputs that the output file has already are not run again: each answer carries a fingerprint of its
model, input and sampling parameters, and answers to anything else are refused.
"""

import contextlib
import fcntl
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headway.errors import DataError, HeadwayError, RequestError, what_is_wrong
from headway.inference.chat import render_chat
from headway.inference.llm import LLM, Generated
from headway.inference.load import ModelSource
from headway.inference.params import SamplingParams
from headway.inference.text_engine import EngineOptions, encoded
from headway.state.model_identity import fingerprint_of, model_identity
from headway.state.parent_process import end_with_parent

AT_ONCE = 4096
"""Inputs that are in memory at the same time."""
DEFAULT_TOKENS = 256
"""Tokens to generate at most where nothing says how many; fewer where the context has no room for them."""
LINE_HINT = 'a line is {"prompt": "..."} or {"messages": [...]}, with "params" if it has its own'


class BatchRequest(ModelSource):
    """A model, inputs, and how to sample them."""

    inputs: Path
    output: Path
    params: dict[str, Any] = Field(default_factory=dict)
    options: dict[str, Any] = Field(default_factory=dict)


class InputLine(BaseModel):
    """A line of the input: a text, token ids or a conversation, and sampling parameters of its own."""

    model_config = ConfigDict(extra="forbid")

    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    params: dict[str, Any] = {}


def main() -> int:
    """Answer the request on stdin; return the exit status."""
    try:
        run_batch(BatchRequest.model_validate_json(sys.stdin.buffer.read()))
    except HeadwayError as error:
        print(json.dumps({"error": error.message, "hint": error.hint}), flush=True)
        return error.exit_status
    return 0


def run_batch(request: BatchRequest) -> None:
    """Run the inputs that the output does not have yet."""
    lines = list(_read(request))  # all are checked before the model is loaded
    source = request.model_dump(mode="json", include={"folder", "run", "checkpoint", "store", "adapters", "dtype"})
    model = model_identity({key: value for key, value in source.items() if value})
    marks = [
        fingerprint_of(
            model=model, prompt=line.prompt, messages=line.messages, params={**request.params, **line.params}
        )
        for line in lines
    ]
    with _exclusive(request.output) as output:
        done = _done(request.output, marks)
        _say(total=len(lines), done=len(done))
        if len(done) < len(lines):
            _answer_all(request, lines, marks, done, output)


def _answer_all(
    request: BatchRequest, lines: list[InputLine], marks: list[str], done: set[int], output: IO[str]
) -> None:
    """Append the answers to all inputs but those that are done."""
    left = [index for index in range(len(lines)) if index not in done]
    llm = LLM(request.load(), options=EngineOptions(**request.options))
    count = len(done)
    for first in range(0, len(left), AT_ONCE):
        some = left[first : first + AT_ONCE]
        prompts, params = zip(*(_prompt(llm, request, lines[index], index) for index in some), strict=True)

        def write(place: int, result: Generated, some: list[int] = some) -> None:
            nonlocal count
            index = some[place]
            answer = _answer(index, marks[index], result, ids=isinstance(lines[index].prompt, list))
            output.write(json.dumps(answer, ensure_ascii=False) + "\n")
            output.flush()
            count += 1
            _say(total=len(lines), done=count)

        llm.generate(list(prompts), list(params), on_done=write)


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[IO[str]]:
    """Open a file to append to that no other process writes; a new one to which nothing is written is removed."""
    is_new = not path.exists()
    with path.open("a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            hint = "wait until it ends, or name another file with --out"
            raise DataError(f"another headway generate writes to {path}", hint=hint) from None
        except OSError:  # a file system without locks
            pass
        try:
            yield file
        finally:
            if is_new and not path.stat().st_size:
                path.unlink()


def _read(request: BatchRequest) -> Iterator[InputLine]:
    """Yield the lines of the input file, with parameters that can be used."""
    path = request.inputs
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}") from None
    if not text.strip():
        raise DataError(f"{path} is empty", hint=LINE_HINT)
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            entry = InputLine.model_validate_json(line)
        except ValidationError as error:
            raise DataError(
                f"{path}:{number}: {_mistake(error) if line.strip() else 'the line is empty'}", hint=LINE_HINT
            ) from None
        if (entry.prompt is None) == (entry.messages is None):
            raise DataError(f"{path}:{number} needs either a prompt or messages")
        try:
            SamplingParams(**{**request.params, **entry.params})
        except RequestError as error:
            raise DataError(f"{path}:{number}: params: {error.message}", hint=error.hint) from None
        yield entry


def _mistake(error: ValidationError) -> str:
    """Return what is wrong with a line."""
    mistake = error.errors()[0]
    match mistake["type"], mistake["loc"]:
        case "json_invalid", _:
            return f"not JSON ({str(mistake['ctx']['error']).replace(' at line 1 column', ' at column')})"
        case "model_type", ():
            return "this is no JSON object"
        case "extra_forbidden", (name, *_):
            return f"unknown key {name!r}"
        case _, ("prompt", *_):
            return "prompt: this is neither text nor token ids"
        case _, ("messages",):
            return "messages: this is no list of messages"
        case _, (*place, last) if place:
            return f"{place[0]}[{last}]: {what_is_wrong(mistake)}"
    return ".".join(map(str, mistake["loc"])) + f": {what_is_wrong(mistake)}"


def _done(output: Path, marks: list[str]) -> set[int]:
    """Return the inputs that the output file has; a line cut short by a crash is removed."""
    if not output.exists():
        return set()
    content = output.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    try:
        answers = [json.loads(line) for line in whole.splitlines()]
        done = {int(answer["index"]): answer.get("request") for answer in answers}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DataError(f"{output} has other content", hint="name another file with --out") from None
    if any(not 0 <= index < len(marks) or marks[index] != mark for index, mark in done.items()):
        raise DataError(
            f"{output} has answers of another model, or to other prompts or sampling parameters",
            hint="name another file with --out, or remove it",
        )
    if len(whole) < len(content):
        with output.open("r+b") as file:
            file.truncate(len(whole))
    return set(done)


def _prompt(llm: LLM, request: BatchRequest, entry: InputLine, index: int) -> tuple[list[int], SamplingParams]:
    """Return the tokens of an input and its parameters, which the engine will take."""
    try:
        if entry.messages is not None:
            text = render_chat(llm.model, entry.messages)
            if llm.model.tokenizer is None:
                raise RequestError(f"{llm.model.name} has no tokenizer", hint="send token ids")
            ids = encoded(llm.model.tokenizer, text)
        else:
            assert entry.prompt is not None, "checked when it was read"
            ids = llm.engine.encode(entry.prompt) if isinstance(entry.prompt, str) else entry.prompt
        given = {**request.params, **entry.params}
        if given.get("max_tokens") is None:
            given["max_tokens"] = llm.engine.fitting(ids, DEFAULT_TOKENS)
        params = llm.params(**given)
        llm.engine.engine.check(ids, params)
    except RequestError as error:
        raise DataError(f"{request.inputs}:{index + 1}: {error.message}", hint=error.hint) from None
    return ids, params


def _answer(index: int, mark: str, result: Generated, *, ids: bool) -> dict[str, Any]:
    """Return the line of an input; `ids`: whether with the token ids of the outputs."""
    outputs = []
    for output in result.outputs:
        entry: dict[str, Any] = {
            "text": output.text,
            "finish_reason": output.finish_reason,
            "tokens": len(output.token_ids),
        }
        if ids or output.logprobs:
            entry["token_ids"] = output.token_ids
        if output.logprobs:
            entry["logprobs"] = [row.logprob for row in output.logprobs]
        outputs.append(entry)
    return {"index": index, "request": mark, "prompt_tokens": len(result.prompt_ids), "outputs": outputs}


def _say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    end_with_parent(signal.SIGTERM, *map(int, sys.argv[1:]))
    sys.exit(main())
