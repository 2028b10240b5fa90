import hashlib
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from headway.data.sources import TextBlock
from headway.data.tokenizer import cut_blocks, load_tokenizer, train_tokenizer
from headway.errors import DataError
from thinned import examples

TEXTS = ["def add(a, b):\n    return a + b\n" * 20, "Ünïcode — 你好, it's 42 o'clock.\r\n" * 20, "x  \n\n\ty z " * 20]
TRAIN = """
import sys
from headway.data.tokenizer import train_tokenizer
texts = [f"sentence {i} about {i * i % 97} things, and so on" for i in range(500)]
sys.stdout.buffer.write(train_tokenizer(iter(texts), 400).to_bytes())
"""


@pytest.fixture(scope="module")
def trained():
    return train_tokenizer(TEXTS, 300)


def test_training_again_in_another_process_gives_the_same_bytes():
    digests = set()
    for seed, threads in (("1", "1"), ("2", "3")):
        environment = {"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": threads}
        completed = subprocess.run([sys.executable, "-c", TRAIN], env=environment, check=True, capture_output=True)
        assert len(completed.stdout) > 1000
        digests.add(hashlib.sha256(completed.stdout).hexdigest())
    assert len(digests) == 1


@settings(deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_comes_back(trained, text):
    ids = trained.encode(text)
    assert trained.decode(ids) == text
    assert trained.end_of_text not in ids


def test_special_tokens_in_text_are_letters_unless_asked_for(trained, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(trained.to_bytes())
    plain = load_tokenizer(tmp_path)
    text = "a<|endoftext|>b"
    assert trained.end_of_text not in plain.encode(text)
    assert plain.decode(plain.encode(text)) == text
    special = load_tokenizer(tmp_path / "tokenizer.json", special_tokens=True)
    assert special.encode(text).tolist().count(trained.end_of_text) == 1
    assert special.to_bytes() == trained.to_bytes() == plain.to_bytes()


def test_vocabulary_has_the_requested_size(trained):
    assert trained.vocab_size == 300
    assert len(set(trained.raw.get_vocab().values())) == 300
    with pytest.raises(DataError, match="vocabulary of 256 is too small"):
        train_tokenizer(TEXTS, 256)


def word_level(path, specials, **settings):
    raw = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.add_special_tokens([AddedToken(name, special=True) for name in specials])
    if settings.get("cut"):
        raw.enable_truncation(2)
        raw.enable_padding(length=8)
    raw.save(str(path))
    return path


@pytest.mark.parametrize("name", ["<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "[EOS]"])
def test_the_end_of_text_is_found_by_its_usual_names(tmp_path, name):
    assert load_tokenizer(word_level(tmp_path / "t.json", ["<pad>", name])).end_of_text == 4


def test_an_unusual_end_of_text_must_be_named(tmp_path):
    path = word_level(tmp_path / "t.json", ["<pad>", "<stop>"])
    with pytest.raises(DataError, match="no end-of-text token") as error:
        load_tokenizer(path)
    assert "--end-of-text" in error.value.hint
    assert "<stop>" in error.value.hint
    assert load_tokenizer(path, end_of_text="<stop>").end_of_text == 4
    assert load_tokenizer(path, end_of_text=4).end_of_text == 4
    with pytest.raises(DataError, match="no token '<halt>'"):
        load_tokenizer(path, end_of_text="<halt>")


def test_truncation_and_padding_of_a_loaded_tokenizer_are_dropped(tmp_path):
    loaded = load_tokenizer(word_level(tmp_path / "t.json", ["</s>"], cut=True))
    assert loaded.encode("a b a b").tolist() == [0, 1, 0, 1]
    assert loaded.encode("a").tolist() == [0]


def test_files_that_are_no_tokenizers(tmp_path):
    with pytest.raises(DataError, match="no tokenizer at"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="is not a tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b"\xff")
    with pytest.raises(DataError, match="is not a tokenizer"):
        load_tokenizer(tmp_path)


pieces = st.lists(
    st.sampled_from(["word", " ", "  ", "\n", "\t", "\r\n", "'s", "42", "你好", "é", "...", "<|endoftext|>", "_x"]),
    max_size=200,
).map("".join)


def as_blocks(text, width):
    parts = [text[i : i + width] for i in range(0, len(text), width)] or [""]
    return [TextBlock(part, False, part_number == len(parts) - 1, 0) for part_number, part in enumerate(parts)]


@settings(deadline=None, max_examples=examples(100))
@given(text=pieces, size=st.integers(1, 40), width=st.integers(1, 300))
def test_cut_text_has_the_tokens_of_the_full_text(trained, text, size, width):
    blocks = list(cut_blocks(as_blocks(text, width), trained.separable, size=size, limit=10**9))
    assert "".join(block.text for block in blocks) == text
    assert [block.last for block in blocks] == [False] * (len(blocks) - 1) + [True]
    tokens = [int(i) for block in blocks for i in trained.encode(block.text)]
    assert tokens == trained.encode(text).tolist()


def test_long_text_is_cut_into_pieces_of_about_the_size(trained):
    text = "a line of text, as they come\n" * 2000
    blocks = list(cut_blocks(as_blocks(text, 1000), trained.separable, size=500, limit=10**6))
    assert max(len(block.text) for block in blocks) < 700
    assert len(blocks) > 80


def test_text_without_a_safe_cut_is_cut_at_the_limit(trained):
    text = "A" * 10_000
    blocks = list(cut_blocks(as_blocks(text, 100), trained.separable, size=500, limit=3000))
    assert [len(block.text) for block in blocks] == [3000, 3000, 3000, 1000]


def test_a_tokenizer_that_marks_beginnings_is_not_cut_short_of_the_limit(tmp_path):
    raw = Tokenizer(models.BPE({chr(97 + i): i for i in range(26)} | {"▁": 26, "</s>": 27}, []))
    raw.normalizer = normalizers.Prepend("▁")
    raw.save(str(tmp_path / "t.json"))
    loaded = load_tokenizer(tmp_path / "t.json")
    blocks = list(cut_blocks(as_blocks("ab cd " * 1000, 256), loaded.separable, size=100, limit=4000))
    assert [len(block.text) for block in blocks] == [4000, 2000]


def test_prompts_are_not_merged_with_text(trained):
    blocks = [
        TextBlock("ask\nme " * 90, True, False, 1),
        TextBlock("tell\nyou " * 90, False, True, 2),
        TextBlock("end", False, True, 3),
    ]
    pieces = list(cut_blocks(blocks, trained.separable, size=50, limit=10**6))
    assert "".join(b.text for b in pieces if b.prompt) == blocks[0].text
    assert "".join(b.text for b in pieces if not b.prompt) == blocks[1].text + "end"
    assert [b.text for b in pieces if b.last][-1] == "end"
    assert sum(b.last for b in pieces) == 2
