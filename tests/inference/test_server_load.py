"""Two hundred clients that stream, stall, disconnect and send nonsense: every answer is right, and nothing leaks."""

import asyncio
import json
import random
import time
from collections import Counter
from typing import Any

import httpx
import pytest
from served_model import Served, load

from eventually import eventually
from headway.inference import LLM, EngineOptions, SamplingParams

CLIENTS = 200
DURATION_S = 60.0
NONSENSE: list[tuple[str, Any]] = [
    ("completions", b"{"),
    ("completions", {"model": "tiny", "prompt": "x", "nonsense": 1}),
    ("completions", {"model": "tiny", "prompt": [5, 10**9]}),
    ("completions", {"model": "tiny", "prompt": "", "max_tokens": -1}),
    ("completions", {"model": "tiny", "prompt": [1] * 500}),
    ("completions", {"model": "tiny", "prompt": "x", "temperature": "hot"}),
    ("chat/completions", {"model": "tiny", "messages": [{"content": "no role"}]}),
    ("chat/completions", {"model": "other", "messages": [{"role": "user", "content": "x"}]}),
    ("chat/completions", [1, 2, 3]),
]


def requests() -> list[dict[str, Any]]:
    draw = random.Random(0)
    return [
        {
            "model": "tiny",
            "prompt": [draw.randrange(300) for _ in range(draw.randint(1, 60))],
            "max_tokens": draw.randint(1, 60),
            "temperature": draw.choice([0, 0.7, 1.3]),
            "seed": number,
        }
        for number in range(24)
    ]


def expected(request: dict[str, Any]) -> str:
    params = {key: request[key] for key in ("max_tokens", "temperature", "seed")}
    llm = LLM(load(), options=EngineOptions(cache_tokens=2000))
    return llm.generate([request["prompt"]], SamplingParams(**params))[0].text


class Clients:
    """Clients of one server until a deadline."""

    def __init__(self, url: str, deadline: float) -> None:
        self.url, self.deadline = url, deadline
        self.asked = [(request, expected(request)) for request in requests()]
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def run(self) -> None:
        # A server may close an idle connection just when a client uses it again: each request has its own.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=f"{self.url}/v1/", timeout=120, limits=limits) as http:
            await asyncio.gather(*(self.client(http, random.Random(number)) for number in range(CLIENTS)))

    async def client(self, http: httpx.AsyncClient, draw: random.Random) -> None:
        kinds = [self.whole, self.stream, self.stall, self.disconnect, self.nonsense]
        while time.monotonic() < self.deadline:
            kind = draw.choice(kinds)
            self.counts[f"{kind.__name__} {await kind(http, draw)}"] += 1

    async def whole(self, http: httpx.AsyncClient, draw: random.Random) -> int:
        request, text = draw.choice(self.asked)
        answer = await http.post("completions", json=request)
        if answer.status_code == 200:
            self.check(answer.json()["choices"][0]["text"], text)
        return self.status(answer)

    async def stream(self, http: httpx.AsyncClient, draw: random.Random, pause_s: float = 0.0) -> int:
        request, text = draw.choice(self.asked)
        async with http.stream("POST", "completions", json=request | {"stream": True}) as answer:
            if answer.status_code == 200:
                pieces = []
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        pieces.append(json.loads(line[6:])["choices"][0]["text"])
                        await asyncio.sleep(pause_s)
                        pause_s = 0.0
                self.check("".join(pieces), text)
            return self.status(answer)

    async def stall(self, http: httpx.AsyncClient, draw: random.Random) -> int:
        return await self.stream(http, draw, pause_s=2.0)

    async def disconnect(self, http: httpx.AsyncClient, draw: random.Random) -> int:
        request, _ = draw.choice(self.asked)
        async with http.stream("POST", "completions", json=request | {"stream": True}) as answer:
            lines = answer.aiter_lines()
            for _ in range(draw.randint(0, 6)):
                await anext(lines, None)
            return self.status(answer)

    async def nonsense(self, http: httpx.AsyncClient, draw: random.Random) -> int:
        path, body = draw.choice(NONSENSE)
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = await http.post(path, content=content, headers={"Content-Type": "application/json"})
        if not 400 <= answer.status_code < 500 or "error" not in answer.json():
            self.wrong.append(f"{body!r}: {answer.status_code} {answer.text}")
        return answer.status_code

    def check(self, text: str, wanted: str) -> None:
        if text != wanted:
            self.wrong.append(f"{text!r} instead of {wanted!r}")

    def status(self, answer: httpx.Response) -> int:
        refused = answer.status_code == 429 and int(answer.headers["Retry-After"]) > 0
        if answer.status_code != 200 and not refused:
            self.wrong.append(f"{answer.status_code} {answer.headers}")
        return answer.status_code


@pytest.mark.slow
def test_two_hundred_clients_for_a_minute() -> None:
    server = Served(max_waiting=60, max_sequences=32)
    try:
        clients = Clients(server.url, time.monotonic() + DURATION_S)
        asyncio.run(clients.run())
        assert not clients.wrong, clients.wrong[:5]
        wanted = ("whole 200", "stream 200", "stall 200", "disconnect 200", "nonsense 400", "whole 429")
        assert all(clients.counts[kind] for kind in wanted), clients.counts
        engine, pool = server.engine, server.engine.pool
        eventually(lambda: not engine.busy, lambda: (engine.waiting, engine.running))
        assert pool.free == pool.count, "a block leaked"
        assert pool.holders == [0] * pool.count
        assert (server.service.open, server.service._clients) == (0, {})
        request, text = clients.asked[0]
        assert httpx.post(f"{server.url}/v1/completions", json=request, timeout=60).json()["choices"][0]["text"] == text
    finally:
        server.close()
