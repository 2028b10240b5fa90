"""The layout of a chat template: which static text it writes around the messages, so that most rows need no rendering.

A template is run once per sequence of roles, with messages whose content is a `_TracedText`: it may be written, joined
and stripped, and be asked a few questions (is it empty, does it contain, begin or end with a text). What was written is
the layout, and the questions with their answers are its conditions. A conversation with the same roles that meets the
conditions makes the template take the same steps, so its text is the layout with its own contents filled in. A
template that does anything else with a content has no layout, and runs for every row.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, NoReturn

from headway.data.chat_messages import normal_messages
from headway.data.chat_rows import BadRow, Conversation
from headway.data.chat_samples import Render, Sample, TextPiece, prompt_sample, render_with, split_samples
from headway.data.chat_template import ChatTemplate, guarded, names_tools, sandbox, why_refused, write
from headway.errors import RequestError

_OPEN, _CLOSE = "\ue0f0", "\ue0f1"
"""Private characters around the number of a content in symbolic text."""
_REFERENCE = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")
_FILTERS = {
    "trim", "default", "d", "length", "count", "first", "last", "list", "selectattr", "rejectattr", "tojson",
    "upper", "lower", "capitalize", "title", "replace", "int",
}  # fmt: skip
_TESTS = {"string": True, "defined": True, "undefined": False, "none": False, "mapping": False, "number": False}
MOST_VARIANTS = 16
"""Layouts per sequence of roles, for different answers to the template's questions."""
MOST_SEQUENCES = 4096
_GROUP = 256
"""Rows that are rendered in one thread."""
CHECK_EVERY = 128
"""One in so many rows is also rendered, and compared."""


class _Inspected(BaseException):
    """The template looks into a content. No template can catch it."""


class _Reference(NamedTuple):
    """The content of a message after some calls of strip."""

    message: int
    strips: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def value(self, contents: Sequence[str]) -> str:
        text = contents[self.message]
        for name, arguments in self.strips:
            text = getattr(text, name)(*arguments)
        return text


class _Condition(NamedTuple):
    """A question about a content, with the answer that was given."""

    reference: _Reference
    question: str
    """The name of a method of str."""
    argument: str
    answer: bool

    def met(self, contents: Sequence[str]) -> bool:
        text = self.reference.value(contents)
        return bool(getattr(text, self.question)(self.argument)) == self.answer


@dataclass
class _Trace:
    """What a template did with the contents."""

    contents: Sequence[str]
    references: list[_Reference] = field(default_factory=list)
    conditions: dict[_Condition, None] = field(default_factory=dict)


class _TracedText:
    """Stands for a content, or a text joined with contents."""

    __slots__ = ("_parts", "_trace")

    def __init__(self, trace: _Trace, parts: tuple[str | _Reference, ...]) -> None:
        self._trace, self._parts = trace, parts

    def __str__(self) -> str:
        text = ""
        for part in self._parts:
            if isinstance(part, str):
                text += part
            else:
                text += f"{_OPEN}{len(self._trace.references)}{_CLOSE}"
                self._trace.references.append(part)
        return text

    def __add__(self, other: Any) -> "_TracedText":
        return _TracedText(self._trace, (*self._parts, *_parts_of(other)))

    def __radd__(self, other: Any) -> "_TracedText":
        return _TracedText(self._trace, (*_parts_of(other), *self._parts))

    def _strip(self, name: str, arguments: tuple[Any, ...]) -> "_TracedText":
        reference = self._only()
        if not all(type(argument) is str for argument in arguments):
            raise _Inspected
        return _TracedText(self._trace, (_Reference(reference.message, (*reference.strips, (name, arguments))),))

    def strip(self, *arguments: Any) -> "_TracedText":
        return self._strip("strip", arguments)

    def lstrip(self, *arguments: Any) -> "_TracedText":
        return self._strip("lstrip", arguments)

    def rstrip(self, *arguments: Any) -> "_TracedText":
        return self._strip("rstrip", arguments)

    def _ask(self, question: str, argument: Any) -> bool:
        reference = self._only()
        if type(argument) is not str:
            raise _Inspected
        answer = bool(getattr(reference.value(self._trace.contents), question)(argument))
        self._trace.conditions[_Condition(reference, question, argument, answer)] = None
        return answer

    def startswith(self, text: Any) -> bool:
        return self._ask("startswith", text)

    def endswith(self, text: Any) -> bool:
        return self._ask("endswith", text)

    def __contains__(self, text: Any) -> bool:
        return self._ask("__contains__", text)

    def __eq__(self, other: object) -> bool:
        return self._ask("__eq__", other)

    def __ne__(self, other: object) -> bool:
        return not self._ask("__eq__", other)

    def __bool__(self) -> bool:
        return not self._ask("__eq__", "")

    def _only(self) -> _Reference:
        """The one content that this is; text that was joined is not looked into."""
        if len(self._parts) != 1 or isinstance(self._parts[0], str):
            raise _Inspected
        return self._parts[0]

    def _inspected(self, *_: Any) -> NoReturn:
        raise _Inspected

    __repr__ = __format__ = __hash__ = __len__ = __iter__ = __getitem__ = _inspected
    __lt__ = __le__ = __gt__ = __ge__ = __mul__ = __mod__ = _inspected

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _Inspected


def _parts_of(value: Any) -> tuple[str | _Reference, ...]:
    if isinstance(value, _TracedText):
        return value._parts
    if type(value) is not str:
        raise _Inspected
    return (value,)


def _tracing_template(text: str) -> Any | None:
    """Return a template compiled for `_TracedText`; None if it uses what cannot be traced."""
    from jinja2 import nodes

    environment = sandbox()
    tree = environment.parse(text)
    # These turn output into a string, which could be looked into unnoticed.
    if tree.find((nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock, nodes.Include, nodes.Import)):
        return None
    if any(node.name not in _FILTERS for node in tree.find_all(nodes.Filter)):
        return None
    environment.filters = {name: _traced_filter(name, call) for name, call in environment.filters.items()}
    environment.filters["trim"] = lambda value, *chars: _plain_or_traced(value).strip(*chars)
    environment.filters["joined"] = _join
    environment.tests = {name: _traced_test(name, call) for name, call in environment.tests.items()}
    _replace_concat(tree, nodes)
    return environment.from_string(tree)


def _replace_concat(node: Any, nodes: Any) -> None:
    """Make every `a ~ b` a filter, since the operator itself makes strings."""
    for name, value in node.iter_fields():
        values = value if isinstance(value, list) else [value]
        for index, child in enumerate(values):
            if not isinstance(child, nodes.Node):
                continue
            _replace_concat(child, nodes)
            if isinstance(child, nodes.Concat):
                first, *rest = child.nodes
                joined = nodes.Filter(first, "joined", rest, [], None, None, lineno=child.lineno)
                joined.set_environment(child.environment)
                if isinstance(value, list):
                    value[index] = joined
                else:
                    setattr(node, name, joined)


def _join(*values: Any) -> Any:
    joined = "" + str(values[0]) if not isinstance(values[0], _TracedText) else values[0]
    for value in values[1:]:
        joined = joined + (value if isinstance(value, _TracedText) else str(value))
    return joined


def _plain_or_traced(value: Any) -> Any:
    return value if isinstance(value, _TracedText) else str(value)


def _traced_filter(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    if name in ("default", "d"):
        return call

    def filter_(*arguments: Any, **named: Any) -> Any:
        if any(isinstance(value, _TracedText) for value in (*arguments, *named.values())):
            raise _Inspected
        return call(*arguments, **named)

    for attribute in ("jinja_pass_arg",):  # filters that also get the environment or the context
        if hasattr(call, attribute):
            setattr(filter_, attribute, getattr(call, attribute))
    return filter_


def _traced_test(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def test(*arguments: Any) -> Any:
        if arguments and isinstance(arguments[-1 if hasattr(call, "jinja_pass_arg") else 0], _TracedText):
            if name in _TESTS:
                return _TESTS[name]
            if name not in ("eq", "equalto", "==", "ne", "!="):
                raise _Inspected
        return call(*arguments)

    if hasattr(call, "jinja_pass_arg"):
        test.jinja_pass_arg = call.jinja_pass_arg  # type: ignore[attr-defined]
    return test


# -- layouts


class _SymbolicText(str):
    """A rendering with numbers in place of contents."""

    __slots__ = ()

    def startswith(self, prefix: Any, *_: Any) -> bool:
        """Whether the renderings extend each other whatever the contents are; raise _Inspected if that depends."""
        if super().startswith(prefix):
            return True
        differing = (i for i, (a, b) in enumerate(zip(self, prefix, strict=False)) if a != b)
        same = next(differing, min(len(self), len(prefix)))
        for text in (str(self), str(prefix)):
            if text.rfind(_OPEN, 0, same + 1) > text.rfind(_CLOSE, 0, same):
                raise _Inspected
        return False


class _LaidPiece(NamedTuple):
    parts: tuple[str | _Reference, ...]
    role: int
    trained: bool


class _Layout(NamedTuple):
    conditions: tuple[_Condition, ...]
    samples: tuple[tuple[_LaidPiece, ...], ...]

    def filled(self, contents: Sequence[str]) -> list[Sample]:
        return [
            tuple(
                TextPiece(
                    "".join([p if type(p) is str else p.value(contents) for p in piece.parts]),  # type: ignore[union-attr]
                    piece.role,
                    piece.trained,
                )
                for piece in sample
            )
            for sample in self.samples
        ]


class LayoutMismatch(BaseException):
    """A layout gave another text than the template."""


@dataclass
class SampleMaker:
    """Turns conversations into samples, by layouts where the template has them."""

    template: ChatTemplate
    ends: re.Pattern[str] | None = None
    """Matches an added token at the end of a text."""
    traced: bool = True
    """Whether to look for layouts."""
    prompts: bool = False
    """Whether conversations are prompts, without a turn to train on."""
    layouts: dict[tuple[Any, ...], list[_Layout] | None] = field(default_factory=dict)
    """Layouts by roles; None where the template runs for every row."""
    rows: int = 0
    """Rows that had a layout."""

    def __post_init__(self) -> None:
        self.template.compiled()  # which says what is wrong with it
        self._tracing = _tracing_template(self.template.text) if self.traced else None

    def samples(self, conversation: Conversation) -> list[Sample]:
        """Return the samples of a conversation; raise BadRow, or what the template raises. May run the template: call
        it inside `guarded`."""
        try:
            messages = normal_messages(conversation.messages, self.template.text)
        except RequestError as error:
            raise BadRow(error.message if error.hint is None else f"{error.message}; {error.hint}") from None
        conversation = conversation._replace(messages=messages)
        key = self._key(conversation)
        if key is None:
            return self._rendered(conversation)
        layouts = self.layouts.setdefault(key, []) if len(self.layouts) < MOST_SEQUENCES else self.layouts.get(key)
        if layouts is None:
            return self._rendered(conversation)
        contents = [message["content"] for message in conversation.messages]
        for layout in layouts:
            if all(condition.met(contents) for condition in layout.conditions):
                samples = layout.filled(contents)
                self.rows += 1
                if self.rows % CHECK_EVERY == 0 and samples != self._rendered(conversation):
                    raise LayoutMismatch(f"the layout of {'/'.join(key[1])} is not what the template writes")
                return samples
        rendered = self._rendered(conversation)
        traced = self._trace_layout(conversation, contents) if len(layouts) < MOST_VARIANTS else None
        if traced is None or traced.filled(contents) != rendered:
            self.layouts[key] = None
        else:
            layouts.append(traced)
        return rendered

    def _rendered(self, conversation: Conversation) -> list[Sample]:
        return self._split(conversation, render_with(self.template, conversation))

    def _split(self, conversation: Conversation, render: Render) -> list[Sample]:
        if not self.prompts:
            return split_samples(conversation, render, self.ends)
        if conversation.tools and not names_tools(self.template.text):
            raise BadRow("the chat template does not use tools")
        return prompt_sample(conversation, render)

    def _key(self, conversation: Conversation) -> tuple[Any, ...] | None:
        """Return what conversations of one layout have in common; None if this one needs rendering."""
        if self._tracing is None or conversation.tools is not None or conversation.arguments:
            return None
        roles = []
        for message in conversation.messages:
            if len(message) != 2 or type(content := message.get("content")) is not str or not content:
                return None
            roles.append(message["role"])
        return (conversation.context, tuple(roles))

    def _trace_layout(self, conversation: Conversation, contents: list[str]) -> _Layout | None:
        """Run the template on traced contents; return None if it looks into them."""
        trace = _Trace(contents)
        messages = [
            {"role": message["role"], "content": _TracedText(trace, (_Reference(index),))}
            for index, message in enumerate(conversation.messages)
        ]

        def render(count: int, prompt: bool) -> str:
            first = len(trace.references)
            text = write(self._tracing, self.template.names(messages[:count], None, prompt))
            # The same content has the same number in all renderings, so that they can be compared.
            numbers = {n: trace.references.index(trace.references[n]) for n in range(first, len(trace.references))}
            return _SymbolicText(
                _REFERENCE.sub(lambda match: f"{_OPEN}{numbers.get(int(match[1]), int(match[1]))}{_CLOSE}", text)
            )

        try:
            samples = self._split(conversation, render)
        except (_Inspected, Exception):  # whatever it raises, the rendering decides
            return None
        laid = tuple(
            tuple(_LaidPiece(_laid(piece.text, trace), piece.role, piece.trained) for piece in sample)
            for sample in samples
        )
        if not all(_ends_alike(sample, self.ends) for sample in laid):
            return None
        return _Layout(tuple(trace.conditions), laid)


def _ends_alike(sample: tuple[_LaidPiece, ...], ends: re.Pattern[str] | None) -> bool:
    """Whether white space after an added token is cut off the answers of a sample, or not, whatever they say."""
    for piece in sample:
        tail = piece.parts[-1] if piece.parts else ""
        if piece.trained and not (isinstance(tail, str) and (ends is None or tail == tail.rstrip() != "")):
            return False
    return True


def _laid(text: str, trace: _Trace) -> tuple[str | _Reference, ...]:
    """Return symbolic text as static text and references."""
    parts: list[str | _Reference] = []
    for index, part in enumerate(_REFERENCE.split(text)):
        if index % 2:
            parts.append(trace.references[int(part)])
        elif part:
            parts.append(part)
    return tuple(parts)


class Refused(NamedTuple):
    """Why a conversation has no samples."""

    reason: str


def make_samples(maker: SampleMaker, conversations: Sequence[Conversation]) -> list[list[Sample] | Refused]:
    """Return the samples of each conversation, or why there are none."""

    def make(chosen: Sequence[Conversation]) -> list[list[Sample] | Refused]:
        results: list[list[Sample] | Refused] = []
        for conversation in chosen:
            try:
                results.append(maker.samples(conversation))
            except BadRow as bad:
                results.append(Refused(str(bad)))
            except Exception as error:  # a template may raise anything
                results.append(Refused(why_refused(error)))
        return results

    results: list[list[Sample] | Refused] = []
    # One thread per row would cost more than its rendering; only if a group is slow is each row given the time limit.
    for start in range(0, len(conversations), _GROUP):
        group = conversations[start : start + _GROUP]
        try:
            results += guarded(partial(make, group))
        except RequestError:
            for conversation in group:
                try:
                    results += guarded(partial(make, [conversation]))
                except RequestError as error:
                    results.append(Refused(error.message))
    return results
