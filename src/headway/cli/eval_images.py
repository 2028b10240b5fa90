"""The part of `headway eval` that compares what a diffusion run generates with its data, by the Frechet distance.

The model and the feature network run in another process (`headway.inference.evaluate_images`).
"""

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from headway import __version__
from headway.cli.model_process import model_of, model_process
from headway.cli.progress import terminal_bars
from headway.cli.sample_media import diffusion_recipe
from headway.cli.text import print_json
from headway.errors import UsageError, plural
from headway.track import EvalMetric, Evaluation, RunFolder, write_evaluation

SAMPLES = 1000


def evaluate_images(
    name: str, runs: Path | None, network: Path, *, limit: int | None, guidance: float | None, seed: int, as_json: bool
) -> None:
    """Print the distance of a run's samples from its data, and record it in the run."""
    source, shown = model_of(name, runs)
    if diffusion_recipe(source) is None:
        raise UsageError(f"{shown} generates text, and --frechet is for images", hint="use --tasks")
    if not (network / "config.json").is_file():
        raise UsageError(f"{network} has no config.json", hint="--frechet takes the folder of a CLIP model")
    settings = {"samples": limit or SAMPLES, "seed": seed} | ({} if guidance is None else {"guidance": guidance})
    started = time.time()
    measured = _run({**source, "network": str(network.absolute()), **settings})
    _record(RunFolder(Path(source["run"])), shown, network, settings, measured, started)
    if as_json:
        print_json({"model": shown, "network": str(network), **settings, **measured})
        return
    images = f" ({plural(measured['images'], 'frame')})" if measured["images"] != measured["samples"] else ""
    print(f"Frechet distance   {measured['frechet']:.3f}")
    print(f"  of               {plural(measured['samples'], 'sample')}{images} of {shown}")
    print(f"  from             as many of its data, in features of {network.name}")
    if measured["halves"] is not None:
        print(f"halves of the data {measured['halves']:.3f} from each other")
    if measured["images"] < SAMPLES:
        print("note: with few samples most of the distance is noise of the covariance", file=sys.stderr)


def _run(request: dict[str, Any]) -> dict[str, Any]:
    """Run the process, with a progress bar on a terminal; return its last message."""
    messages = list[dict[str, Any]]()
    with model_process("headway.inference.evaluate_images", "evaluation", request) as running:
        if not sys.stderr.isatty():
            messages += running.messages()
        else:
            columns = ("{task.description}", "Bar", "{task.completed:,}/{task.total:,}", "TimeRemaining")
            with terminal_bars(*columns) as bars:
                task = bars.add_task("sampling", total=request["samples"])
                for message in running.messages():
                    messages.append(message)
                    bars.update(task, completed=message["samples"])
    return messages[-1]


def _record(
    run: RunFolder,
    model: str,
    network: Path,
    settings: dict[str, Any],
    measured: dict[str, Any],
    started: float,
) -> None:
    """Record an evaluation in its run."""
    config = hashlib.sha256((network / "config.json").read_bytes()).hexdigest()
    metrics = [EvalMetric(name="frechet", value=measured["frechet"], share=False)]
    if measured["halves"] is not None:
        metrics.append(EvalMetric(name="halves", value=measured["halves"], share=False))
    about = {"model": model, "network": config, "data": measured["data"], **settings}
    evaluation = Evaluation(
        task="frechet",
        kind="frechet",
        model=model,
        step=int(model.rpartition("@")[2]),
        file=str(network),
        sha256=config,
        fingerprint=hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest(),
        version=__version__,
        settings=settings,
        questions=measured["samples"],
        metrics=tuple(metrics),
        started=started,
        seconds=time.time() - started,
    )
    write_evaluation(run, evaluation, [])
