import gzip
import hashlib
import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from eventually import eventually
from headway.data import BuildOptions, ReadOptions, build_dataset, open_dataset, train_tokenizer
from headway.errors import DataError

TEXTS = {
    "a.txt": "The first file.\nIt has two lines.\n",
    "b.txt": "",
    "c/d.txt": "Ünïcode 你好 <|endoftext|> done\r\n" * 30,
    "z.txt": "a last one " * 500,
}
SMALL = BuildOptions(vocab_size=300)
RUN = """
import sys
from headway.data import BuildOptions, build_dataset
print(build_dataset(sys.argv[1], [sys.argv[2]], BuildOptions(vocab_size=300)).manifest.version)
"""


def write_texts(folder: Path) -> Path:
    for name, text in TEXTS.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    return folder


@pytest.fixture
def texts(tmp_path):
    return write_texts(tmp_path / "texts")


def run_build(out, pattern, **environment):
    environment = os.environ | {"PYTHONPATH": ":".join(sys.path)} | environment
    command = [sys.executable, "-c", RUN, str(out), str(pattern)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def decoded(folder: Path) -> list[tuple[str, str]]:
    """(prompt, text) of every document, read with NumPy and the tokenizers library alone."""
    from tokenizers import Tokenizer

    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    manifest = json.loads((folder / "manifest.json").read_text())
    documents = []
    for number in range(len(manifest["files"]) // 2):
        ids = np.fromfile(folder / f"tokens-{number:05d}.bin", manifest["dtype"])
        start = 0
        for end, prompt in np.fromfile(folder / f"documents-{number:05d}.bin", "<u8").reshape(-1, 2).tolist():
            assert ids[end - 1] == manifest["end_of_text"]
            assert manifest["end_of_text"] not in ids[start : end - 1]
            halves = (ids[start : start + prompt], ids[start + prompt : end - 1])
            documents.append(tuple(raw.decode(half.tolist(), skip_special_tokens=False) for half in halves))
            start = end
        assert start == len(ids)
    return documents


def test_every_document_comes_back(texts, tmp_path):
    built = build_dataset(tmp_path / "out", [f"{texts}/**/*.txt"], SMALL)
    assert decoded(tmp_path / "out") == [("", text) for text in TEXTS.values() if text]
    assert (built.changed, built.sources, built.skipped) == (True, 4, 0)
    assert built.source_bytes == sum(len(text.encode()) for text in TEXTS.values())
    assert built.manifest.documents == 3


def test_the_manifest_matches_the_files(texts, tmp_path):
    out = tmp_path / "out"
    built = build_dataset(out, [f"{texts}/**/*.txt"], SMALL)
    content = (out / "manifest.json").read_bytes()
    manifest = json.loads(content)
    assert built.manifest.version == hashlib.sha256(content).hexdigest()[:16]
    for file in [*manifest["files"], manifest["tokenizer"]]:
        data = (out / file["name"]).read_bytes()
        assert (file["bytes"], file["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
    assert str(tmp_path).encode() not in content
    assert manifest.keys() == {
        "format", "dtype", "vocab_size", "end_of_text", "tokens", "documents", "prompt_tokens", "files", "tokenizer",
    }  # fmt: skip


def test_same_input_same_version_from_anywhere_with_any_threads(texts, tmp_path):
    first = build_dataset(tmp_path / "one", [f"{texts}/**/*.txt"], SMALL).manifest.version
    moved = write_texts(tmp_path / "moved" / "elsewhere")
    for number, threads in enumerate(("1", "3")):
        completed = run_build(tmp_path / f"two-{number}", f"{moved}/**/*.txt", RAYON_NUM_THREADS=threads)
        assert completed.stdout.strip() == first, completed.stderr
    packed = tmp_path / "packed"
    for name, text in TEXTS.items():
        path = packed / f"{name}.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(text.encode()))
    assert build_dataset(tmp_path / "three", [f"{packed}/**/*.gz"], SMALL).manifest.version == first
    (moved / "a.txt").write_text("changed")
    assert build_dataset(tmp_path / "four", [f"{moved}/**/*.txt"], SMALL).manifest.version != first


def test_cutting_long_documents_does_not_change_the_data_set(texts, tmp_path, monkeypatch):
    whole = build_dataset(tmp_path / "one", [f"{texts}/**/*.txt"], SMALL).manifest.version
    module = importlib.import_module("headway.data.build")
    monkeypatch.setattr(module, "PIECE_CHARS", 64)
    monkeypatch.setattr(module, "BATCH_CHARS_PER_CPU", 50)
    monkeypatch.setattr(importlib.import_module("headway.data.sources"), "BLOCK_CHARS", 100)
    options = BuildOptions(tokenizer=str(tmp_path / "one"))
    assert build_dataset(tmp_path / "two", [f"{texts}/**/*.txt"], options).manifest.version == whole


def test_prompts_are_kept_and_counted(tmp_path):
    rows = [("", "alone"), ("ask me", "tell you"), ("only a prompt", ""), ("", ""), ("again", "and again")]
    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps({"q": q, "text": t}) for q, t in rows))
    options = BuildOptions(vocab_size=300, reading=ReadOptions(prompt_field="q"))
    built = build_dataset(tmp_path / "out", [tmp_path / "t.jsonl"], options)
    assert decoded(tmp_path / "out") == [row for row in rows if row != ("", "")]
    table = np.fromfile(tmp_path / "out" / "documents-00000.bin", "<u8").reshape(-1, 2)
    assert built.manifest.prompt_tokens == table[:, 1].sum() > 0


def test_shards_are_filled_with_whole_documents(texts, tmp_path):
    out = tmp_path / "out"
    built = build_dataset(out, [f"{texts}/**/*.txt"], BuildOptions(vocab_size=300, shard_tokens=100))
    assert len(built.manifest.shards()) == 3
    assert decoded(out) == [("", text) for text in TEXTS.values() if text]
    with pytest.raises(DataError, match="shard_tokens is 0"):
        BuildOptions(shard_tokens=0)


def test_a_loaded_tokenizer_of_a_large_vocabulary_needs_uint32(texts, tmp_path):
    from tokenizers import AddedToken, Tokenizer

    raw = Tokenizer.from_str(train_tokenizer(["abc"], 300).to_bytes().decode())
    raw.add_tokens([AddedToken(f"token{i}zz", normalized=False) for i in range(70_000)])
    raw.save(str(tmp_path / "t.json"))
    (texts / "a.txt").write_text("token69999zz and token3zz")
    options = BuildOptions(tokenizer=str(tmp_path / "t.json"))
    built = build_dataset(tmp_path / "out", [texts / "a.txt"], options)
    assert built.manifest.dtype == "uint32"
    assert built.manifest.vocab_size == raw.get_vocab_size()
    assert open_dataset(tmp_path / "out").tokens[0].max() == raw.token_to_id("token69999zz")
    assert decoded(tmp_path / "out") == [("", "token69999zz and token3zz")]


def test_building_again_changes_nothing(texts, tmp_path):
    out, pattern = tmp_path / "out", f"{texts}/**/*.txt"
    first = build_dataset(out, [pattern], SMALL)
    before = (out / "manifest.json").stat()
    calls = []
    again = build_dataset(out, [pattern], SMALL, progress=calls.append)
    assert (again.changed, again.manifest, calls) == (False, first.manifest, [])  # nothing was even read
    os.utime(texts / "a.txt")
    again = build_dataset(out, [pattern], SMALL, progress=calls.append)
    assert (again.changed, again.manifest) == (False, first.manifest)
    assert calls
    assert (out / "manifest.json").stat().st_ino == before.st_ino


def test_another_version_is_replaced_only_by_force(texts, tmp_path):
    out, pattern = tmp_path / "out", f"{texts}/**/*.txt"
    first = build_dataset(out, [pattern], SMALL).manifest.version
    (texts / "a.txt").write_text("something else")
    with pytest.raises(DataError, match=f"holds version {first}, this build makes") as error:
        build_dataset(out, [pattern], SMALL)
    assert "--force" in error.value.hint
    assert open_dataset(out, verify="full").version == first
    forced = build_dataset(out, [pattern], SMALL, force=True)
    assert forced.changed
    assert open_dataset(out, verify="full").version == forced.manifest.version != first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "texts"]


def test_a_damaged_data_set_of_the_same_version_is_mended(texts, tmp_path):
    out, pattern = tmp_path / "out", f"{texts}/**/*.txt"
    version = build_dataset(out, [pattern], SMALL).manifest.version
    with (out / "tokens-00000.bin").open("r+b") as file:
        file.write(b"\xff\xff")
    assert build_dataset(out, [pattern], SMALL).changed
    assert open_dataset(out, verify="full").version == version


def test_hint_about_a_missing_dataset_is_a_command_that_works(texts, tmp_path):
    for folder, hint in (
        (tmp_path / "new", f"headway data build {tmp_path / 'new'} "),
        (texts, "made by headway data"),
    ):
        with pytest.raises(DataError, match="holds no dataset") as caught:
            open_dataset(folder)
        assert hint in (caught.value.hint or "")


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_that_is_not_a_dataset_is_never_touched(texts, tmp_path, force):
    with pytest.raises(DataError, match="holds no dataset"):
        build_dataset(texts, [f"{texts}/*.txt"], SMALL, force=force)
    with pytest.raises(DataError, match="is a file"):
        build_dataset(texts / "a.txt", [f"{texts}/*.txt"], SMALL, force=force)
    assert (texts / "a.txt").read_text() == TEXTS["a.txt"]
    (tmp_path / "empty").mkdir()
    assert build_dataset(tmp_path / "empty", [f"{texts}/*.txt"], SMALL, force=force).changed


@pytest.mark.parametrize("stage", ["tokenizer", "encode"])
def test_interrupting_leaves_nothing(texts, tmp_path, stage):
    def stop(progress):
        if progress.stage == stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_dataset(tmp_path / "out", [f"{texts}/*.txt"], SMALL, progress=stop)
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


def test_a_real_interrupt_in_the_middle_leaves_nothing(tmp_path):
    (tmp_path / "big.txt").write_text("".join(f"line {i} {i * 7919 % 1000}\n" for i in range(40_000)))
    command = [sys.executable, "-c", RUN, str(tmp_path / "out"), str(tmp_path / "big.txt")]
    environment = os.environ | {"PYTHONPATH": ":".join(sys.path)}
    child = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    eventually(lambda: list(tmp_path.glob(".out.*.building")))
    child.send_signal(signal.SIGINT)
    errors = child.communicate(timeout=240)[1]
    assert b"KeyboardInterrupt" in errors
    assert [path.name for path in tmp_path.iterdir()] == ["big.txt"]


def test_a_full_disk_is_a_clear_error_and_leaves_nothing(tmp_path):
    (tmp_path / "t.txt").write_text("some words to fill a disk with\n" * 5000)
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))\n" + RUN
    command = [sys.executable, "-c", limited, str(tmp_path / "out"), str(tmp_path / "t.txt")]
    environment = os.environ | {"PYTHONPATH": ":".join(sys.path)}
    completed = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert "DamagedData: cannot write" in completed.stderr
    assert "File too large" in completed.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["t.txt"]


def test_progress_rises_to_the_total_in_both_stages(texts, tmp_path):
    calls = []
    built = build_dataset(tmp_path / "out", [f"{texts}/**/*.txt"], SMALL, progress=calls.append)
    for stage in ("tokenizer", "encode"):
        done = [call.done_bytes for call in calls if call.stage == stage]
        assert done == sorted(done)
        assert done[-1] == built.source_bytes
    assert {call.total_bytes for call in calls} == {built.source_bytes}


def test_a_tokenizer_is_trained_on_an_even_sample_of_a_large_source(tmp_path, monkeypatch):
    module = importlib.import_module("headway.data.build")
    lines = [json.dumps({"text": f"document {i:04d}"}) for i in range(1000)]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    size = (tmp_path / "t.jsonl").stat().st_size
    seen = []
    real = module.train_tokenizer
    monkeypatch.setattr(module, "TRAIN_BYTES", size // 10)
    monkeypatch.setattr(module, "train_tokenizer", lambda texts, size: real(record(texts), size))

    def record(texts):
        seen.extend(texts)
        return seen

    build_dataset(tmp_path / "out", [tmp_path / "t.jsonl"], SMALL)
    numbers = [int(text.split()[1]) for text in seen]
    assert 98 <= len(numbers) <= 102
    assert set(np.diff(numbers)) <= {9, 10, 11}


def test_errors_travel_out_of_the_native_code(texts, tmp_path):
    (texts / "bad.jsonl").write_text('{"text": "good"}\n{"text"')
    with pytest.raises(DataError, match=r"bad\.jsonl line 2: not JSON"):
        build_dataset(tmp_path / "out", [texts / "bad.jsonl"], SMALL)
    skipped = []
    options = BuildOptions(vocab_size=300, reading=ReadOptions(errors="skip"))
    built = build_dataset(tmp_path / "out", [texts / "bad.jsonl"], options, on_skip=skipped.append)
    assert built.skipped == len(skipped) == 1
    assert build_dataset(tmp_path / "out", [texts / "bad.jsonl"], options).skipped == 1
    with pytest.raises(DataError, match="hold no text"):
        build_dataset(tmp_path / "none", [texts / "b.txt"], SMALL)
    assert not (tmp_path / "none").exists()
