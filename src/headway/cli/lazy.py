"""Parses the command line of a verb before anything that the verb runs is imported.

A verb's module imports all it needs at its top, which takes up to a second. Its signature alone is enough for help,
usage errors and shell completion: the module's code is executed with placeholders for those imports first, and
imported in earnest only when the verb is called.
"""

import builtins
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import typer

IN_SIGNATURES = {"collections.abc", "headway.cli.options", "pathlib", "typer", "typing"}
"""Modules that the signature of a verb may use; everything else is a placeholder."""


class LazyCommands(Mapping[str, Any]):
    """The commands of verbs by name; `headway.cli.VERB` has a function or an `app` for each."""

    def __init__(self, verbs: list[str]) -> None:
        self._commands: dict[str, Any] = dict.fromkeys(verbs)

    def __getitem__(self, verb: str) -> Any:
        if self._commands[verb] is None:
            self._commands[verb] = _load_command(verb)
        return self._commands[verb]

    def __contains__(self, verb: object) -> bool:
        return verb in self._commands

    def __iter__(self) -> Iterator[str]:
        return iter(self._commands)

    def __len__(self) -> int:
        return len(self._commands)


def _load_command(verb: str) -> Any:
    name = verb.replace("-", "_")
    module = f"headway.cli.{name}"
    signatures = load_signatures(module)
    root = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app: typer.Typer | None = getattr(signatures, "app", None)
    if app is None:
        root.command(verb)(getattr(signatures, name))
    else:
        root.add_typer(app, name=verb)
    group = app or root
    commands: list[Any] = [*group.registered_commands]
    if group.registered_callback is not None:  # a verb with subcommands
        commands.append(group.registered_callback)
    for command in commands:
        assert command.callback is not None
        command.callback = _imported_when_called(module, command.callback)
    return typer.main.get_group(root).commands[verb]


def load_signatures(module: str) -> ModuleType:
    """Execute a module with placeholders for most of its imports: its functions have signatures but cannot run."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    code = spec.loader.get_code(module)  # type: ignore[union-attr]
    signatures = ModuleType(module)
    signatures.__dict__["__builtins__"] = vars(builtins) | {"__import__": _import_or_placeholder}
    exec(code, signatures.__dict__)
    return signatures


def _imported_when_called(module: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(**options: Any) -> Any:
        return getattr(importlib.import_module(module), function.__name__)(**options)

    return call


def _import_or_placeholder(name: str, *arguments: Any) -> Any:
    return __import__(name, *arguments) if name in IN_SIGNATURES else _Placeholder()


class _Placeholder:
    """Whatever a module imports, and what it computes from that at its top level: decorators, bases, constants."""

    def __getattr__(self, name: str) -> "_Placeholder":
        return self

    def __call__(self, *_: object, **__: object) -> "_Placeholder":
        return self

    __getitem__ = __or__ = __ror__ = __call__

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __mro_entries__(self, _bases: object) -> tuple[type, ...]:
        return ()
