"""`headway data mix`: the shares and epochs of a recipe's datasets over its run."""

from pathlib import Path
from typing import Any

from headway.cli.text import count, plural, print_json
from headway.data.corpus import Corpus, open_corpus
from headway.recipe import load_recipe


def print_mix(recipe: Path, settings: list[str], as_json: bool) -> None:
    """Print each dataset's share of a recipe's samples, and its epochs."""
    corpus = open_corpus(load_recipe(recipe, settings))
    facts = _facts(corpus)
    if as_json:
        print_json(facts)
        return
    print(f"recipe     {facts['recipe']}, {plural(facts['steps'], 'step')}")
    print(f"samples    {facts['samples']:,} of {facts['seq']:,} tokens")
    print(f"version    {facts['version']}")
    print(f"\n{'part':20}{'windows':>13}{'samples':>13}{'tokens':>9}{'share':>9}{'epochs':>10}")
    for part in facts["data_sets"]:
        tokens, share = count(part["samples"] * facts["seq"]), f"{100 * part['share']:.2f} %"
        print(
            f"{_cut(part['name'], 19):20}{part['training_windows']:13,}{part['samples']:13,}{tokens:>9}{share:>9}"
            f"{part['epochs']:10.2f}"
        )
    if len(facts["phases"]) > 1:
        _print_phases(facts["phases"])
    print(f"\nnext: headway train {recipe}")


def _facts(corpus: Corpus) -> dict[str, Any]:
    recipe, steps = corpus.recipe, corpus.train().steps
    end = corpus.cursor_before(steps + 1)
    samples = dict(zip(corpus.names, corpus.samples(end), strict=True))
    epochs = dict(zip(corpus.names, corpus.epochs(end), strict=True))
    indices = {name: corpus.names.index(name) for name in recipe.data.parts}
    return {
        "recipe": recipe.name,
        "version": corpus.version,
        "steps": steps,
        "seq": recipe.data.seq,
        "samples": end,
        "data_sets": [
            {
                "name": name,
                "path": str(corpus.datasets[index].path),
                "version": corpus.datasets[index].version,
                "training_windows": corpus.splits[index].training,
                "held_out_windows": corpus.splits[index].held_out,
                "samples": samples[name],
                "share": samples[name] / end,
                "epochs": epochs[name],
            }
            for name, index in indices.items()
        ],
        "phases": [
            {"step": step, "shares": {name: float(shares[index]) for name, index in indices.items()}}
            for step, shares in corpus.shares()
        ],
    }


def _print_phases(phases: list[dict[str, Any]]) -> None:
    """Print the shares from each step on, as many per line as fit."""
    print("\nshares from step")
    for phase in phases:
        line = f"{phase['step']:>10,} "
        for name, share in phase["shares"].items():
            cell = f"  {_cut(name, 40)} {100 * share:.2f} %"
            if len(line) + len(cell) > 80:
                print(line)
                line = " " * 11
            line += cell
        print(line)


def _cut(name: str, width: int) -> str:
    return name if len(name) <= width else name[: width - 1] + "…"
