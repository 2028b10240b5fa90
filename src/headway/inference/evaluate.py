"""`python -m headway.inference.evaluate`: the process behind `headway eval`.

Reads one request, a JSON object, from stdin: tasks with their questions, as `headway.evals` made them. Writes JSON
lines to stdout: {"ready"} once the model is loaded, then per question {"task", "question", "prompt"} with "outputs" of
a generation task, "logprobs" of the choices, or "logprob" and "tokens" of a text; on an error a last {"error", "hint"}
and the error's exit status. It scores nothing.
"""

import json
import math
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from headway.errors import DataError, HeadwayError, ModelError, RequestError
from headway.inference.chat import render_chat
from headway.inference.llm import LLM, Generated
from headway.inference.load import ModelSource
from headway.inference.params import SamplingParams
from headway.inference.text_engine import EngineOptions
from headway.state.parent_process import end_with_parent

AT_ONCE = 4096
"""Prompts that are in the engine's queue at the same time."""


class AskedQuestion(BaseModel):
    """A question as the model gets it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int
    """How the answer names it."""
    where: str
    """The file and row, for messages."""
    prompt: str = ""
    messages: list[dict[str, Any]] = []
    choices: list[str] = []


class AskedTask(BaseModel):
    """Questions of one kind, and how to sample their outputs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    kind: Literal["generate", "choice", "perplexity"]
    questions: list[AskedQuestion]
    delimiter: str = " "
    stop: tuple[str, ...] = ()
    max_tokens: int = 256
    temperature: float | None = None
    """None for the model's own."""


class EvaluateRequest(ModelSource):
    """A model and tasks."""

    tasks: list[AskedTask]
    samples: Annotated[int, Field(ge=1, le=128)] = 1
    top_p: float | None = None
    seed: int = 0
    options: dict[str, Any] = Field(default_factory=dict)


Answer = dict[str, Any]
OnAnswer = Callable[[AskedQuestion, Answer], None]


def main() -> int:
    """Answer the request on stdin; return the exit status."""
    try:
        evaluate(EvaluateRequest.model_validate_json(sys.stdin.buffer.read()), _say)
    except HeadwayError as error:
        _say({"error": error.message, "hint": error.hint})
        return error.exit_status
    return 0


def evaluate(request: EvaluateRequest, say: Callable[[dict[str, Any]], None]) -> None:
    """Load the model and answer all questions."""
    answer_all(LLM(request.load(), options=EngineOptions(**request.options)), request, say)


def answer_all(llm: LLM, request: EvaluateRequest, say: Callable[[dict[str, Any]], None]) -> None:
    """Answer the questions of a request with a model that is loaded."""
    if llm.model.tokenizer is None:
        raise RequestError(f"{llm.model.name} has no tokenizer", hint="tasks are text: evaluation needs one")
    parameter = next(llm.model.module.parameters())
    facts = {"device": str(llm.model.device), "dtype": str(parameter.dtype).removeprefix("torch.")}
    say({"ready": {**facts, "chat_template": llm.model.chat_template is not None}})
    for number, task in enumerate(request.tasks):

        def answered(question: AskedQuestion, answer: Answer, number: int = number) -> None:
            say({"task": number, "question": question.number, **answer})

        if task.kind == "generate":
            generate_answers(llm, task, request.samples, request.top_p, request.seed, answered)
        elif task.kind == "choice":
            choice_likelihoods(llm, task, answered)
        else:
            text_likelihoods(llm, task, answered)


def generate_answers(
    llm: LLM, task: AskedTask, samples: int, top_p: float | None, seed: int, on_answer: OnAnswer
) -> None:
    """Have the model continue each prompt `samples` times."""
    more: dict[str, Any] = {} if task.temperature is None else {"temperature": task.temperature}
    more |= {} if top_p is None else {"top_p": top_p}
    prompts, texts, params = [], [], []
    for question in task.questions:
        text = _rendered(llm, question)
        ids = _encode(llm, text) if question.messages else llm.engine.encode(text)
        _check_length(llm, len(ids), question.where, "the prompt")
        prompts.append(ids)
        texts.append(text)
        # Outputs of a question have seeds in a row; another question's start elsewhere.
        own = seed * 1_000_003 + question.number * samples
        most = llm.engine.fitting(ids, task.max_tokens)
        params.append(llm.params(max_tokens=most, stop=task.stop, n=samples, seed=own, **more))

    def done(place: int, result: Generated) -> None:
        outputs = [
            {"text": output.text, "finish": output.finish_reason, "tokens": len(output.token_ids)}
            for output in result.outputs
        ]
        on_answer(task.questions[place], {"prompt": texts[place], "outputs": outputs})

    _run(llm, prompts, params, done)


def choice_likelihoods(llm: LLM, task: AskedTask, on_answer: OnAnswer) -> None:
    """Compute the log-likelihood of each choice after its question."""
    prompts, firsts, places = [], [], []
    texts = [_rendered(llm, question) for question in task.questions]
    for number, question in enumerate(task.questions):
        for choice_number, choice in enumerate(question.choices, start=1):
            delimiter = "" if question.messages else task.delimiter
            ids, first = encode_pair(llm, texts[number], delimiter + choice, templated=bool(question.messages))
            if first >= len(ids):
                raise DataError(
                    f"{question.where}: choice {choice_number} has no token of its own", hint="change the delimiter"
                )
            _check_length(llm, len(ids), question.where, f"the prompt with choice {choice_number}")
            prompts.append(ids)
            firsts.append(first)
            places.append(number)
    sums: list[dict[int, float]] = [{} for _ in task.questions]

    def done(place: int, result: Generated) -> None:
        number = places[place]
        sums[number][place] = _sum(result, firsts[place], task.questions[number].where)
        if len(sums[number]) == len(task.questions[number].choices):
            logprobs = [logprob for _, logprob in sorted(sums[number].items())]
            on_answer(task.questions[number], {"prompt": texts[number], "logprobs": logprobs})

    _run(llm, prompts, [_scoring()] * len(prompts), done)


def text_likelihoods(llm: LLM, task: AskedTask, on_answer: OnAnswer) -> None:
    """Compute the log-likelihood of whole texts, window by window; every token is predicted once."""
    prompts, firsts, places, sizes = [], [], [], []
    for number, question in enumerate(task.questions):
        ids = _encode(llm, question.prompt)
        if not ids:
            raise DataError(f"{question.where}: the text has no tokens", hint="remove the row")
        sizes.append(len(ids))
        for window, first in rolling_windows(ids, prefix_token(llm), _longest(llm) - 1):
            prompts.append(window)
            firsts.append(first)
            places.append(number)
    left, sums = Counter(places), [0.0] * len(task.questions)

    def done(place: int, result: Generated) -> None:
        number = places[place]
        sums[number] += _sum(result, firsts[place], task.questions[number].where)
        left[number] -= 1
        if left[number] == 0:
            question = task.questions[number]
            on_answer(question, {"prompt": question.prompt, "logprob": sums[number], "tokens": sizes[number]})

    _run(llm, prompts, [_scoring()] * len(prompts), done)


def encode_pair(llm: LLM, context: str, continuation: str, *, templated: bool = False) -> tuple[list[int], int]:
    """Return the tokens of a context and its continuation, and where those of the continuation begin.

    As lm-eval does: white space at the context's end belongs to the continuation, since tokens begin with it; and both
    are encoded as one text, so that the tokens are those that the model would see. `templated`: the context is a
    rendered chat, which has its special tokens already.
    """
    kept = context.rstrip()
    whole = context + continuation
    if not kept:
        return [prefix_token(llm), *_encode(llm, whole)], 1
    if templated:
        return _encode(llm, whole), len(_encode(llm, kept))
    return llm.engine.encode(whole), len(llm.engine.encode(kept))


def rolling_windows(ids: Sequence[int], prefix: int, most: int) -> Iterator[tuple[list[int], int]]:
    """Yield windows of a text, and from where on their tokens count; each predicts at most `most` tokens.

    As in lm-eval: the first window begins with the prefix token, others with the token before them. The last one is
    as long as the others, so its first tokens are context only.
    """
    for start in range(0, len(ids), most):
        end = min(start + most, len(ids))
        if start == 0:
            yield [prefix, *ids[:end]], 1
        else:
            first = end - most - 1
            yield list(ids[first:end]), start - first


def prefix_token(llm: LLM) -> int:
    """Return the token that stands for no text: that of the beginning, or where there is none, of the end."""
    model = llm.model
    if model.begin_id is not None:
        return model.begin_id
    begin = model.special_tokens.get("bos_token")
    ids = _encode(llm, begin) if begin else []
    if len(ids) == 1:
        return ids[0]
    if not model.end_ids:
        raise RequestError(f"{model.name} has neither a beginning nor an end-of-text token")
    return model.end_ids[0]


def _run(
    llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams], done: Callable[[int, Generated], None]
) -> None:
    for first in range(0, len(prompts), AT_ONCE):
        some = slice(first, first + AT_ONCE)
        llm.generate(prompts[some], params[some], on_done=lambda place, result, at=first: done(at + place, result))


def _scoring() -> SamplingParams:
    """Return parameters that give the log-probabilities of a prompt; the engine always samples a token."""
    return SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)


def _sum(result: Generated, first: int, where: str) -> float:
    assert result.prompt_logprobs is not None
    total = math.fsum(row.logprob for row in result.prompt_logprobs[first:] if row is not None)
    if math.isnan(total):
        raise ModelError(f"{where}: the model's log-likelihood is not a number", hint="its weights are damaged")
    return total


def _rendered(llm: LLM, question: AskedQuestion) -> str:
    """Return the text of a prompt."""
    if not question.messages:
        return question.prompt
    try:
        return render_chat(llm.model, question.messages)
    except RequestError as error:
        hint = "use --no-chat, or chat = false in the task" if llm.model.chat_template is None else error.hint
        raise DataError(f"{question.where}: {error.message}", hint=hint) from None


def _encode(llm: LLM, text: str) -> list[int]:
    """Return the tokens of a text, with nothing before them."""
    assert llm.model.tokenizer is not None, "checked when the model was loaded"
    return [int(token) for token in llm.model.tokenizer.encode(text).tolist()]


def _longest(llm: LLM) -> int:
    """Return how many tokens a prompt may have: one less than a sequence, since a token is sampled."""
    return llm.engine.engine.context - 1


def _check_length(llm: LLM, tokens: int, where: str, what: str) -> None:
    if tokens > _longest(llm):
        raise DataError(
            f"{where}: {what} has {tokens:,} tokens, but the model takes {_longest(llm):,}",
            hint="use fewer --shots, or remove the row",
        )


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    end_with_parent(signal.SIGTERM, *map(int, sys.argv[1:]))
    sys.exit(main())
