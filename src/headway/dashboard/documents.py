"""The documents that a step of a run trained on, for the page that a loss spike leads to."""

from typing import Any

from headway.data.corpus import open_corpus
from headway.data.explain import Explainer, SeenDocument
from headway.errors import HeadwayError
from headway.track import RunFolder, read_recipe, summarize

MOST = 64
"""Parts of documents of one page."""
TOKENS = 96
"""Of each that are shown as text."""


def step_documents(run: RunFolder, step: int, first: int = 0) -> dict[str, Any]:
    """Return which documents a step trained on, with the beginning of each as text."""
    try:
        explainer = Explainer(open_corpus(read_recipe(run)))
    except HeadwayError as error:  # of a damaged run, or one whose data is gone: the rest of its page can be shown
        return {"step": step, "problem": error.message, "hint": error.hint}
    seen = explainer.step(step)
    return {
        "step": step,
        "done": step <= summarize(run).step,
        "last_step": explainer.corpus.recipe.train.steps,
        "count": len(seen),
        "first": first,
        "parts": [_part(explainer, part) for part in seen[first : first + MOST]],
        "command": run.command("explain", str(step)),
    }


def _part(explainer: Explainer, part: SeenDocument) -> dict[str, Any]:
    facts: dict[str, Any] = {"row": part.row, "dataset": part.dataset, "document": part.document, "first": part.first}
    facts |= {"end": part.end, "tokens": part.tokens, "text": explainer.text(part, TOKENS)}
    return facts | {"source": None if part.origin is None else str(part.origin), "cut": part.end - part.first > TOKENS}
