"""Checks what an environment returned, and turns it into the JSON that its process sends."""

import json
from collections.abc import Mapping
from typing import Any

from headway.errors import HeadwayError
from headway.rl.environments.turns import Reply
from headway.rl.rewards.value import checked, shown

MOST_TEXT = 100_000
"""Characters of a reply's text, or of its messages as JSON."""
MOST_STATE = 100_000
"""Characters of a state as JSON."""


def checked_reply(reply: Any) -> dict[str, Any]:
    """Return a reply as JSON; raise HeadwayError with the value that is wrong."""
    if not isinstance(reply, Reply):
        raise HeadwayError(
            f"returned {shown(reply)}, which is no Reply", hint="from headway.rl.environments import Reply"
        )
    messages = _json(list(reply.messages), "messages", MOST_TEXT)
    if not isinstance(reply.text, str):
        raise HeadwayError(f"the reply's text is {shown(reply.text)}, not str")
    if len(reply.text) > MOST_TEXT:
        raise HeadwayError(f"the reply's text has {len(reply.text):,} characters, more than {MOST_TEXT:,}")
    if not all(isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in messages):
        raise HeadwayError(f"the reply's messages are {shown(reply.messages)}", hint='{"role": "tool", "content": "4"}')
    if reply.text and messages:
        raise HeadwayError("the reply has both a text and messages", hint="use one of them")
    if not (reply.done or reply.text or messages):
        raise HeadwayError("the reply is empty, but not done", hint="Reply(done=True) ends the answer")
    return {
        "text": reply.text,
        "messages": messages,
        "done": bool(reply.done),
        "reward": None if reply.reward is None else checked(reply.reward),
        "state": _json(reply.state, "state", MOST_STATE),
    }


def _json(value: Any, name: str, most: int) -> Any:
    """Return a value as it is after JSON."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise HeadwayError(f"the reply's {name} cannot be JSON: {error}") from None
    if len(text) > most:
        raise HeadwayError(f"the reply's {name} has {len(text):,} characters as JSON, more than {most:,}")
    return json.loads(text)
