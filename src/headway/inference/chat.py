"""Chat templates: a conversation to the text that the model was trained on.

A template is code from a folder. It runs in jinja2's immutable sandbox, where it reaches no Python object beyond the
conversation, in a thread that is interrupted when it takes too long or writes too much.
"""

import ctypes
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from headway.errors import ModelError, RequestError
from headway.inference.load import LoadedModel

MOST_SECONDS = 5.0
MOST_CHARACTERS = 4_000_000
MOST_TEMPLATE = 1_000_000


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
            f"{loaded.name} has no chat template", hint="use completions, or a model that was tuned for chat"
        )
    if not messages:
        raise RequestError("messages is empty", hint="send at least one message")
    arguments = {
        **loaded.special_tokens,
        **(template_arguments or {}),
        "messages": [dict(message) for message in messages],
        "tools": None if tools is None else [dict(tool) for tool in tools],
        "add_generation_prompt": add_generation_prompt,
    }
    return _render(loaded.chat_template, arguments)


def _render(template: str, arguments: Mapping[str, Any]) -> str:
    import jinja2

    if len(template) > MOST_TEMPLATE:
        raise ModelError(f"the chat template has {len(template):,} characters, more than {MOST_TEMPLATE:,}")
    try:
        compiled = _compiled(template)
    except jinja2.TemplateError as error:
        raise ModelError(f"the chat template is wrong: {error}") from None
    try:
        return _within(MOST_SECONDS, partial(_written, compiled, arguments))
    except jinja2.TemplateError as error:
        raise RequestError(f"the chat template refuses the conversation: {error}") from None
    except _TooLong:
        raise RequestError(
            "the chat template does not end",
            hint=f"it may take {MOST_SECONDS:.0f} s and write {MOST_CHARACTERS:,} characters",
        ) from None
    except Exception as error:  # a template may raise anything
        raise RequestError(f"the chat template fails: {type(error).__name__}: {error}") from None


class _TooLong(BaseException):
    """A template takes too long, or writes too much. No template can catch it."""


def _written(compiled: Any, arguments: Mapping[str, Any]) -> str:
    text, size = [], 0
    for part in compiled.generate(**arguments, raise_exception=_raise, strftime_now=time.strftime):
        text.append(part)
        size += len(part)
        if size > MOST_CHARACTERS:
            raise _TooLong
    return "".join(text)


def _within(seconds: float, work: Callable[[], str]) -> str:
    """Return what `work` returns in a thread of its own, which is interrupted if it takes longer."""
    outcome: list[str | BaseException] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, name="chat-template", daemon=True)
    thread.start()
    thread.join(seconds)
    while thread.is_alive():
        assert thread.ident is not None
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_TooLong))
        thread.join(0.1)
    result = outcome[0]
    if isinstance(result, BaseException):
        raise result
    return result


@lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Environment(ImmutableSandboxedEnvironment):
        """Products and powers are small, so that no single operation takes long."""

        intercepted_binops = frozenset({"*", "**", "%"})

        def call_binop(self, _: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "*" and isinstance(left, int | float) and isinstance(right, int | float):
                return left * right
            if operator == "%" and not isinstance(left, str):
                return left % right
            raise jinja2.exceptions.SecurityError(f"{operator} of {type(left).__name__} is not allowed")

    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _to_json
    return environment.from_string(template)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)
