"""Chats encoded by several processes are those of one, in the same order."""

import io
import json

import numpy as np
import pytest

from chat_models import CHATML, byte_tokenizer, chat_template, write_model_folder
from headway.data import chat_batches, chat_build
from headway.data.chat_build import ChatOptions, build_chat_dataset
from headway.data.chat_processes import ChatJob, encoded_batches, read_frame, write_frame
from headway.data.sources import ReadOptions, find_sources
from headway.data.template_layout import LayoutMismatch
from headway.data.tiktoken_encoder import EncodersDiffer
from headway.errors import DamagedData, DataError

TOKENIZER = byte_tokenizer("ab")


def row(number, kind):
    if number % 7 == 3:
        return {"text": "of no use"}
    if kind == "pairs":
        return {"prompt": f"p{number}", "chosen": f"c{number}", "rejected": "r"}
    label = {"label": number % 2 == 0} if kind == "labelled" else {"weight": number}
    return {"prompt": f"p{number}", "completion": f"c{number}" * (number % 5 + 1), **label}


def write_rows(path, kind, count, first=0):
    path.write_text("".join(json.dumps(row(number, kind)) + "\n" for number in range(first, first + count)))
    return path


def facts(batch):
    units = [
        ([(np.concatenate(s.ids).tolist(), s.spans, s.length) for s in unit.samples], *unit[1:]) for unit in batch.units
    ]
    return batch.kind if units else None, units, batch.refused, batch.position


@pytest.mark.parametrize("kind", ["chat", "pairs", "labelled"])
def test_processes_in_turn_give_the_batches_of_one(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(chat_batches, "BATCH_ROWS", 5)
    paths = [write_rows(tmp_path / "a.jsonl", kind, 13), write_rows(tmp_path / "b.jsonl", kind, 19, first=13)]
    files = tuple(find_sources(paths))
    job = ChatJob("", chat_template("chatml"), files, ReadOptions(), fast=False)
    assert ChatJob.from_json(job.to_json()) == job
    one = [facts(batch) for batch in encoded_batches(job, TOKENIZER, TOKENIZER.encode_batch)]
    assert len(one) == 7
    shares = [
        [facts(batch) for batch in encoded_batches(job, TOKENIZER, TOKENIZER.encode_batch, index, 3)]
        for index in range(3)
    ]
    assert [shares[turn % 3][turn // 3] for turn in range(7)] == one
    assert [refusal.where.rsplit("/", 1)[1] for batch in one for refusal in batch[2]] == [
        f"a.jsonl line {n + 1}" if n < 13 else f"b.jsonl line {n - 12}" for n in range(3, 32, 7)
    ]
    for batch in encoded_batches(job, TOKENIZER, TOKENIZER.encode_batch):
        stream = io.BytesIO()
        write_frame(stream, batch)
        stream.seek(0)
        assert facts(read_frame(stream)) == facts(batch)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b"", DamagedData),
        (b'{"kind": "chat"', DamagedData),
        (b'{"failed": "encoders", "message": "a"}\n', EncodersDiffer),
        (b'{"failed": "layout", "message": "a"}\n', LayoutMismatch),
        (b'{"failed": "data", "message": ["a", "b"]}\n', DataError),
        (b'{"kind": "chat", "units": [], "refused": [], "position": 1, "sizes": [9, 0, 0, 0]}\n', DamagedData),
    ],
)
def test_a_process_that_fails_or_is_killed_is_noticed(line, error):
    with pytest.raises(error):
        read_frame(io.BytesIO(line))


@pytest.mark.slow
def test_a_build_in_processes_has_the_version_of_one_in_this(tmp_path, monkeypatch):
    model = write_model_folder(tmp_path / "model", TOKENIZER, CHATML)
    file = write_rows(tmp_path / "rows.jsonl", "labelled", 9000)
    monkeypatch.setattr(chat_build, "PROCESS_BYTES", 0)
    options = ChatOptions(model, reading=ReadOptions(errors="skip"))
    results = [
        build_chat_dataset(tmp_path / f"{engine}{processes}", [file], options, processes=processes, engine=engine)
        for engine in ("tokenizers", "tiktoken")
        for processes in (1, 3)
    ]
    assert len({result.manifest.version for result in results}) == 1
    assert {result.skipped for result in results} == {len(range(3, 9000, 7))}
    with pytest.raises(DataError, match=r"rows.jsonl line 4: no messages"):
        build_chat_dataset(tmp_path / "strict", [file], ChatOptions(model), processes=2)
    assert not (tmp_path / "strict").exists()
