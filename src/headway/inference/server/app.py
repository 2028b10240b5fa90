"""The server's routes: OpenAI's completions and chats, health and metrics."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headway.errors import HeadwayError, ModelError, RequestError, what_is_wrong
from headway.inference.chat import render_chat
from headway.inference.outputs import TokenLogprobs
from headway.inference.params import SamplingParams
from headway.inference.server.metrics import Metrics
from headway.inference.server.protocol import ChatRequest, CompletionRequest
from headway.inference.server.responses import Choice, chat_logprobs, completion_logprobs, error_body, head, usage
from headway.inference.server.service import Draining, EngineService, Overloaded
from headway.inference.server.streams import all_of, event_stream, merged, unless_gone
from headway.inference.text_engine import encoded

MOST_BYTES = 32 << 20
"""Of a request's body."""
MOST_PROMPTS = 1024
"""Of one request."""


def make_app(service: EngineService, name: str, api_key: str | None = None) -> FastAPI:
    """Return the application that serves a model under a name; with a key, only to those who have it."""
    app = FastAPI(title="Headway", openapi_url="/openapi.json", docs_url=None, redoc_url=None)
    app.add_middleware(_Guard, api_key=api_key)
    app.add_exception_handler(RequestValidationError, _invalid)  # type: ignore[arg-type]
    app.add_exception_handler(ValidationError, _invalid)  # type: ignore[arg-type]
    app.add_exception_handler(HeadwayError, _refused)  # type: ignore[arg-type]
    app.add_exception_handler(HTTPException, _http)  # type: ignore[arg-type]
    routes = _Routes(service, name)
    metrics = Metrics(service)

    @app.get("/health")
    def health() -> JSONResponse:
        ready = service.alive and not service.draining
        return JSONResponse({"status": "ok" if ready else "ending"}, status_code=200 if ready else 503)

    @app.get("/metrics")
    def show_metrics() -> PlainTextResponse:
        return PlainTextResponse(metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [routes.describe(name) for name in routes.names]}

    @app.get("/v1/models/{model:path}")
    def model(model: str) -> dict[str, Any]:
        routes.adapter_of(model)
        return routes.describe(model)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Any:
        return await routes.completions(body, request)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Any:
        return await routes.chat(body, request)

    return app


@dataclass
class _Prompt:
    """One prompt of a request."""

    ids: list[int]
    text: str
    params: SamplingParams
    adapter: str | None


class _Routes:
    """Answers to completions and chats."""

    def __init__(self, service: EngineService, name: str) -> None:
        self.service, self.engine, self.name = service, service.engine, name
        self.defaults = self.engine.loaded.defaults
        adapters = self.engine.loaded.adapters
        self.names = (name, *(() if adapters is None else adapters.names))
        """The model, and its adapters."""

    def describe(self, name: str) -> dict[str, Any]:
        length = self.engine.engine.model.max_length
        facts = {"id": name, "object": "model", "created": 0, "owned_by": "headway", "max_model_len": length}
        return facts if name == self.name else facts | {"parent": self.name}

    def adapter_of(self, model: str | None) -> str | None:
        """Return the adapter that a request's model names; None for the model itself."""
        if model is not None and model not in self.names:
            served = ", ".join(map(repr, self.names))
            verb = "is" if len(self.names) == 1 else "are"
            raise HTTPException(404, f"model {model!r} is not served here; {served} {verb}")
        return None if model in (None, self.name) else model

    def shows_ids(self, body: CompletionRequest | ChatRequest) -> bool:
        """Whether an answer has token ids: if they are asked for, and where a model has no tokenizer."""
        return self.engine.loaded.tokenizer is None if body.return_token_ids is None else body.return_token_ids

    # -- completions

    async def completions(self, body: CompletionRequest, request: Request) -> Any:
        adapter = self.adapter_of(body.model)
        if len(body.prompts) > MOST_PROMPTS:
            raise RequestError(f"{len(body.prompts)} prompts in one request", hint=f"send at most {MOST_PROMPTS}")
        params = body.sampling(
            self.defaults,
            max_tokens=None if body.max_tokens is None else max(body.max_tokens, 1),
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if body.echo else None,
        )
        asked = "max_tokens" in body.model_fields_set  # OpenAI's default of 16 may be cut, what a client asks for not
        prompts = [self._completion_prompt(prompt, params, adapter, asked) for prompt in body.prompts]
        request_id = f"cmpl-{secrets.token_hex(12)}"
        if body.stream:
            return await event_stream(self._stream_completions(request_id, body, prompts))
        return await unless_gone(request, self._whole_completions(request_id, body, prompts))

    def _completion_prompt(
        self, prompt: str | list[int], params: SamplingParams, adapter: str | None, asked: bool
    ) -> _Prompt:
        ids = self.engine.encode(prompt) if isinstance(prompt, str) else prompt
        text = prompt if isinstance(prompt, str) else self.engine.decode(prompt) if self._known(prompt) else ""
        if not asked and params.max_tokens is not None:
            params = params.model_copy(update={"max_tokens": self.engine.fitting(ids, params.max_tokens)})
        return _Prompt(ids, text, params, adapter)

    def _known(self, ids: list[int]) -> bool:
        return all(0 <= token < self.engine.engine.model.vocabulary for token in ids)

    async def _whole_completions(
        self, request_id: str, body: CompletionRequest, prompts: list[_Prompt]
    ) -> dict[str, Any]:
        finished = await all_of([self._collect(prompt) for prompt in prompts])
        choices, output_tokens = [], 0
        for prompt, (outputs, noted) in zip(prompts, finished, strict=True):
            for output in outputs:
                choices.append(self._completion_choice(len(choices), body, prompt, output, noted))
                output_tokens += len(output.token_ids)
        counted = usage(sum(len(prompt.ids) for prompt in prompts), output_tokens if body.max_tokens != 0 else 0)
        return head(request_id, "text_completion", body.model or self.name) | {"choices": choices, "usage": counted}

    def _completion_choice(
        self,
        index: int,
        body: CompletionRequest,
        prompt: _Prompt,
        output: Choice,
        noted: tuple[TokenLogprobs | None, ...] | None,
    ) -> dict[str, Any]:
        text, ids, rows = output.text, output.token_ids, list[TokenLogprobs | None](output.logprobs)
        if body.max_tokens == 0:
            text, ids, rows = "", [], []
        offset = len(prompt.text)
        if body.echo:
            text, ids, offset = prompt.text + text, [*prompt.ids, *ids], 0
            rows = [*(noted or ()), *rows]
        logprobs = None if body.logprobs is None else completion_logprobs(self.engine, ids, rows, offset)
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": output.finish}
        sampled = [] if body.max_tokens == 0 else output.token_ids
        return choice | ({"prompt_token_ids": prompt.ids, "token_ids": sampled} if self.shows_ids(body) else {})

    async def _stream_completions(
        self, request_id: str, body: CompletionRequest, prompts: list[_Prompt]
    ) -> AsyncIterator[dict[str, Any]]:
        top = head(request_id, "text_completion", body.model or self.name)
        count, output_tokens = prompts[0].params.n, 0
        begun = set[int]()
        offsets: dict[int, int] = {}
        async with aclosing(merged([self.service.stream(p.ids, p.params, p.adapter) for p in prompts])) as parts:
            async for number, part in parts:
                prompt, output = prompts[number], part.output
                index = number * count + output.index
                text, ids = part.text, [] if output.token_id is None else [output.token_id]
                rows: list[TokenLogprobs | None] = [] if output.logprobs is None else [output.logprobs]
                output_tokens += len(ids)
                if body.max_tokens == 0:
                    text, ids, rows = "", [], []
                choice: dict[str, Any] = {"token_ids": ids} if self.shows_ids(body) else {}
                if index not in begun and choice:
                    choice["prompt_token_ids"] = prompt.ids
                if body.echo and index not in begun:
                    text, ids = prompt.text + text, [*prompt.ids, *ids]
                    rows = [*(output.prompt_logprobs or ()), *rows]
                begun.add(index)
                logprobs = None
                if body.logprobs is not None:
                    offset = offsets.get(index, 0 if body.echo else len(prompt.text))
                    logprobs = completion_logprobs(self.engine, ids, rows, offset)
                    offsets[index] = offset + sum(len(token) for token in logprobs["tokens"])
                choice |= {"index": index, "text": text, "logprobs": logprobs, "finish_reason": output.finish}
                yield top | {"choices": [choice]} | ({"usage": None} if body.include_usage else {})
        if body.include_usage:
            yield top | {"choices": [], "usage": usage(sum(len(p.ids) for p in prompts), output_tokens)}

    # -- chats

    async def chat(self, body: ChatRequest, request: Request) -> Any:
        adapter = self.adapter_of(body.model)
        params = body.sampling(
            self.defaults, max_tokens=body.length, logprobs=(body.top_logprobs or 0) if body.logprobs else None
        )
        text = await asyncio.to_thread(
            render_chat,
            self.engine.loaded,
            body.messages,
            tools=body.tools if body.tool_choice != "none" else None,
            add_generation_prompt=body.add_generation_prompt,
            template_arguments=body.chat_template_kwargs,
        )
        tokenizer = self.engine.loaded.tokenizer
        if tokenizer is None:
            raise RequestError(f"{self.name} has no tokenizer", hint="use completions with token ids")
        prompt = _Prompt(encoded(tokenizer, text), text, params, adapter)
        request_id = f"chatcmpl-{secrets.token_hex(12)}"
        if body.stream:
            return await event_stream(self._stream_chat(request_id, body, prompt))
        return await unless_gone(request, self._whole_chat(request_id, body, prompt))

    async def _whole_chat(self, request_id: str, body: ChatRequest, prompt: _Prompt) -> dict[str, Any]:
        outputs, _ = await self._collect(prompt)
        choices = [
            {
                "index": output.index,
                "message": {"role": "assistant", "content": output.text},
                "logprobs": chat_logprobs(self.engine, output.token_ids, output.logprobs) if body.logprobs else None,
                "finish_reason": output.finish,
            }
            | ({"token_ids": output.token_ids} if self.shows_ids(body) else {})
            for output in outputs
        ]
        counted = usage(len(prompt.ids), sum(len(output.token_ids) for output in outputs))
        top = head(request_id, "chat.completion", body.model or self.name) | self._prompt_ids(body, prompt)
        return top | {"choices": choices, "usage": counted}

    def _prompt_ids(self, body: ChatRequest, prompt: _Prompt) -> dict[str, Any]:
        return {"prompt_token_ids": prompt.ids} if self.shows_ids(body) else {}

    async def _stream_chat(self, request_id: str, body: ChatRequest, prompt: _Prompt) -> AsyncIterator[dict[str, Any]]:
        top = head(request_id, "chat.completion.chunk", body.model or self.name)
        extra: dict[str, Any] = {"usage": None} if body.include_usage else {}
        begun, output_tokens, first = set[int](), 0, True
        async with aclosing(self.service.stream(prompt.ids, prompt.params, prompt.adapter)) as parts:  # type: ignore[type-var]
            async for part in parts:
                output = part.output
                delta = {"content": part.text}
                if output.index not in begun:
                    begun.add(output.index)
                    delta = {"role": "assistant", **delta}
                output_tokens += output.token_id is not None
                logprobs = None
                if body.logprobs and output.logprobs is not None and output.token_id is not None:
                    logprobs = chat_logprobs(self.engine, [output.token_id], [output.logprobs])
                choice = {"index": output.index, "delta": delta, "logprobs": logprobs, "finish_reason": output.finish}
                if self.shows_ids(body):
                    choice["token_ids"] = [] if output.token_id is None else [output.token_id]
                yield top | {"choices": [choice]} | extra | (self._prompt_ids(body, prompt) if first else {})
                first = False
        if body.include_usage:
            yield top | {"choices": [], "usage": usage(len(prompt.ids), output_tokens)}

    async def _collect(self, prompt: _Prompt) -> tuple[list[Choice], tuple[TokenLogprobs | None, ...] | None]:
        """Return all outputs of a prompt, and the prompt's log-probabilities."""
        choices, noted = [Choice(index) for index in range(prompt.params.n)], None
        async with aclosing(self.service.stream(prompt.ids, prompt.params, prompt.adapter)) as parts:  # type: ignore[type-var]
            async for part in parts:
                choices[part.output.index].add(part)
                noted = part.output.prompt_logprobs or noted
        return choices, noted


# -- errors, keys and sizes


async def _invalid(_: Request, error: RequestValidationError | ValidationError) -> JSONResponse:
    mistake = error.errors()[0]
    place = [str(part) for part in mistake["loc"] if part != "body"]
    name = place[0] if place else None  # what follows names the alternatives of a union
    if mistake["type"] == "json_invalid":
        name, message = None, f"the body is not JSON: {mistake['ctx']['error']}"
    elif not place and mistake["type"] == "model_attributes_type":
        message = "the body is no JSON object, or its Content-Type is not application/json"
    elif mistake["type"] == "extra_forbidden":
        message = f"unknown field {'.'.join(place)}"
    elif name == "prompt" and mistake["type"] != "missing":
        message = "prompt: this is neither text nor token ids, nor a list of them"
    elif name == "messages" and mistake["type"] == "list_type":
        message = "messages: this is no list of messages"
    elif name and mistake["type"] in ("dict_type", "model_attributes_type"):
        message = f"{name}: this is no JSON object"
    else:
        message = f"{name}: {what_is_wrong(mistake)}" if name else what_is_wrong(mistake)
    return JSONResponse(error_body(message, "invalid_request_error", name), status_code=400)


async def _refused(_: Request, error: HeadwayError) -> JSONResponse:
    message = error.message if error.hint is None else f"{error.message}; {error.hint}"
    if isinstance(error, Overloaded):
        return JSONResponse(error_body(message, "rate_limit_error"), status_code=429, headers={"Retry-After": "1"})
    if isinstance(error, Draining):
        return JSONResponse(error_body(message, "server_error"), status_code=503, headers={"Retry-After": "5"})
    if isinstance(error, RequestError | ModelError):
        param = error.facts.get("param")
        return JSONResponse(error_body(message, "invalid_request_error", param), status_code=400)
    return JSONResponse(error_body(message, "server_error"), status_code=500)


async def _http(_: Request, error: HTTPException) -> JSONResponse:
    kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    return JSONResponse(error_body(str(error.detail), kind), status_code=error.status_code, headers=error.headers)


class _Guard:
    """Refuses requests without the key, and bodies that are too large, before they are read."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app, self._key = app, api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = {name.lower(): value for name, value in scope["headers"]}
        if self._key is not None and scope["path"] != "/health":
            given = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
            if not secrets.compare_digest(given, self._key.encode()):
                answer = JSONResponse(error_body("wrong or missing API key", "authentication_error"), status_code=401)
                return await answer(scope, receive, send)
        size = headers.get(b"content-length", b"0")
        if size.isdigit() and int(size) > MOST_BYTES:
            return await _too_large()(scope, receive, send)
        read = 0

        async def limited() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > MOST_BYTES:
                raise HTTPException(413, f"a request may have {MOST_BYTES:,} bytes")
            return message

        await self._app(scope, limited, send)
        return None


def _too_large() -> JSONResponse:
    body = error_body(f"a request may have {MOST_BYTES:,} bytes", "invalid_request_error")
    return JSONResponse(body, status_code=413)
