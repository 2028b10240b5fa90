"""Messages as every chat template takes them. The server and training share this, so that both see the same text.

Content is a string, as plain templates expect it: text parts of OpenAI's form are joined with line ends (as vLLM does),
and null, which an assistant's turn with tool calls may have, is empty. A template that goes through the parts itself
gets them as they are. Parts that are no text, and roles that neither are usual nor occur in the template, are errors.
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from headway.errors import RequestError

KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
ASKING_ROLES = ("system", "developer", "user")
"""Roles whose messages must say something; others may have tool calls or results in other keys."""
_GOES_THROUGH_PARTS = re.compile(r"""\bfor\s+\w+\s+in\s+\w+(?:\.content\b|\[\s*['"]content['"]\s*\])""")


def normal_messages(messages: Sequence[Mapping[str, Any]], template: str) -> list[dict[str, Any]]:
    """Return the messages of a conversation for a template; raise RequestError for one that it cannot take."""
    keeps_parts = _goes_through_parts(template)
    return [_normal(message, number, template, keeps_parts) for number, message in enumerate(messages, start=1)]


def _normal(message: Any, number: int, template: str, keeps_parts: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"message {number} is no object", hint='for example {"role": "user", "content": "Hello"}')
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise RequestError(f"message {number} has no role", hint=f"one of {', '.join(KNOWN_ROLES)}")
    if role not in KNOWN_ROLES and f"'{role}'" not in template and f'"{role}"' not in template:
        raise RequestError(f"message {number} has the unknown role {role!r}", hint=f"one of {', '.join(KNOWN_ROLES)}")
    if type(content) is str:
        return dict(message)
    if role in ASKING_ROLES and "content" not in message:
        raise RequestError(f"message {number} has no content", hint='for example "content": "Hello"')
    if content is None:
        return {**message, "content": ""}
    if not isinstance(content, list):
        raise RequestError(
            f"message {number}: content is neither text nor a list of parts", hint='for example "content": "Hello"'
        )
    texts = [_text(part, number) for part in content]
    return {**message, "content": content if keeps_parts else "\n".join(texts)}


def _text(part: Any, number: int) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text":
        what = "without a type" if kind is None else f"of type {kind!r}"
        raise RequestError(f"message {number} has a part {what}", hint="only text is supported")
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"message {number} has a text part without text", hint='{"type": "text", "text": "..."}')
    return text


@lru_cache(maxsize=8)
def _goes_through_parts(template: str) -> bool:
    return _GOES_THROUGH_PARTS.search(template) is not None
