"""A conversation to training samples: texts cut where the model's turns begin and end.

The text of a sample before a turn of the model is what the server would render for the messages before that turn, with
the generation prompt. If the renderings of a conversation extend each other, turn after turn, one sample has all its
turns; if not (a template may drop earlier reasoning), each turn has a sample of its own.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from headway.data.chat_rows import BadRow, Conversation
from headway.data.chat_template import ChatTemplate, write

ROLES = ("other", "system", "user", "assistant", "tool")
"""Roles by their number in a dataset; templates may know others."""
ASSISTANT = ROLES.index("assistant")


class TextPiece(NamedTuple):
    """A stretch of a sample's text that belongs to one message, its header and end included."""

    text: str
    role: int
    trained: bool
    """Whether it is a turn of the model that the loss may count."""


Sample = tuple[TextPiece, ...]


def role_number(role: str) -> int:
    """Return the number of a role: 0 for one that is not among the usual."""
    return ROLES.index(role) if role in ROLES else 0


Render = Callable[[int, bool], str]
"""Renders the first messages of a conversation, with the generation prompt or without."""


def split_samples(conversation: Conversation, render: Render, ends: re.Pattern[str] | None) -> list[Sample]:
    """Return the samples of a conversation; `ends` matches an added token at the end of a text.

    Raise BadRow if there is nothing to train on, or if an answer does not continue the server's prompt.
    """
    turns = trained_turns(conversation)
    if not turns:
        raise BadRow("no assistant turn to train on")
    before = {index: render(index, True) for index in turns}
    after = {index: render(index + 1, False) for index in turns}
    for index in turns:
        if not after[index].startswith(before[index]):
            raise BadRow(
                f"message {index + 1}: the template writes this answer differently from how its generation prompt "
                "begins one"
            )
    if all(before[later].startswith(after[earlier]) for earlier, later in pairwise(turns)):
        return [_whole(conversation, render, before, after, ends)]
    return [
        (TextPiece(before[index], role_number("user"), False), *_answer(after[index][len(before[index]) :], ends))
        for index in turns
    ]


def prompt_sample(conversation: Conversation, render: Render) -> list[Sample]:
    """Return the one sample of a prompt: what the server would render for it, with the generation prompt."""
    text = render(len(conversation.messages), True)
    return [(TextPiece(text, role_number("user"), False),)]


def _whole(
    conversation: Conversation,
    render: Render,
    before: dict[int, str],
    after: dict[int, str],
    ends: re.Pattern[str] | None,
) -> Sample:
    """Return one sample of all messages up to the last trained turn."""
    last = max(after)
    text = after[last]
    pieces: list[TextPiece] = []
    start = 0
    for index in range(last + 1):
        if index in after:
            pieces += _answer(text[len(before[index]) : len(after[index])], ends)
            start = len(after[index])
            continue
        end = len(before[index + 1]) if index + 1 in before else _end_of(render, index, text, start)
        if end is not None:
            role = role_number(str(conversation.messages[index]["role"]))
            pieces.append(TextPiece(text[start:end], role, False))
            start = end
    return tuple(pieces)


def _answer(text: str, ends: re.Pattern[str] | None) -> list[TextPiece]:
    """Return an answer up to its end-of-turn token, and white space after that, which the model never writes."""
    stripped = text.rstrip()
    if len(stripped) < len(text) and ends is not None and ends.search(stripped):
        return [TextPiece(stripped, ASSISTANT, True), TextPiece(text[len(stripped) :], ASSISTANT, False)]
    return [TextPiece(text, ASSISTANT, True)]


def _end_of(render: Render, index: int, text: str, start: int) -> int | None:
    """Return where a message that no answer follows ends; None if the template does not show."""
    try:
        prefix = render(index + 1, False)
    except Exception:  # a template may refuse a conversation that ends here
        return None
    return len(prefix) if start < len(prefix) < len(text) and text.startswith(prefix) else None


def render_with(template: ChatTemplate, conversation: Conversation) -> Render:
    """Return what renders the beginnings of a conversation; call it inside `guarded`."""
    if conversation.arguments:
        template = replace(template, arguments={**template.arguments, **conversation.arguments})
    compiled = template.compiled()

    def render(count: int, prompt: bool) -> str:
        return write(compiled, template.names(conversation.messages[:count], conversation.tools, prompt))

    return render


def trained_turns(conversation: Conversation) -> list[int]:
    """Return the assistant messages after the prompt, without those whose own weight is 0 (OpenAI's format).

    The server needs a message to answer, so a conversation's first is never trained on.
    """
    return [
        index
        for index, message in enumerate(conversation.messages)
        if index >= max(conversation.context, 1) and message["role"] == "assistant" and message.get("weight") != 0
    ]
