"""The server, asked by OpenAI's own client: answers, streams, refusals, clients that leave."""

import asyncio
import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
import torch
from served_model import Served, load
from test_adapters import ADAPTERS, GREEDY, PROMPT, adapted, merged

from eventually import eventually
from headway.inference import LLM, EngineOptions, SamplingParams, TextEngine
from headway.inference.chat import render_chat
from headway.inference.server.service import Draining, EngineService
from lazy_imports import openai

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    server = Served()
    yield server
    assert server.engine.pool.free == server.engine.pool.count, "all blocks are back"
    server.close()


def offline(prompt: Any, **params: Any) -> Any:
    return LLM(load(), options=EngineOptions(cache_tokens=2000)).generate([prompt], SamplingParams(**params))[0]


def test_completions_are_what_the_engine_generates(served: Served) -> None:
    answer = served.client.completions.create(
        model="tiny", prompt=["def", [5, 17, 8]], max_tokens=9, temperature=0.8, seed=5, n=2, logprobs=2
    )
    for place, prompt in enumerate(("def", [5, 17, 8])):
        expected = offline(prompt, max_tokens=9, temperature=0.8, seed=5, n=2, logprobs=2)
        for index, output in enumerate(expected.outputs):
            choice = answer.choices[2 * place + index]
            assert (choice.index, choice.text) == (2 * place + index, output.text)
            # Which requests share a pass depends on when they arrive, and so do the last bits of sums.
            assert choice.logprobs.token_logprobs == pytest.approx([row.logprob for row in output.logprobs], rel=1e-5)
            assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 4 * 9


def test_a_stream_adds_up_to_the_whole_answer(served: Served) -> None:
    asked = {"model": "tiny", "prompt": "def", "max_tokens": 12, "temperature": 0.5, "seed": 1, "n": 2}
    whole = served.client.completions.create(**asked)
    texts, ends, counted = {0: "", 1: ""}, {}, None
    for event in served.client.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        for choice in event.choices:
            texts[choice.index] += choice.text
            ends[choice.index] = choice.finish_reason or ends.get(choice.index)
        counted = event.usage or counted
    assert [texts[0], texts[1]] == [choice.text for choice in whole.choices]
    assert ends == {0: "length", 1: "length"}
    assert counted == whole.usage


def test_echo_has_the_prompt_with_its_logprobs(served: Served) -> None:
    """As evaluation harnesses ask for the likelihood of a text: all tokens, and one more."""
    for most in (0, 1):
        answer = served.client.completions.create(
            model="tiny", prompt=[5, 17, 8, 9], max_tokens=most, temperature=0, logprobs=1, echo=True
        )
        found = answer.choices[0].logprobs
        expected = offline([5, 17, 8, 9], max_tokens=1, temperature=0, prompt_logprobs=1, logprobs=1)
        rows = [row.logprob if row else None for row in expected.prompt_logprobs]
        rows += [row.logprob for row in expected.outputs[0].logprobs][:most]
        assert found.token_logprobs == rows
        assert len(found.top_logprobs) == len(found.tokens) == len(found.text_offset) == 4 + most


def test_chats_go_through_the_template(served: Served) -> None:
    messages = [{"role": "user", "content": "head"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    answer = served.client.chat.completions.create(
        model="tiny", messages=messages, tools=tools, max_completion_tokens=7, temperature=0, logprobs=True,
        top_logprobs=2, extra_body={"chat_template_kwargs": {"shout": 1}},
    )  # fmt: skip
    text = f"<user>head{json.dumps(tools)}!<assistant>"
    assert render_chat(served.loaded, messages, tools=tools, template_arguments={"shout": 1}) == text
    expected = offline(served.loaded.tokenizer.encode(text).tolist(), max_tokens=7, temperature=0, logprobs=2)
    assert answer.choices[0].message.content == expected.text
    assert [entry.logprob for entry in answer.choices[0].logprobs.content] == [
        row.logprob for row in expected.outputs[0].logprobs
    ]
    pieces = [
        event.choices[0].delta.content
        for event in served.client.chat.completions.create(
            model="tiny", messages=messages, tools=tools, max_tokens=7, temperature=0, stream=True,
            extra_body={"chat_template_kwargs": {"shout": 1}},
        )
    ]  # fmt: skip
    assert "".join(pieces) == expected.text


def test_parts_of_text_are_text_and_no_content_is_empty(served: Served) -> None:
    """An assistant's turn with tool calls has null content in OpenAI's form."""
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]

    def ask(*contents: Any) -> tuple[str, int]:
        messages = [
            {"role": "user", "content": contents[0]},
            {"role": "assistant", "content": contents[1], "tool_calls": calls},
            {"role": "user", "content": contents[2]},
        ]
        answer = served.client.chat.completions.create(model="tiny", messages=messages, max_tokens=5, temperature=0)
        return answer.choices[0].message.content, answer.usage.prompt_tokens

    parts = [{"type": "text", "text": "def"}, {"type": "text", "text": "steps"}]
    assert ask(parts, None, [{"type": "text", "text": "head"}]) == ask("def\nsteps", "", "head")


def test_special_tokens_are_no_text_unless_they_are_asked_for(served: Served) -> None:
    end = served.loaded.tokenizer.end_of_text
    always = {"model": "tiny", "prompt": "def", "max_tokens": 3, "logit_bias": {str(end): 100}}
    plain = served.client.completions.create(**always)
    shown = served.client.completions.create(**always, extra_body={"skip_special_tokens": False})
    assert (plain.choices[0].text, shown.choices[0].text) == ("", "<|endoftext|>" * 3)


def test_tools_that_the_template_ignores_are_refused() -> None:
    served = Served(loaded=load("{% for m in messages %}{{ m['content'] }}{% endfor %}"))
    try:
        always = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        tools = [{"type": "function", "function": {"name": "f"}}]
        with pytest.raises(openai.BadRequestError, match="the chat template does not use tools"):
            served.client.chat.completions.create(**always, tools=tools)
        served.client.chat.completions.create(**always, tools=tools, tool_choice="none")
    finally:
        served.close()


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no system role') }}", "the chat template refuses the conversation: no system role"),
        ("{% for i in range(9) %}{% for j in range(10 ** 5) %}", "the chat template is wrong in line 1"),
        ("{{ messages[0].content.x.y }}", "has no attribute 'x'"),
        ("", "the prompt is empty"),
        (None, "tiny has no chat template"),
    ],
)
def test_a_template_that_fails_is_a_400_and_the_server_goes_on(template: str | None, message: str) -> None:
    served = Served(loaded=load(template))
    try:
        with pytest.raises(openai.BadRequestError, match=message):
            served.client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}])
        assert served.client.completions.create(model="tiny", prompt="x", max_tokens=2).usage.completion_tokens == 2
    finally:
        served.close()


def test_token_ids_are_returned_where_they_are_asked_for(served: Served) -> None:
    """Whole answers and streams have the ids that offline inference samples; other answers have none."""
    expected = offline([5, 17, 8], max_tokens=6, temperature=0)
    plain: dict[str, Any] = {"model": "tiny", "prompt": [5, 17, 8], "max_tokens": 6, "temperature": 0}
    asked = plain | {"extra_body": {"return_token_ids": True}}
    choice = served.client.completions.create(**asked).choices[0]
    assert (choice.prompt_token_ids, choice.token_ids) == ([5, 17, 8], expected.outputs[0].token_ids)
    events = [event.choices[0] for event in served.client.completions.create(**asked, stream=True)]
    assert events[0].prompt_token_ids == [5, 17, 8]
    assert [token for event in events for token in event.token_ids] == expected.outputs[0].token_ids
    assert not hasattr(served.client.completions.create(**plain).choices[0], "token_ids")

    messages = [{"role": "user", "content": "head"}]
    prompt = served.loaded.tokenizer.encode(render_chat(served.loaded, messages)).tolist()
    expected = offline(prompt, max_tokens=6, temperature=0)
    chat: dict[str, Any] = {"model": "tiny", "messages": messages, "max_tokens": 6, "temperature": 0}
    chat["extra_body"] = {"return_token_ids": True}
    answer = served.client.chat.completions.create(**chat)
    assert (answer.prompt_token_ids, answer.choices[0].token_ids) == (prompt, expected.outputs[0].token_ids)
    parts = list(served.client.chat.completions.create(**chat, stream=True))
    assert parts[0].prompt_token_ids == prompt
    assert [token for part in parts for token in part.choices[0].token_ids] == expected.outputs[0].token_ids


def test_a_model_without_tokenizer_takes_and_returns_token_ids() -> None:
    served = Served(loaded=replace(load(), tokenizer=None))
    try:
        for body, message in (
            ({"prompt": "x"}, "tiny has no tokenizer; send token ids instead of text"),
            ({"prompt": [5], "stop": "x"}, "tiny has no tokenizer; use stop_token_ids instead of stop"),
        ):
            with pytest.raises(openai.BadRequestError, match=message):
                served.client.completions.create(model="tiny", **body)
        with pytest.raises(openai.BadRequestError, match="tiny has no tokenizer; use completions with token ids"):
            served.client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}])
        choice = served.client.completions.create(
            model="tiny", prompt=[5, 17, 8], max_tokens=6, temperature=0, logprobs=2
        ).choices[0]
        expected = offline([5, 17, 8], max_tokens=6, temperature=0, logprobs=2).outputs[0]
        assert choice.token_ids == expected.token_ids
        assert choice.logprobs.tokens == [f"token_id:{token}" for token in expected.token_ids]
        tops = [{f"token_id:{token}": value for token, value in row.top.items()} for row in expected.logprobs]
        assert [top.keys() for top in choice.logprobs.top_logprobs] == [top.keys() for top in tops]
    finally:
        served.close()


def test_a_default_length_is_cut_to_the_context(served: Served) -> None:
    answer = served.client.completions.create(model="tiny", prompt=[5] * 195)
    assert answer.usage.completion_tokens == 5
    chat = served.client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}])
    assert chat.usage.total_tokens == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("completions", {"prompt": "x", "model": "other"}, 404, "model 'other' is not served here; 'tiny' is"),
        ("completions", {"prompt": "x", "nonsense": 1}, 400, "unknown field nonsense"),
        ("completions", {"prompt": []}, 400, "prompt is an empty list"),
        ("completions", {"prompt": [[]]}, 400, "the prompt is empty"),
        ("completions", {"prompt": [5, 900]}, 400, "token id 900 is not in the vocabulary of 300"),
        ("completions", {"prompt": [1] * 300}, 400, "the prompt has 300 tokens, but the model takes 200 in all"),
        (
            "completions",
            {"prompt": [1] * 150, "max_tokens": 51},
            400,
            "the prompt has 150 tokens and max_tokens is 51, but the model takes 200 in all; ask for 50 tokens or",
        ),
        ("completions", {"prompt": [-1]}, 400, "token id -1 is not in the vocabulary of 300"),
        ("completions", {"prompt": 1.5}, 400, "prompt: this is neither text nor token ids, nor a list of them"),
        ("completions", {"prompt": "x", "logit_bias": {"999": 1}}, 400, "logit_bias: token id 999 is not in the voc"),
        ("completions", {"prompt": "x", "stop_token_ids": [999]}, 400, "stop_token_ids: token id 999 is not in the"),
        ("completions", {"prompt": "x", "stream_options": {"a": 1}}, 400, "unknown field stream_options.a"),
        ("completions", {"prompt": "x", "temperature": -1}, 400, "temperature"),
        ("completions", {"prompt": "x", "n": 0}, 400, "n: "),
        ("completions", {"prompt": "x", "logit_bias": {"a": 1}}, 400, "logit_bias"),
        ("completions", {"prompt": "x", "best_of": 3}, 400, "best_of must be equal to n"),
        ("completions", {}, 400, "prompt: field required"),
        ("completions", {"prompt": "\ud800"}, 400, "half a surrogate pair"),
        ("chat/completions", {"messages": [{"role": "user", "content": "\udfff"}]}, 400, "half a surrogate pair"),
        ("chat/completions", {"messages": []}, 400, "messages is empty"),
        ("chat/completions", {"messages": {"role": "user"}}, 400, "messages: this is no list of messages"),
        ("chat/completions", {"messages": [{"content": "x"}]}, 400, "message 1 has no role"),
        ("chat/completions", {"messages": [{"role": "user"}]}, 400, "message 1 has no content"),
        ("chat/completions", {"messages": [{"role": "asistant", "content": "x"}]}, 400, "unknown role 'asistant'"),
        ("chat/completions", {"messages": [{"role": "user", "content": 3}]}, 400, "content is neither text nor a list"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            400,
            "message 1 has a part of type 'image_url'; only text is supported",
        ),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}, 400, "logprobs"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"messages": []}},
            400,
            "'messages' is no template argument; a conversation has its own messages",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": "x"},
            400,
            "chat_template_kwargs: this is no JSON object",
        ),
    ],
)
def test_wrong_requests_are_the_client_s_fault(served: Served, path: str, body: Any, status: int, message: str) -> None:
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{served.url}/v1/{path}", content=json.dumps(body), headers=headers)
    assert (answer.status_code, message in answer.json()["error"]["message"]) == (status, True), answer.text


def test_an_error_names_the_sampling_parameter(served: Served) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        served.client.completions.create(model="tiny", prompt="x", temperature=-1)
    assert raised.value.param == "temperature"


def test_bodies_that_are_no_json_or_too_large_are_refused(served: Served) -> None:
    answer = httpx.post(f"{served.url}/v1/completions", content=b"{nonsense", headers=JSON)
    assert (answer.status_code, "not JSON" in answer.text) == (400, True)
    plain = {"Content-Type": "text/plain"}
    answer = httpx.post(f"{served.url}/v1/completions", content=b'{"prompt": "a"}', headers=plain)
    assert (answer.status_code, "Content-Type is not application/json" in answer.text) == (400, True)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n"
    with socket.create_connection(served.socket.getsockname()) as raw:
        raw.sendall(head)
        assert b" 413 " in raw.recv(200)


def test_a_client_that_leaves_frees_its_blocks(served: Served) -> None:
    asked = {"model": "tiny", "prompt": [7] * 20, "max_tokens": 170, "ignore_eos": True}
    started = served.engine.counts.prompt_tokens
    with httpx.stream("POST", f"{served.url}/v1/completions", json=asked | {"stream": True}, timeout=60) as answer:
        next(answer.iter_lines())
    eventually(lambda: not served.engine.busy)
    with socket.create_connection(served.socket.getsockname()) as raw:
        body = json.dumps(asked | {"n": 8}).encode()
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        raw.sendall(f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        eventually(lambda: served.engine.counts.prompt_tokens > started + 20)
    eventually(lambda: not served.engine.busy)
    assert served.engine.pool.free == served.engine.pool.count


def test_metrics_and_health(served: Served) -> None:
    served.client.completions.create(model="tiny", prompt="def", max_tokens=3)
    text = httpx.get(f"{served.url}/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values["headway_output_tokens_total"]) == served.engine.counts.output_tokens
    assert float(values["headway_ttft_seconds_count"]) >= 1
    assert float(values["headway_kv_cache_usage"]) == 0
    assert httpx.get(f"{served.url}/health").json() == {"status": "ok"}
    assert [model.id for model in served.client.models.list()] == ["tiny"]


def test_key_queue_and_drain() -> None:
    server = Served(api_key="only-for-tests", max_waiting=0, max_sequences=1)
    try:
        stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            stranger.completions.create(model="tiny", prompt="x")
        first = server.client.completions.create(
            model="tiny", prompt="x", max_tokens=150, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(first))
        with pytest.raises(openai.RateLimitError) as refused:
            server.client.completions.create(model="tiny", prompt="x")
        assert refused.value.response.headers["retry-after"] == "1"
        first.close()
        eventually(lambda: not server.engine.busy)
        server.service.draining = True
        with pytest.raises(openai.InternalServerError) as ending:
            server.client.completions.create(model="tiny", prompt="x")
        assert ending.value.status_code == 503
    finally:
        server.close()


@pytest.mark.parametrize(("draining", "error"), [(True, Draining), (False, asyncio.CancelledError)])
def test_requests_that_the_end_of_the_server_cuts_off_are_told_so(draining: bool, error: type[BaseException]) -> None:
    service = EngineService(TextEngine(load(), EngineOptions(cache_tokens=2000)))

    async def cut_off() -> None:
        async def read() -> None:
            async for _ in service.stream([1, 2, 3], SamplingParams(max_tokens=150, ignore_eos=True)):
                started.set()

        started = asyncio.Event()
        request = asyncio.create_task(read())
        await started.wait()
        service.draining = draining
        request.cancel()
        await request

    with pytest.raises(error):
        asyncio.run(cut_off())
    service.close()
    assert service.open == 0


def test_a_failed_pass_ends_its_requests_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Served()
    run = server.engine.runner.run

    def out_of_memory(*_: Any) -> None:
        monkeypatch.setattr(server.engine.runner, "run", run)
        raise torch.OutOfMemoryError("no memory")

    try:
        monkeypatch.setattr(server.engine.runner, "run", out_of_memory)
        with pytest.raises(openai.InternalServerError, match="the device ran out of memory"):
            server.client.completions.create(model="tiny", prompt="x")
        assert server.client.completions.create(model="tiny", prompt="x", max_tokens=2).usage.completion_tokens == 2
        assert server.engine.pool.free == server.engine.pool.count
    finally:
        server.close()


def test_adapters_are_listed_and_requests_name_them() -> None:
    expected = {name: LLM(merged(name)).generate(PROMPT, GREEDY)[0].outputs[0].token_ids for name in (None, *ADAPTERS)}
    served = Served(loaded=adapted())
    try:
        listed = [(model.id, getattr(model, "parent", None)) for model in served.client.models.list()]
        assert listed == [("tiny", None), ("sql", "tiny"), ("prose", "tiny")]
        for name, ids in expected.items():
            answer = served.client.completions.create(
                model=name or "tiny", prompt=PROMPT, max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
            )
            assert answer.model == (name or "tiny")
            assert answer.choices[0].text == served.service.engine.decode(ids)
        with pytest.raises(openai.NotFoundError, match="'sql', 'prose' are"):
            served.client.completions.create(model="code", prompt=PROMPT)
    finally:
        served.close()
