"""`headway data mix`: what a recipe's mixture comes to by the end of its run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli.options import Json, Settings
from headway.cli.text import count, print_json

if TYPE_CHECKING:
    from headway.data.corpus import Corpus

__all__ = ["mix_command"]


def mix_command(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe in TOML.")],
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Print each data set's share of a recipe's samples, and how often it is gone through."""
    from headway.data.corpus import open_corpus
    from headway.recipe import load_recipe

    corpus = open_corpus(load_recipe(recipe, settings or ()))
    facts = _facts(corpus)
    if as_json:
        print_json(facts)
        return
    print(f"recipe     {facts['recipe']}, {facts['steps']:,} steps")
    print(f"samples    {facts['samples']:,} of {facts['seq']:,} tokens")
    print(f"version    {facts['version']}")
    print(f"\n{'data set':20}{'windows':>13}{'samples':>13}{'tokens':>9}{'share':>9}{'epochs':>10}")
    for one in facts["data_sets"]:
        tokens, share = count(one["samples"] * facts["seq"]), f"{100 * one['share']:.2f} %"
        print(
            f"{_cut(one['name'], 19):20}{one['training_windows']:13,}{one['samples']:13,}{tokens:>9}{share:>9}"
            f"{one['epochs']:10.2f}"
        )
    if len(facts["phases"]) > 1:
        _print_phases(facts["phases"])
    print(f"\nnext: headway train {recipe}")


def _facts(corpus: "Corpus") -> dict[str, Any]:
    recipe = corpus.recipe
    end = corpus.cursor_before(recipe.train.steps + 1)
    samples = dict(zip(corpus.names, corpus.samples(end), strict=True))
    epochs = dict(zip(corpus.names, corpus.epochs(end), strict=True))
    places = {name: corpus.names.index(name) for name in recipe.data.parts}
    return {
        "recipe": recipe.name,
        "version": corpus.version,
        "steps": recipe.train.steps,
        "seq": recipe.data.seq,
        "samples": end,
        "data_sets": [
            {
                "name": name,
                "path": str(corpus.datasets[place].path),
                "version": corpus.datasets[place].version,
                "training_windows": corpus.splits[place].training,
                "held_out_windows": corpus.splits[place].held_out,
                "samples": samples[name],
                "share": samples[name] / end,
                "epochs": epochs[name],
            }
            for name, place in places.items()
        ],
        "phases": [
            {"step": step, "shares": {name: float(shares[place]) for name, place in places.items()}}
            for step, shares in corpus.shares()
        ],
    }


def _print_phases(phases: list[dict[str, Any]]) -> None:
    """Shares by the step from which on they hold, as many to a line as fit."""
    print("\nshares from step")
    for phase in phases:
        line = f"{phase['step']:>10,} "
        for name, share in phase["shares"].items():
            word = f"  {_cut(name, 40)} {100 * share:.2f} %"
            if len(line) + len(word) > 80:
                print(line)
                line = " " * 11
            line += word
        print(line)


def _cut(name: str, width: int) -> str:
    return name if len(name) <= width else name[: width - 1] + "…"
