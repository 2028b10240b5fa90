"""Whole diffusion runs: killed at random steps and resumed with the same bits; sample grids and the verb sample."""

import contextlib
import json
import random
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from conftest import assert_same, left_alone
from headway.data.media import MediaOptions, build_media
from headway.recipe import FaultPlan, Recipe
from headway.recipe.load import parse_recipe
from headway.track.metrics import metric_names, read_metric

pytestmark = pytest.mark.slow
STEPS = 8
CHANCE = random.Random(11)


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """Sixty random images of three classes."""
    folder, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    (folder / "files").mkdir()
    rows = []
    for number in range(60):
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(folder / "files" / f"{number:02d}.png")
        rows.append(json.dumps({"file": f"{number:02d}.png", "caption": f"number {number}", "label": number % 3}))
    (folder / "captions.jsonl").write_text("\n".join(rows) + "\n")
    options = MediaOptions(kind="image", captions=(str(folder / "captions.jsonl"),))
    build_media(folder / "data", [str(folder / "files" / "*.png")], options)
    return folder / "data"


def recipe_of(images: Path, conditioning: str = "class") -> Recipe:
    model = {"family": "dit", "in_channels": 3, "patch": 4, "layers": 2, "dim": 32, "heads": 2}
    model |= {"num_classes": 3} if conditioning == "class" else {"conditioning": "text"}
    objective = {"kind": "flow"} if conditioning == "class" else {"kind": "ddpm", "predict": "v", "min_snr": 5.0}
    values = {
        "name": "tiny",
        "model": model,
        "data": {"kind": "image", "path": str(images), "media": {"sizes": "8x8", "flip": True}, "holdout": 0.2},
        "objective": objective,
        "train": {"steps": STEPS, "batch": 8, "lr": 1e-2, "warmup_steps": 1, "restarts": 0, "ema": 0.9},
        "checkpoint": {"every_steps": 3, "retry_s": 0},
        "eval": {"every_steps": 4, "windows": 6, "samples": {"count": 4, "steps": 3}},
    }
    return parse_recipe(values, {}, "test")


@pytest.mark.parametrize("conditioning", ["class", "text"])
def test_runs_killed_at_random_steps_end_with_the_same_bits(lab, make_lab, tmp_path, images, conditioning: str) -> None:
    """On one worker and on two; their losses agree, too."""
    recipe = recipe_of(images, conditioning)
    unharmed = left_alone(tmp_path / "unharmed", make_lab, recipe)
    for workers in (1, 2):
        result = None
        for number, step in enumerate(sorted(CHANCE.sample(range(1, STEPS + 1), 2)), start=1):
            rank = CHANCE.choice([None, *range(workers)])
            faults = FaultPlan().kill(step, rank, CHANCE.choice(["start", "data", "compute"]), attempt=number)
            result = lab.resume(result.run, faults=faults) if result else lab.train(recipe, workers, faults)
            assert result.outcome.state == "failed"
        assert_same(lab.resume(result.run), unharmed[workers])
    one, two = ([event["loss"] for event in unharmed[workers].events("step")] for workers in (1, 2))
    assert one == pytest.approx(two, rel=1e-4)
    held_out = [[event["loss"] for event in unharmed[workers].events("eval")] for workers in (1, 2)]
    assert held_out[0] == pytest.approx(held_out[1], rel=1e-4)


@pytest.fixture(scope="module")
def clips(tmp_path_factory) -> Path:
    """Forty short videos with captions."""
    folder = tmp_path_factory.mktemp("clips")
    script = Path(__file__).parents[2] / "examples" / "make_clips.py"
    subprocess.run([sys.executable, str(script), str(folder / "files"), "40", "16", "12"], check=True)
    options = MediaOptions(kind="video", captions=(str(folder / "files" / "captions.jsonl"),))
    build_media(folder / "data", [str(folder / "files" / "clips" / "**" / "*.mp4")], options)
    return folder / "data"


def test_image_to_video_run_continues_an_image(lab, clips, tmp_path) -> None:
    """Its samples depend on the image, which samples of a text-to-video run do not take."""
    values = recipe_of(clips, "text").model_dump()
    values["model"] = {"family": "wan", "in_channels": 3, "patch": [1, 8, 8], "layers": 1, "dim": 24, "heads": 2}
    values["model"] |= {"text_tokens": 32, "image_channels": 4}
    values |= {"objective": {"kind": "flow"}, "data": {"kind": "video", "path": str(clips), "holdout": 0.1}}
    values["data"]["media"] = {"sizes": "16x16", "frames": 3}
    values["train"]["lr"] = 0.05
    values["eval"]["samples"] = {"count": 2, "steps": 2}
    result = lab.train(parse_recipe(values, {}, "test"), workers=2)
    assert result.outcome.state == "finished", result.outcome
    assert len(list(result.run.samples.iterdir())) == 4
    runs, pictures = result.run.path.parent, []
    for number, colour in enumerate(("white", "black", "white")):
        Image.new("RGB", (20 + number, 30), colour).save(tmp_path / f"{colour}.png")
        words = ["--image", str(tmp_path / f"{colour}.png"), "--out", str(tmp_path / f"{number}.png"), "--steps", "2"]
        done = headway("sample", result.run.name, "--prompt", "a red bar", *words, runs=runs)
        assert done.returncode == 0, done.stderr
        pictures.append(np.asarray(Image.open(tmp_path / f"{number}.png")))
    assert (pictures[0] == pictures[2]).all()
    assert (pictures[0] != pictures[1]).any()
    (tmp_path / "bad.png").write_bytes(b"no image")
    for words, why in (([], "continues an image, and there is none"), (["--image", "bad.png"], "cannot read")):
        failed = headway("sample", result.run.name, *words, runs=runs)
        assert failed.returncode in (1, 2)
        assert why in failed.stderr


@pytest.mark.parametrize("image_channels", [0, 4], ids=["text to video", "image to video"])
def test_video_runs_with_killed_workers_and_decoders_end_with_the_same_bits(
    lab, make_lab, tmp_path, clips, image_channels: int
) -> None:
    """On one worker and on two; the decoder processes of a live run are killed whenever there are some."""
    values = recipe_of(clips, "text").model_dump()
    values["model"] = {"family": "wan", "in_channels": 3, "patch": [1, 8, 8], "layers": 1, "dim": 24, "heads": 2}
    values["model"] |= {"text_tokens": 32, "image_channels": image_channels}
    values["objective"] = {"kind": "flow"}
    values["data"] = {"kind": "video", "path": str(clips), "holdout": 0.1}
    values["data"]["media"] = {"sizes": "16x16", "frames": 3, "samples": 2, "window": 4, "segment": "gop"}
    values["eval"]["samples"] = {"count": 2, "steps": 2, "prompts": ["a red bar moves up"]}
    recipe = parse_recipe(values, {}, "test")
    unharmed = left_alone(tmp_path / "unharmed", make_lab, recipe)
    KILLED.clear()
    for workers in (1, 2):
        stopped = threading.Event()
        killer = threading.Thread(target=kill_decoders, args=(stopped,))
        killer.start()
        killed = lab.train(recipe, workers, FaultPlan().kill(CHANCE.randint(2, STEPS), workers - 1, "data"))
        assert killed.outcome.state == "failed"
        resumed = lab.resume(killed.run)
        stopped.set()
        killer.join()
        assert_same(resumed, unharmed[workers])
        assert {path.suffix for path in resumed.run.samples.iterdir()} == {".png", ".mp4"}
    assert KILLED, "no decoder was killed"


KILLED = list[int]()


def kill_decoders(stopped: threading.Event) -> None:
    """Kill decoders below this process, each once it has lived for a moment, but a few at most."""
    while not stopped.wait(0.5) and len(KILLED) < 6:
        below = psutil.Process().children(recursive=True)
        decoders = [process for process in below if is_decoder(process)]
        for process in decoders[:1]:
            process.kill()
            KILLED.append(process.pid)


def is_decoder(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return "headway.data.media.worker" in " ".join(process.cmdline())
    return False


def test_grids_and_samples_of_a_run(lab, images) -> None:
    """Losses by range of time are metrics, grids are in the run, and the verb writes pictures."""
    result = lab.train(recipe_of(images), workers=1)
    assert result.outcome.state == "finished", result.outcome
    run = result.run
    assert sorted(path.name for path in run.samples.iterdir()) == ["step-00000004.png", "step-00000008.png"]
    names = metric_names(run)
    assert {"loss/0.25-0.50", "eval_loss", "eval_loss_ema", "eval_loss/0.50-0.75"} <= set(names)
    counts = [event["loss/0.50-0.75"] for event in result.events("step") if "loss/0.50-0.75" in event]
    assert list(read_metric(run, "loss/0.50-0.75")[1]) == counts

    out = run.path.parent / "two.png"
    words = ["sample", run.name, "--label", "2", "--label", "0", "--steps", "2", "--out", str(out), "--seed", "4"]
    first = headway(*words, "--json", runs=run.path.parent)
    assert first.returncode == 0, first.stderr
    assert json.loads(first.stdout)["conditions"] == [2, 0]
    pixels = np.asarray(Image.open(out))
    assert headway(*words, runs=run.path.parent).returncode == 0
    assert (np.asarray(Image.open(out)) == pixels).all()
    for wrong, why in (
        (["--prompt", "a cat"], "conditioned on classes"),
        (["--label", "3"], "no class 3"),
        (["--out", "x.mp4"], "makes images"),
        (["--out", "x.gif"], "neither a .png nor"),
        (["--sampler", "ddim"], "does not fit objective flow"),
        (["--size", "9x9"], "not divisible into patches"),
        (["--max-tokens", "5"], "no effect with a diffusion model"),
    ):
        failed = headway("sample", run.name, *wrong, runs=run.path.parent)
        assert failed.returncode in (1, 2), failed
        assert why in failed.stderr
    for number in ("", "-2"):  # without --out nothing is overwritten
        assert headway("sample", run.name, "--label", "1", "--steps", "1", runs=run.path.parent).returncode == 0
        assert (run.path.parent / f"{run.name}-{STEPS}{number}.png").is_file()


def test_frechet_distance_of_a_run_is_that_of_its_samples(lab, images, tmp_path) -> None:
    """Recorded in the run, and the formula on samples that `headway sample` draws with the same seed."""
    import torch
    from transformers import CLIPVisionConfig, CLIPVisionModel

    from headway.data.media.corpus import open_media_corpus
    from headway.data.media.pictures import GAP, LEAST_SIDE
    from headway.inference.image_features import FeatureNetwork, distance_of_images
    from headway.track import read_evaluations

    torch.manual_seed(0)
    config = CLIPVisionConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    CLIPVisionModel(config).save_pretrained(tmp_path / "clip")
    recipe = recipe_of(images)
    run = lab.train(recipe, workers=1).run
    words = ["eval", run.name, "--frechet", str(tmp_path / "clip"), "--limit", "16", "--guidance", "1.5", "--json"]
    done = headway(*words, runs=run.path.parent)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    (recorded,) = read_evaluations(run)
    assert [metric.value for metric in recorded.metrics] == [found["frechet"], found["halves"]]

    order, reader = (corpus := open_media_corpus(recipe)).order, corpus.reader
    real = [reader.read(order.numbers(cursor)) for cursor in (0, 8)]
    labels = [word for media in real for label in media.labels.tolist() for word in ("--label", str(label))]
    out = tmp_path / "samples.png"
    drawn = headway("sample", run.name, *labels, "--guidance", "1.5", "--out", str(out), runs=run.path.parent)
    assert drawn.returncode == 0, drawn.stderr
    sheet = np.asarray(Image.open(out).convert("RGB"))
    factor = -(-LEAST_SIDE // 8)  # a sheet of 4 x 4 enlarged samples
    side = 8 * factor + GAP
    corners = [(GAP + side * (number // 4), GAP + side * (number % 4)) for number in range(16)]
    tiles = torch.from_numpy(
        np.stack([sheet[top:, left:][: 8 * factor : factor, : 8 * factor : factor] for top, left in corners])
    )
    truth = torch.from_numpy(np.concatenate([media.pixels[:, 0] for media in real]))
    expected = distance_of_images(FeatureNetwork(tmp_path / "clip"), tiles, truth)
    assert found["frechet"] == pytest.approx(expected, rel=1e-3)

    for wrong, why in ((["--tasks", "gsm8k"], "no --tasks"), (["--limit", "99999"], "an epoch of the data has")):
        failed = headway("eval", run.name, "--frechet", str(tmp_path / "clip"), *wrong, runs=run.path.parent)
        assert failed.returncode in (1, 2)
        assert why in failed.stderr


def headway(*words: str, runs: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headway", *words, "--runs", str(runs)]
    return subprocess.run(command, capture_output=True, text=True, cwd=runs)
