"""Headway's side: the trainer's own reader, feed, passes and optimizer, on a dataset in its format."""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from post_training.stopwatch import Stopwatch
from post_training.work import Conversation, StepSize, Way, Work, draw, parsed, rate


def headway(
    work: Work, model: Any, chats: list[Conversation], way: Way, options: argparse.Namespace, watch: Stopwatch
) -> list[StepSize]:
    """The trainer's own parts; returns the sizes of steps, whose rows are about equally full."""
    from headway.data.corpus import open_corpus
    from headway.models import empty_decoder
    from headway.models.lora import add_adapters, base_names
    from headway.parallel import World, finish_gradients, parallelize_model, total_norm
    from headway.parallel.objective import SumScale, loss_of
    from headway.state.tensors import ModelShare
    from headway.track import RunFolder
    from headway.train.cuda_graphs import passes_of
    from headway.train.draw_weights import draw_weights
    from headway.train.feed import DeviceFeed
    from headway.train.objectives import NextToken, make_objective
    from headway.train.objectives.preference import REFERENCE
    from headway.train.objectives.reference import WithReference, reference_column
    from headway.train.optim import build_optimizer, clip, lower, set_step, widen_gradients
    from headway.train.optimizer_in_backward import early_updates

    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        write_dataset(data, chats, model.vocabulary)
        low = {} if options.device == "cpu" else {"dtype": "bfloat16", "weights": "bfloat16"}
        if low and not work.lora:
            low["moments"] = "bfloat16"
        train = {
            "steps": 1000, "batch": work.rows or 1, "lr": rate(work, options), "schedule": "constant",
            "warmup_steps": 0, "weight_decay": 0.0, "beta2": 0.999, "recompute": "full" if way.recompute else "none",
            "device": device.type, **low,
        }  # fmt: skip
        values: dict[str, Any] = {
            "model": model.model_dump(exclude_defaults=True), "train": train, "objective": {"kind": work.kind},
            "data": {"path": str(data), "seq": work.seq, "holdout": 0.0},
        }  # fmt: skip
        if work.lora:
            values["model"]["init"] = "random"
            values["lora"] = {"rank": 16, **({"init": str(options.work / "adapter")} if options.tiny else {})}
        if options.tiny:
            values["model"]["init"] = str(options.work / "model")
            train["batch"] = open_corpus(parsed(values)).packings[0].rows
        elif way.microbatch and way.microbatch < work.rows:
            train["microbatch"] = way.microbatch
        recipe = parsed(values, options.set)
        world = World(0, 1, device)
        corpus = open_corpus(recipe)
        reader, objective = corpus.reader(), make_objective(recipe.objective, corpus.weighted)
        plain = empty_decoder(recipe.model, "meta")
        lower(plain, recipe.train)
        base = frozenset[str]()
        if recipe.lora is not None:
            add_adapters(plain, recipe.lora)
            base = base_names(plain)
        measures: Any = None if isinstance(objective, NextToken) else objective
        spread = parallelize_model(plain, recipe, world, (), measures)
        if spread.accumulates:
            widen_gradients(spread.model)
        held = ModelShare(0, (0,), spread.borrowed, spread.names, base)
        if options.tiny:
            draw_weights(spread.model, recipe, held, RunFolder(Path(folder) / "run"))
        else:
            draw(spread.model)
        if REFERENCE in objective.columns:
            column = reference_column(recipe, corpus, spread, world, lambda *_: None, None)
            reader = WithReference(reader, column)
        optimizer = build_optimizer(spread.model, recipe.train, recipe.seed, world, held, recipe.model.layout)
        parameters = dict(spread.model.named_parameters())
        feed = DeviceFeed(corpus.loader(reader), device, objective)
        passes, early = passes_of(spread, recipe, world), early_updates(spread, optimizer, recipe, world)
        losses, cursor, batch = list[torch.Tensor](), 0, recipe.train.batch
        spread.model.train()
        watch.start()
        for number in range(1, watch.total + 1):
            rows, trained, counts = feed.read(cursor, batch)
            cursor += batch
            scale = SumScale(tuple(1 / (count or 1) for count in counts), 1 / max(1, trained))
            set_step(optimizer.param_groups, number, recipe.train.lr)
            values_K = passes(rows, scale)
            finish_gradients(parameters, spread.missing)
            norm = total_norm(parameters, world, spread.borrowed) if early is None else early.norm(parameters)
            if recipe.train.clip > 0:
                clip(optimizer, parameters.values(), norm, recipe.train.clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss_of(values_K, spread.terms).detach().clone())
            watch.step()
        watch.losses = [loss.item() for loss in losses]
        packing = corpus.packings[0]
        share = batch / packing.rows
        return [StepSize(packing.counts.tokens * share, len(chats) * share if work.kind == "dpo" else 0)] * watch.total


def write_dataset(folder: Path, chats: list[Conversation], vocabulary: int) -> None:
    """A dataset of chats or pairs in Headway's format."""
    from headway.data.chat_samples import ASSISTANT
    from headway.data.chat_tokens import EncodedSample
    from headway.data.chat_writer import ChatWriter
    from headway.data.manifest import CHAT_FORMAT, MANIFEST, ChatFacts, DatasetManifest
    from headway.data.writer import write_file

    folder.mkdir()
    writer = ChatWriter(folder, dtype="uint32", shard_tokens=1 << 28)
    for number, chat in enumerate(chats):
        unit = []
        for answer in chat.answers:
            ids = np.concatenate([chat.prompt, answer]).astype(np.uint32)
            spans = [(0, len(chat.prompt), 2, False), (len(chat.prompt), len(ids), ASSISTANT, True)]
            unit.append(EncodedSample([ids], spans, len(ids)))
        writer.add(unit, conversation=number, weight=1.0, desirable=True)
    writer.close()
    files = {name: write_file(folder / name, b"{}") for name in ("chat_template.jinja", "tokenizer_config.json")}
    kind = "pairs" if len(chats[0].answers) == 2 else "chat"
    facts = ChatFacts(kind, len(chats), writer.trained_tokens, tuple(writer.chat_files), *files.values())
    manifest = DatasetManifest(
        "uint32", vocabulary, 0, writer.tokens, writer.documents, writer.prompt_tokens, tuple(writer.files),
        write_file(folder / "tokenizer.json", b"{}"), CHAT_FORMAT, facts,
    )  # fmt: skip
    write_file(folder / MANIFEST, manifest.canonical())
