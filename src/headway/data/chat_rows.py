"""Rows of chat and preference data: which format each has, and the conversations in it.

| format | keys |
|---|---|
| OpenAI | `messages`, optionally `tools` |
| ShareGPT | `conversations` of `from` and `value` |
| prompt and completion | `prompt`, `completion`: strings or lists of messages |
| preference | `chosen`, `rejected`, with `prompt` or as whole conversations |
| labelled | any of the first three with `label`: whether the answer is desirable |

A row may have a `weight`, and `chat_template_kwargs` for the template. Prompts for reinforcement learning have rows of
their own: see `headway.data.prompt_rows`.
"""

import json
import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from headway.data.chat_template import reserved_argument

Kind = Literal["chat", "pairs", "labelled", "prompts"]
Message = dict[str, Any]

ROW_KEYS = (
    "messages", "conversations", "prompt", "completion", "chosen", "rejected",
    "system", "tools", "label", "weight", "chat_template_kwargs",
)  # fmt: skip
"""Keys that mean something; others are ignored."""
_SHAREGPT_ROLES = {
    "human": "user", "user": "user",
    "gpt": "assistant", "assistant": "assistant", "bot": "assistant", "chatgpt": "assistant", "model": "assistant",
    "system": "system",
    "tool": "tool", "observation": "tool", "function_response": "tool",
    "function_call": "assistant",
}  # fmt: skip
_SAID_KEYS = ("content", "tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")


class BadRow(Exception):
    """Why a row cannot be used."""


class Conversation(NamedTuple):
    """Messages, of which the first `context` are not trained on."""

    messages: list[Message]
    context: int = 0
    tools: list[dict[str, Any]] | None = None
    arguments: Mapping[str, Any] | None = None
    """Arguments of the template for this row."""


class ChatRow(NamedTuple):
    """One row: a conversation, or the chosen and the rejected one of a pair."""

    kind: Kind
    conversations: tuple[Conversation, ...]
    weight: float = 1.0
    desirable: bool = True
    line: str = ""
    """Of a prompt, what is stored beside its tokens."""


def parse_row(row: Mapping[str, Any]) -> ChatRow:
    """Return the conversations of a row; raise BadRow if it has none."""
    tools, arguments = row_tools(row), row_arguments(row)
    weight = _weight(row.get("weight"))
    if row.get("chosen") is not None or row.get("rejected") is not None:
        conversations = [Conversation(m, context, tools, arguments) for m, context in _pair(row)]
        return ChatRow("pairs", tuple(conversations), weight)
    messages, context = _conversation(row)
    label = row.get("label")
    if label is not None and not isinstance(label, bool):
        raise BadRow(f"label is {label!r}, not true or false")
    if label is not None and not context:  # the label is that of the last answer
        context = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=0)
    conversation = Conversation(checked_messages(messages), context, tools, arguments)
    return ChatRow("chat" if label is None else "labelled", (conversation,), weight, label is not False)


def with_other_answers(rows: list[ChatRow], before: ChatRow | None) -> list[ChatRow]:
    """Give each labelled row a second conversation: its prompt with the answer of the row before it.

    KTO measures on these how far the model has moved. The first row of all takes the next one's answer.
    """
    others = [before or (rows[1] if len(rows) > 1 else rows[0]), *rows[:-1]]
    return [
        row._replace(conversations=(row.conversations[0], _answered(row.conversations[0], other.conversations[0])))
        for row, other in zip(rows, others, strict=True)
    ]


def _answered(prompt: Conversation, other: Conversation) -> Conversation:
    answer = other.messages[other.context :]
    return prompt._replace(messages=prompt.messages[: prompt.context] + answer)


def _conversation(row: Mapping[str, Any]) -> tuple[list[Message], int]:
    """Return the messages of a row, and how many of them are a prompt."""
    if row.get("messages") is not None:
        return parse_messages(row["messages"], "messages", "user"), 0
    if row.get("conversations") is not None:
        return _system(row) + parse_messages(row["conversations"], "conversations", "user"), 0
    if row.get("prompt") is not None and row.get("completion") is not None:
        prompt = _system(row) + parse_messages(row["prompt"], "prompt", "user")
        return prompt + parse_messages(row["completion"], "completion", "assistant"), len(prompt)
    keys = ", ".join(sorted(str(key) for key, value in row.items() if value is not None)) or "none"
    raise BadRow(f"no messages, conversations, prompt and completion, or chosen and rejected; it has {keys}")


def _pair(row: Mapping[str, Any]) -> list[tuple[list[Message], int]]:
    """Return the chosen and the rejected conversation, and how many messages of each are the prompt."""
    if row.get("chosen") is None or row.get("rejected") is None:
        raise BadRow(f"no {'rejected' if row.get('rejected') is None else 'chosen'} answer")
    answers = [parse_messages(row[name], name, "assistant") for name in ("chosen", "rejected")]
    before = row.get("prompt") if row.get("prompt") is not None else row.get("conversations")
    whole = all(answer and answer[0]["role"] != "assistant" for answer in answers)
    if whole:
        shared = 0
        while shared < min(map(len, answers)) and answers[0][shared] == answers[1][shared]:
            shared += 1
        conversations = [(answer, shared) for answer in answers]
    elif before is None:
        raise BadRow("no prompt, and chosen and rejected begin with an answer")
    else:
        prompt = _system(row) + parse_messages(before, "prompt", "user")
        conversations = [(prompt + answer, len(prompt)) for answer in answers]
    if conversations[0][0] == conversations[1][0]:
        raise BadRow("chosen and rejected are equal")
    return [(checked_messages(messages), context) for messages, context in conversations]


def parse_messages(value: Any, name: str, role: str) -> list[Message]:
    """Return a list of messages; a string is one message of the role."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list):
        raise BadRow(f"{name} is {type_name(value)}, not a list of messages")
    return [_message(message, name, index) for index, message in enumerate(value)]


def _message(message: Any, name: str, index: int) -> Message:
    if not isinstance(message, Mapping):
        raise BadRow(f"{name}[{index}] is {type_name(message)}, not a message")
    if isinstance(role := message.get("role"), str):
        # Parquet has every key in every row: one that is null is not there.
        return {key: value for key, value in message.items() if value is not None or key == "content"}
    speaker, text = message.get("from"), message.get("value")
    if not isinstance(speaker, str) or not isinstance(text, str):
        raise BadRow(f"{name}[{index}] has neither role and content nor from and value")
    role = _SHAREGPT_ROLES.get(speaker)
    if role is None:
        raise BadRow(f"{name}[{index}] is from {speaker!r}; known: {', '.join(_SHAREGPT_ROLES)}")
    if speaker != "function_call":
        return {"role": role, "content": text}
    try:
        call = json.loads(text)
    except ValueError:
        raise BadRow(f"{name}[{index}] is a function_call, but not JSON") from None
    calls = [{"type": "function", "function": entry} for entry in (call if isinstance(call, list) else [call])]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def checked_messages(messages: list[Message]) -> list[Message]:
    """Return messages; raise BadRow if the template would have nothing to write for an assistant's."""
    for index, message in enumerate(messages):
        if message["role"] == "assistant" and not any(message.get(key) for key in _SAID_KEYS):
            raise BadRow(f"message {index + 1} is an assistant turn without text or tool calls")
    if not messages:
        raise BadRow("no messages")
    return messages


def _system(row: Mapping[str, Any]) -> list[Message]:
    system = row.get("system")
    return [{"role": "system", "content": system}] if isinstance(system, str) and system else []


def row_arguments(row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return a row's arguments of the template."""
    arguments = row.get("chat_template_kwargs")
    if arguments is not None and not isinstance(arguments, Mapping):
        raise BadRow(f"chat_template_kwargs is {type_name(arguments)}, not an object")
    if name := reserved_argument(arguments or {}):
        raise BadRow(f"chat_template_kwargs has {name!r}, which the conversation gives")
    return arguments


def row_tools(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return a row's tools."""
    tools = row.get("tools")
    if isinstance(tools, str):  # as in files whose columns have one type
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError:
            raise BadRow("tools is a string, but not JSON") from None
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow(f"tools is {type_name(tools)}, not a list of objects")
    return tools


def _weight(weight: Any) -> float:
    if weight is None:
        return 1.0
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
        raise BadRow(f"weight is {weight!r}, not a number of at least 0")
    return float(weight)


def type_name(value: Any) -> str:
    """Return what a value of JSON is, with its article."""
    names = {
        int: "a number",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "an object",
        bool: "a truth value",
    }
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")
