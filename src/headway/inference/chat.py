"""A conversation, or what follows a turn of the model, as the text that a loaded model takes."""

from collections.abc import Mapping, Sequence
from typing import Any

from headway.data.chat_template import ChatTemplate
from headway.errors import RequestError
from headway.inference.load import LoadedModel


def render_chat(
    loaded: LoadedModel,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    template_arguments: Mapping[str, Any] | None = None,
) -> str:
    """Return the text of a conversation, up to where the model's turn begins."""
    if loaded.chat_template is None:
        raise RequestError(
            f"{loaded.name} has no chat template",
            hint="send a prompt instead of messages, or use a model that was tuned for chat",
        )
    if not messages:
        raise RequestError("messages is empty", hint="send at least one message")
    template = ChatTemplate(loaded.chat_template, loaded.special_tokens, template_arguments or {})
    return template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt)


STAND_IN = "This stands for a turn."
"""A turn of the model that is rendered in place of what it wrote, whose tokens are not to be encoded again."""


def render_after_turn(loaded: LoadedModel, messages: Sequence[Mapping[str, Any]]) -> str:
    """Return what the chat template writes from the end of a turn of the model, over messages, to its next turn."""
    before = [{"role": "user", "content": "A question."}, {"role": "assistant", "content": STAND_IN}]
    _, turn, after = render_chat(loaded, [*before, *messages]).partition(STAND_IN)
    if not turn:
        raise RequestError(
            "the chat template does not write a turn of the model as it is", hint="reply with text instead of messages"
        )
    return after
