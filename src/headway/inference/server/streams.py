"""Answers as streams of events, and clients that leave before their answer is complete."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Coroutine
from contextlib import aclosing
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse

from headway.errors import HeadwayError
from headway.inference.server.responses import error_body


async def event_stream(events: AsyncIterator[dict[str, Any]]) -> StreamingResponse:
    """Stream server-sent events. The first is awaited here, so that a refused request has a status of its own."""
    first = await anext(events, None)

    async def lines() -> AsyncIterator[str]:
        async with aclosing(events):  # type: ignore[type-var]
            if first is not None:
                yield f"data: {json.dumps(first)}\n\n"
            try:
                async for event in events:
                    yield f"data: {json.dumps(event)}\n\n"
            except HeadwayError as error:
                yield f"data: {json.dumps(error_body(error.message, 'server_error'))}\n\n"
            yield "data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


async def unless_gone(request: Request, work: Coroutine[Any, Any, dict[str, Any]]) -> Any:
    """Return the answer; if the client disconnects before, cancel the work."""
    answer, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)
            return PlainTextResponse("", status_code=499)
        return JSONResponse(answer.result())
    finally:
        gone.cancel()
        answer.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def all_of(works: list[Awaitable[Any]]) -> list[Any]:
    """Await all; when one fails, cancel the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def merged(streams: list[AsyncIterator[Any]]) -> AsyncIterator[tuple[int, Any]]:
    """Yield (number of the stream, output) as they come."""
    outputs: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()

    async def pump(number: int, stream: AsyncIterator[Any]) -> None:
        async with aclosing(stream):  # type: ignore[type-var]
            try:
                async for output in stream:
                    outputs.put_nowait((number, output))
            except HeadwayError as error:
                outputs.put_nowait((number, error))
            else:
                outputs.put_nowait((number, None))

    tasks = [asyncio.ensure_future(pump(number, stream)) for number, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            number, output = await outputs.get()
            if isinstance(output, HeadwayError):
                raise output
            if output is None:
                left -= 1
            else:
                yield number, output
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
