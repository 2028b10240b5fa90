"""A conversation as the text that a loaded model takes."""

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
