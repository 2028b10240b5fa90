"""`headway completion`: the script that teaches a shell to complete verbs, options and run names."""

from typing import Annotated, Literal

import typer
from typer.completion import get_completion_script  # type: ignore[attr-defined]

from headway.cli.options import Json
from headway.cli.text import print_json


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(metavar="SHELL", help="bash, zsh or fish.")],
    json: Json = False,
) -> None:
    """Print the completion script of a shell.

    For bash, add eval "$(headway completion bash)" to ~/.bashrc; for zsh, eval "$(headway completion zsh)" to ~/.zshrc
    after compinit; for fish, run headway completion fish > ~/.config/fish/completions/headway.fish once.
    """
    script = get_completion_script(prog_name="headway", complete_var="_HEADWAY_COMPLETE", shell=shell)
    if json:
        print_json({"shell": shell, "script": script})
    else:
        print(script)
