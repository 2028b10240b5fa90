"""Chat templates: a conversation to the text that the model was trained on. Server and training share this renderer.

A template is code from a folder. It runs in jinja2's immutable sandbox, where it reaches no Python object beyond the
conversation, in a thread that is interrupted when it takes too long or writes too much.
"""

import ctypes
import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

from headway.data.chat_messages import normal_messages
from headway.errors import DataError, ModelError, RequestError

TEMPLATE_FILE = "chat_template.jinja"
SETTINGS_FILE = "tokenizer_config.json"
MOST_SECONDS = 5.0
MOST_CHARACTERS = 4_000_000
MOST_TEMPLATE = 1_000_000
OF_THE_CONVERSATION = ("messages", "tools", "add_generation_prompt")
"""Names that a template gets from the conversation; no argument takes their place."""

Messages = Sequence[Mapping[str, Any]]
T = TypeVar("T")


@dataclass(frozen=True)
class ChatTemplate:
    """A template, the special tokens that it may name, and arguments of its own."""

    text: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Names that the template may use, such as bos_token."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further names, such as enable_thinking."""

    def __post_init__(self) -> None:
        if name := reserved_argument(self.arguments):
            raise RequestError(f"{name!r} is no template argument", hint=f"a conversation has its own {name}")

    def render(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the text of a conversation, up to where the model's turn begins.

        Raise RequestError if the template refuses the conversation, ModelError if the template is wrong.
        """
        compiled = self.compiled()
        if tools and not names_tools(self.text):
            raise RequestError(
                "the chat template does not use tools", hint='leave them out, or set tool_choice to "none"'
            )
        names = self.names(normal_messages(messages, self.text), tools, add_generation_prompt)
        return guarded(partial(write, compiled, names))

    def names(
        self, messages: Messages, tools: Sequence[Mapping[str, Any]] | None, add_generation_prompt: bool
    ) -> dict[str, Any]:
        """Return everything that the template can refer to; messages as `normal_messages` returns them."""
        return {
            **self.special_tokens,
            **self.arguments,
            "messages": [dict(message) for message in messages],
            "tools": None if tools is None else [dict(tool) for tool in tools],
            "add_generation_prompt": add_generation_prompt,
        }

    def compiled(self) -> Any:
        """Return the compiled template; raise ModelError if it is wrong."""
        jinja2 = import_jinja()
        if len(self.text) > MOST_TEMPLATE:
            raise ModelError(f"the chat template has {len(self.text):,} characters, more than {MOST_TEMPLATE:,}")
        try:
            return _compiled(self.text)
        except jinja2.TemplateError as error:
            line = getattr(error, "lineno", None)
            where = "" if line is None else f" in line {line}"
            raise ModelError(f"the chat template is wrong{where}: {error.message or error}") from None


def reserved_argument(arguments: Mapping[str, Any]) -> str | None:
    """Return an argument that would take the place of a part of the conversation; None if there is none."""
    return next((name for name in OF_THE_CONVERSATION if name in arguments), None)


def names_tools(template: str) -> bool:
    """Whether a template refers to tools."""
    return re.search(r"\btools\b", template) is not None


def import_jinja() -> Any:
    """Return jinja2; raise DataError if it is not installed."""
    try:
        import jinja2
    except ImportError:
        raise DataError("chat templates need the jinja2 package", hint="pip install 'headway[chat]'") from None
    return jinja2


def write(compiled: Any, names: Mapping[str, Any]) -> str:
    """Return what a compiled template writes; call it inside `guarded`."""
    text, size = [], 0
    for part in compiled.generate(**names, raise_exception=_raise, strftime_now=time.strftime):
        text.append(part)
        size += len(part)
        if size > MOST_CHARACTERS:
            raise TemplateDoesNotEnd
    return "".join(text)


class TemplateDoesNotEnd(BaseException):
    """A template takes too long, or writes too much. No template can catch it."""


def guarded(work: Callable[[], T]) -> T:
    """Return what `work`, which runs templates, returns; raise RequestError if one refuses, fails or does not end."""
    try:
        return _within(MOST_SECONDS, work)
    except TemplateDoesNotEnd:
        raise RequestError(
            "the chat template does not end",
            hint=f"it may take {MOST_SECONDS:.0f} s and write {MOST_CHARACTERS:,} characters",
        ) from None
    except Exception as error:  # a template may raise anything
        raise RequestError(why_refused(error)) from None


def why_refused(error: Exception) -> str:
    """Return what an exception of a template means."""
    if isinstance(error, import_jinja().TemplateError):
        return f"the chat template refuses the conversation: {error}"
    return f"the chat template fails: {type(error).__name__}: {error}"


def _within(seconds: float, work: Callable[[], T]) -> T:
    """Return what `work` returns in a thread of its own, which is interrupted if it takes longer."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="chat-template", daemon=True)
    thread.start()
    thread.join(seconds)
    while thread.is_alive():
        assert thread.ident is not None
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(TemplateDoesNotEnd))
        thread.join(0.1)
    if errors:
        raise errors[0]
    return results[0]


@lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    return sandbox().from_string(template)


def sandbox() -> Any:
    """Return a jinja2 environment with what chat templates use: loop controls, `tojson`, `{% generation %}`."""
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

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks what the model writes; the text is that of its body."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, Generation])
    environment.filters["tojson"] = _to_json
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise(message: str) -> None:
    raise import_jinja().TemplateError(message)


# -- files


def check_template(template: ChatTemplate, file: Path) -> None:
    """Raise ModelError, with the file and the line, if a template is wrong."""
    try:
        template.compiled()
    except ModelError as error:
        raise ModelError(f"{file}: {error.message}", hint="correct the template") from None


def read_chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Return the chat template of a model folder; `settings` is its tokenizer_config.json."""
    file = folder / TEMPLATE_FILE
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several by name
        template = next((entry.get("template") for entry in template if entry.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def special_token_names(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that a tokenizer_config.json names, such as bos_token."""
    return {
        key: value if isinstance(value, str) else str(value.get("content", ""))
        for key, value in settings.items()
        if key.endswith("_token") and isinstance(value, str | dict)
    }
