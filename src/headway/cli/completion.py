"""`headway completion`: the script that teaches a shell to complete verbs, options and run names."""

from typing import Annotated, Literal

import typer
from typer.completion import get_completion_script  # type: ignore[attr-defined]


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(metavar="SHELL", help="bash, zsh or fish.")],
) -> None:
    """Print the completion script of a shell.

    For bash, add eval "$(headway completion bash)" to ~/.bashrc; for zsh, eval "$(headway completion zsh)" to ~/.zshrc
    after compinit; for fish, run headway completion fish > ~/.config/fish/completions/headway.fish once.
    """
    print(get_completion_script(prog_name="headway", complete_var="_HEADWAY_COMPLETE", shell=shell))
