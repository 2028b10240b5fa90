"""`python -m headway.inference.batch`: the process behind `headway generate`.

Reads one request, a JSON object, from stdin; appends a line to the output file as each input is complete. Writes JSON
lines to stdout: {"total", "done"} once it begins and after each input, or on an error a last {"error", "hint"} and the
error's exit status. Inputs that the output file has already are not run again.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headway.errors import DataError, HeadwayError, RequestError, what_is_wrong
from headway.inference.chat import render_chat
from headway.inference.llm import LLM, Generated
from headway.inference.load import ModelSource
from headway.inference.params import SamplingParams
from headway.inference.text_engine import EngineOptions

AT_ONCE = 4096
"""Inputs that are in memory at the same time."""


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
    lines = list(_read(request.inputs))  # all are checked before the model is loaded
    done = _done(request.output, len(lines))
    left = [index for index in range(len(lines)) if index not in done]
    _say(total=len(lines), done=len(done))
    if not left:
        return
    llm = LLM(request.load(), options=EngineOptions(**request.options))
    count = len(done)
    with request.output.open("a", encoding="utf-8") as output:
        for first in range(0, len(left), AT_ONCE):
            some = left[first : first + AT_ONCE]
            prompts, params = zip(*(_prompt(llm, request, lines[index], index) for index in some), strict=True)

            def write(place: int, result: Generated, some: list[int] = some) -> None:
                nonlocal count
                output.write(json.dumps(_answer(some[place], result), ensure_ascii=False) + "\n")
                output.flush()
                count += 1
                _say(total=len(lines), done=count)

            llm.generate(list(prompts), list(params), on_done=write)


def _read(path: Path) -> Iterator[InputLine]:
    """Yield the lines of the input file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}") from None
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            entry = InputLine.model_validate_json(line)
        except ValidationError as error:
            mistake = error.errors()[0]
            place = ".".join(str(part) for part in mistake["loc"])
            raise DataError(
                f"{path}:{number}: {place + ': ' if place else ''}{what_is_wrong(mistake)}",
                hint='a line is {"prompt": "..."} or {"messages": [...]}, with "params" if it has its own',
            ) from None
        if (entry.prompt is None) == (entry.messages is None):
            raise DataError(f"{path}:{number} needs either a prompt or messages")
        yield entry


def _done(output: Path, total: int) -> set[int]:
    """Return the inputs that the output file has; a line cut short by a crash is removed."""
    if not output.exists():
        return set()
    content = output.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        with output.open("r+b") as file:
            file.truncate(len(whole))
    try:
        done = {int(json.loads(line)["index"]) for line in whole.splitlines()}
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{output} has other content", hint="name another file with --out") from None
    if any(not 0 <= index < total for index in done):
        raise DataError(f"{output} has answers to another input", hint="name another file with --out")
    return done


def _prompt(llm: LLM, request: BatchRequest, entry: InputLine, index: int) -> tuple[Any, SamplingParams]:
    try:
        params = llm.params(**{**request.params, **entry.params})
        if entry.messages is not None:
            text = render_chat(llm.model, entry.messages)
            if llm.model.tokenizer is None:
                raise RequestError(f"{llm.model.name} has no tokenizer", hint="send token ids")
            return llm.model.tokenizer.encode(text).tolist(), params
        return entry.prompt, params
    except ValidationError as error:
        mistake = error.errors()[0]
        raise DataError(f"{request.inputs}:{index + 1}: {mistake['loc'][0]}: {what_is_wrong(mistake)}") from None
    except RequestError as error:
        raise DataError(f"{request.inputs}:{index + 1}: {error.message}", hint=error.hint) from None


def _answer(index: int, result: Generated) -> dict[str, Any]:
    outputs = []
    for output in result.outputs:
        entry: dict[str, Any] = {
            "text": output.text,
            "finish_reason": output.finish_reason,
            "tokens": len(output.token_ids),
        }
        if output.logprobs:
            entry |= {"token_ids": output.token_ids, "logprobs": [row.logprob for row in output.logprobs]}
        outputs.append(entry)
    return {"index": index, "prompt_tokens": len(result.prompt_ids), "outputs": outputs}


def _say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    sys.exit(main())
