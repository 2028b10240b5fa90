"""Rows of prompts for reinforcement learning: a prompt, and fields for the rewards.

| key | meaning |
|---|---|
| `prompt` | a string, or messages |
| `messages` | instead of `prompt`: messages that end with a user's or a tool's |
| `system`, `tools`, `chat_template_kwargs` | what the template also gets |

All other fields of a row are kept.
"""

import json
from collections.abc import Mapping
from typing import Any

from headway.data.chat_rows import (
    BadRow,
    ChatRow,
    Conversation,
    Message,
    checked_messages,
    parse_messages,
    row_arguments,
    row_tools,
    type_name,
)

PROMPT_KEYS = ("prompt", "messages", "system", "tools", "chat_template_kwargs")
"""Keys of the prompt; others are fields."""
MOST_BYTES = 1 << 20
"""Of a row's text and fields, as JSON."""


def parse_prompt(row: Mapping[str, Any]) -> ChatRow:
    """Return the prompt of a row, with its text and its fields as a line of JSON; raise BadRow if it has none."""
    messages = checked_messages(_prompt(row))
    last = messages[-1]["role"]
    if last == "assistant":
        raise BadRow("the prompt ends with an assistant turn: move it to another field")
    if last in ("system", "developer"):
        raise BadRow(f"the prompt ends with a {last} message, which asks nothing")
    conversation = Conversation(messages, len(messages), row_tools(row), row_arguments(row))
    fields = {str(key): value for key, value in row.items() if key not in PROMPT_KEYS}
    return ChatRow("prompts", (conversation,), line=_line(text_of(messages), fields))


def text_of(messages: list[Message]) -> str:
    """Return what a prompt says, for people: its one message of the user, or all messages as JSON."""
    asked = [message for message in messages if message["role"] != "system"]
    if len(asked) == 1 and isinstance(content := asked[0].get("content"), str):
        return content
    return json.dumps(messages, ensure_ascii=False)


def _prompt(row: Mapping[str, Any]) -> list[Message]:
    names = [name for name in ("prompt", "messages") if row.get(name) is not None]
    if not names:
        keys = ", ".join(sorted(str(key) for key, value in row.items() if value is not None)) or "none"
        raise BadRow(f"no prompt or messages; it has {keys}")
    if len(names) == 2:
        raise BadRow("both prompt and messages: rename one of them")
    messages = parse_messages(row[names[0]], names[0], "user")
    system = row.get("system")
    if system is None or system == "":
        return messages
    if not isinstance(system, str):
        raise BadRow(f"system is {type_name(system)}, not a string")
    if messages and messages[0]["role"] == "system":
        raise BadRow(f"system, and {names[0]} begins with a system message")
    return [{"role": "system", "content": system}, *messages]


def _line(text: str, fields: Mapping[str, Any]) -> str:
    try:
        line = json.dumps({"text": text, "fields": fields}, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        raise BadRow(_why_no_json(fields)) from None
    if len(line) > MOST_BYTES:
        raise BadRow(f"its text and fields take {len(line):,} bytes as JSON, more than {MOST_BYTES:,}")
    return line


def _why_no_json(fields: Mapping[str, Any]) -> str:
    """Return which field cannot be written as JSON."""
    for name, value in fields.items():
        try:
            json.dumps(value, allow_nan=False)
        except ValueError:
            return f"field {name} holds a number that is not finite"
        except (TypeError, RecursionError):
            what = type(value).__name__
            return f"field {name} is no JSON value ({what})"
    return "the messages are no JSON value"
