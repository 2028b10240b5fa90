"""The documents that a step of a run trained on, for the page that a loss spike leads to."""

from typing import Any

from headway.data.corpus import open_corpus
from headway.data.explain import Explainer
from headway.data.spike_documents import SuspectDocument, documents_behind
from headway.errors import HeadwayError
from headway.track import RunFolder, read_recipe, summarize

MOST = 64
"""Parts of documents of one page."""
TOKENS = 96
"""Of each that are shown as text."""


def step_documents(run: RunFolder, step: int, first: int = 0) -> dict[str, Any]:
    """Return which documents a step trained on, how unlike those around each is, and its beginning as text."""
    try:
        explainer = Explainer(open_corpus(read_recipe(run)))
    except HeadwayError as error:  # of a damaged run, or one whose data is gone: the rest of its page can be shown
        return {"step": step, "problem": error.message, "hint": error.hint}
    seen = explainer.step(step)
    (behind,) = documents_behind(explainer, [step])
    suspects = {suspect.part: suspect for suspect in behind.documents}
    return {
        "step": step,
        "done": step <= summarize(run).step,
        "last_step": explainer.corpus.recipe.train.steps,
        "count": len(seen),
        "first": first,
        "parts": [_part(explainer, suspects[part]) for part in seen[first : first + MOST]],
        "around": behind.around,
        "command": run.command("explain", str(step)),
    }


def _part(explainer: Explainer, suspect: SuspectDocument) -> dict[str, Any]:
    part = suspect.part
    facts: dict[str, Any] = {"row": part.row, "dataset": part.dataset, "document": part.document, "first": part.first}
    facts |= {"end": part.end, "tokens": part.tokens, "text": explainer.text(part, TOKENS)}
    facts |= {"bits": suspect.bits, "stands_out": suspect.stands_out}
    return facts | {"source": None if part.origin is None else str(part.origin), "cut": part.end - part.first > TOKENS}
