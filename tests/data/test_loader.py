import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.data import (
    MASKED,
    Loader,
    ShardWriter,
    WindowReader,
    finish_dataset,
    held_out,
    open_dataset,
    split_dataset,
    split_windows,
    window_order,
)
from thinned import examples

SEQ = 6


def write_dataset(folder, documents, shard_tokens, dtype="uint16"):
    """Documents are (prompt length, tokens); the tokenizer is not looked at."""
    writer = ShardWriter(folder, dtype=dtype, end_of_text=0, shard_tokens=shard_tokens)
    for prompt, ids in documents:
        writer.add(np.array(ids[:prompt], np.uint32), prompt=True)
        writer.add(np.array(ids[prompt:], np.uint32))
        writer.end_document()
    finish_dataset(folder, writer, vocab_size=300, tokenizer=b"{}")
    return open_dataset(folder)


def lay_out(dataset, documents):
    """For each shard: its tokens, which are a prompt's, and which begin a document, one by one."""
    shards, at = [], iter(documents)
    for size in dataset.shard_tokens:
        tokens, prompt, begins = [], [], []
        while len(tokens) < size:
            length, ids = next(at)
            tokens += [*ids, 0]
            prompt += [True] * length + [False] * (len(ids) - length + 1)
            begins += [True] + [False] * len(ids)
        shards.append((tokens, prompt, begins))
    return shards


def windows_by_hand(shards, seq, mask_boundaries):
    """(inputs, labels) of every window, one token at a time."""
    rows_read = []
    for tokens, prompt, begins in shards:
        for start in range(0, len(tokens) - seq, seq + 1):
            labels = [
                MASKED if prompt[p] or (mask_boundaries and begins[p]) else tokens[p]
                for p in range(start + 1, start + seq + 1)
            ]
            rows_read.append((tokens[start : start + seq], labels))
    return rows_read


def document(draw_ids, prompt):
    return (min(prompt, len(draw_ids)), draw_ids)


documents_strategy = st.lists(
    st.builds(document, st.lists(st.integers(1, 299), max_size=25), st.integers(0, 20)), min_size=8, max_size=40
)


@settings(deadline=None, max_examples=examples(30))
@given(
    documents=documents_strategy,
    shard_tokens=st.integers(20, 200),
    seq=st.integers(1, 9),
    prompts=st.booleans(),
    boundaries=st.booleans(),
    dtype=st.sampled_from(["uint16", "uint32"]),
)
def test_windows_and_masks_match_a_reference(
    tmp_path_factory, documents, shard_tokens, seq, prompts, boundaries, dtype
):
    documents = [(prompt if prompts else 0, ids) for prompt, ids in documents]
    if sum(len(ids) + 1 for _, ids in documents) < 40:
        documents.append((0, list(range(1, 60))))
    dataset = write_dataset(tmp_path_factory.mktemp("set"), documents, shard_tokens, dtype)
    want = windows_by_hand(lay_out(dataset, documents), seq, boundaries)
    reader = WindowReader(dataset, seq, mask_boundaries=boundaries)
    assert reader.windows == len(want)
    ids = np.random.default_rng(0).permutation(len(want))
    batch = reader.read(ids)
    assert batch.inputs.tolist() == [want[i][0] for i in ids]
    assert batch.labels.tolist() == [want[i][1] for i in ids]
    assert batch.trained == sum(label != MASKED for _, labels in want for label in labels)
    assert batch.inputs.dtype == batch.labels.dtype == np.int64
    assert reader.masks == (boundaries or any(prompt for prompt, _ in documents))


@settings(deadline=None, max_examples=examples(40))
@given(
    lengths=st.lists(st.integers(0, 30), min_size=8, max_size=60),
    shard_tokens=st.integers(20, 300),
    seq=st.sampled_from([1, 2, 7, 40, 150]),
    masks=st.booleans(),
    given_arrays=st.booleans(),
)
def test_each_token_has_the_number_of_its_document_in_its_row(
    tmp_path_factory, lengths, shard_tokens, seq, masks, given_arrays
):
    documents = [(0, [7] * length) for length in (*lengths, 160)]
    dataset = write_dataset(tmp_path_factory.mktemp("set"), documents, shard_tokens)
    want = []
    for tokens, _, begins in lay_out(dataset, documents):
        document_of = np.cumsum(begins)
        for start in range(0, len(tokens) - seq, seq + 1):
            row = document_of[start : start + seq]
            want.append([list(dict.fromkeys(row)).index(number) for number in row])
    reader = WindowReader(dataset, seq, mask_boundaries=masks, documents=True)
    locations = reader.locate(np.arange(reader.windows))
    arrays = (np.full((len(want), seq + 1), -1), np.full((len(want), seq), -1, np.int32)) if given_arrays else ()
    batch = reader.read_at(locations, *arrays)
    assert batch.documents.tolist() == want
    assert batch.documents.dtype == np.int32
    assert not given_arrays or batch.documents is arrays[1]
    assert WindowReader(dataset, seq, mask_boundaries=masks).read([0]).documents is None


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    """Every token says where it is: position in the whole, end-of-text tokens aside."""
    rng = np.random.default_rng(1)
    ids = iter(range(1, 60_000))
    documents = [(0, [next(ids) for _ in range(int(rng.integers(20, 200)))]) for _ in range(100)]
    return write_dataset(tmp_path_factory.mktemp("numbered"), documents, 1500)


def test_without_masks_labels_share_memory_with_inputs_shifted_by_one(numbered):
    batch = WindowReader(numbered, SEQ).read([0, 5, 2])
    assert np.shares_memory(batch.inputs, batch.labels)
    assert np.array_equal(batch.inputs[:, 1:], batch.labels[:, :-1])
    assert batch.trained == 3 * SEQ


def test_batches_are_not_overwritten_by_later_reads(numbered):
    reader = WindowReader(numbered, SEQ)
    first = reader.read([1, 2])
    kept = first.inputs.copy()
    first.labels[:] = 0
    assert np.array_equal(reader.read([1, 2]).inputs, kept)


def test_held_out_tokens_are_never_trained_on(numbered):
    reader = WindowReader(numbered, SEQ)
    split = split_dataset(numbered, SEQ, 0.2)
    aside = reader.read(held_out(split))
    forbidden = set(aside.inputs.ravel()) | set(aside.labels.ravel())
    forbidden.discard(0)  # the end of text is everywhere
    loader = Loader(reader, split, seed=3, batch=16)
    seen = set()
    for cursor in range(0, 3 * split.training, 16):
        batch = loader.read(cursor)
        seen |= set(batch.inputs.ravel()) | set(batch.labels.ravel())
    seen.discard(0)
    assert len(forbidden) > 500
    assert not seen & forbidden
    everything = reader.read(np.arange(reader.windows))
    assert seen | forbidden == (set(everything.inputs.ravel()) | set(everything.labels.ravel())) - {0}


def test_a_loader_reads_what_order_says_at_any_cursor_in_any_order(numbered, monkeypatch):
    monkeypatch.setattr("headway.data.loader._CHUNK_SAMPLES", 50)
    reader = WindowReader(numbered, SEQ)
    split = split_windows(reader.windows, 0.1, numbered.version)
    loader = Loader(reader, split, seed=5, batch=8)
    cursors = [0, 8, 16, 400, 408, 3, 11, 8 * 10**9, 0, 2**62, 400, 2**63, 2**63 + 8, 48, 56]
    for cursor in cursors:
        assert np.array_equal(loader.read(cursor).inputs, reader.read(window_order(split, 5, cursor, 8)).inputs)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 12])
def test_ranks_together_read_the_same_batch(numbered, ranks):
    reader = WindowReader(numbered, SEQ, mask_boundaries=True, documents=True)
    split = split_dataset(numbered, SEQ, 0.1)
    whole = Loader(reader, split, 1, 12)
    share = 12 // ranks
    parts = [Loader(reader, split, 1, 12, rows=(r * share, (r + 1) * share)) for r in range(ranks)]
    for cursor in (0, 12, 24, 12 * 10**8, 5):
        together = [part.read(cursor) for part in parts]
        for field in ("inputs", "labels", "documents"):
            assert np.array_equal(
                np.concatenate([getattr(b, field) for b in together]), getattr(whole.read(cursor), field)
            )
        assert sum(b.trained for b in together) == whole.read(cursor).trained


def test_a_batch_larger_than_an_epoch(tmp_path):
    dataset = write_dataset(tmp_path, [(0, list(range(1, 21)))], 1000)
    reader = WindowReader(dataset, SEQ)
    split = split_dataset(dataset, SEQ, 0.01)
    assert (reader.windows, split.held_out) == (3, 1)
    inputs = Loader(reader, split, 0, 10).read(0).inputs
    assert len(np.unique(inputs, axis=0)) == 2
    for epoch in range(5):
        assert len(np.unique(inputs[2 * epoch : 2 * epoch + 2], axis=0)) == 2


def test_ids_outside_are_refused(numbered):
    reader = WindowReader(numbered, SEQ)
    for ids in ([-1], [reader.windows], [0, reader.windows + 5]):
        with pytest.raises(IndexError, match="window ids go from 0"):
            reader.read(ids)
    assert reader.read([]).inputs.shape == (0, SEQ)


def test_reading_data_needs_no_torch():
    check = "import sys, headway.data; assert not {'torch', 'tokenizers', 'rich'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], env={"PYTHONPATH": ":".join(sys.path)}, check=True)
