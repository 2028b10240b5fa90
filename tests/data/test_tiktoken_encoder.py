import functools
import json
import random
import sys
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.data import BuildOptions, build_dataset, load_tokenizer, train_tokenizer
from headway.data import tiktoken_encoder as module
from headway.data.merges import NotProven
from headway.data.probes import probes
from headway.data.tiktoken_encoder import EncodersDiffer, _alphabet, _has_long_run, fast_encoder
from headway.errors import DataError
from thinned import examples

tiktoken = pytest.importorskip("tiktoken")
tokenizers = pytest.importorskip("tokenizers")

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
COMMON = "the of and to in is that it was for on are with as his they be at one have this"


@functools.cache
def corpus():
    """Words of several scripts, code and numbers, so that merges of all kinds are learnt."""
    rng = random.Random(1)
    lines = ["def f(x):", "    return x + 1", "\tif not y:", "12 345 6789", "naïve café", "über Straße", "你好 世界"]
    words = [*COMMON.split(), *list(probes([]))[1:60], *lines]
    return ["".join(rng.choice(words) + rng.choice((" ", " ", "\n", "  ")) for _ in range(80)) for _ in range(60)]


def trained(pre, *, vocab_size=600, normalizer=None, added=(), special=("<|endoftext|>",), **model):
    raw = tokenizers.Tokenizer(tokenizers.models.BPE(**model))
    raw.pre_tokenizer, raw.normalizer = pre, normalizer
    raw.decoder = tokenizers.decoders.ByteLevel()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(corpus(), trainer)
    raw.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in added])
    return raw


def byte_level(use_regex=True, add_prefix_space=False):
    return tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=use_regex)


def split_by(pattern, behavior="isolated", invert=False):
    pre = tokenizers.pre_tokenizers
    return pre.Sequence([pre.Split(tokenizers.Regex(pattern), behavior, invert=invert), byte_level(use_regex=False)])


KINDS = {
    "gpt2": lambda: trained(byte_level()),
    "llama3": lambda: trained(split_by(LLAMA3), ignore_merges=True),
    "qwen2": lambda: trained(
        split_by(QWEN2), normalizer=tokenizers.normalizers.NFC(), added=["<tool>", "<tool>s", "</tool>"]
    ),
    "digits": lambda: trained(
        tokenizers.pre_tokenizers.Sequence([tokenizers.pre_tokenizers.Digits(individual_digits=True), byte_level()])
    ),
}


def loaded(tmp_path, raw, **options):
    (tmp_path / "tokenizer.json").write_text(raw.to_str())
    return load_tokenizer(tmp_path, end_of_text="<|endoftext|>", **options)


@pytest.fixture(scope="module", params=[*KINDS, "ours", "special"])
def both(request, tmp_path_factory):
    """A tokenizer, and the same through tiktoken."""
    if request.param == "ours":
        slow = train_tokenizer(corpus(), 500)
    elif request.param == "special":
        slow = loaded(tmp_path_factory.mktemp("t"), KINDS["gpt2"](), special_tokens=True)
    else:
        slow = loaded(tmp_path_factory.mktemp("t"), KINDS[request.param]())
    return slow, fast_encoder(slow)


snippets = st.one_of(
    st.text(max_size=30),
    st.text(alphabet=" \t\n\r\u00a0\u3000", max_size=12),
    st.text(alphabet="aAsStTdDmMlLvVrReE'\u017f\u2019 0123456789٣½.,-_<>|/", max_size=30),
    st.text(alphabet=st.characters(min_codepoint=0x300, max_codepoint=0x370), max_size=5),
    st.sampled_from(
        ["<|endoftext|>", "<tool>", "<tool>s", "</tool>", "<too", "e\u0301", ">\u0338", "\u1100\u1161", "don't"]
    ),
    st.binary(max_size=20).map(lambda some: some.decode("utf-8", "replace")),
)


@settings(deadline=None, max_examples=examples(12))
@given(parts=st.lists(snippets, max_size=12))
def test_the_same_tokens_for_any_text(both, parts):
    slow, fast = both
    text = "".join(parts)
    want = slow.raw.encode(text, add_special_tokens=False).ids
    assert fast.encode(text).tolist() == want
    assert fast.encode(text).dtype == np.uint32


def test_tokens_are_equal_for_every_unicode_character(both):
    """In two surroundings each; some 1.1 million letters, so every 97th."""
    slow, fast = both
    letters = [chr(code) for code in range(0, 0x110000, 97) if not 0xD800 <= code < 0xE000]
    texts = [
        "".join(f"{a}{b} " for a, b in zip(letters[i : i + 50], "a1.' " * 10, strict=False))
        for i in range(0, len(letters), 50)
    ]
    for want, ids in zip(slow.encode_batch(texts), (fast.encode(text) for text in texts), strict=True):
        assert np.array_equal(want, ids)


def test_batches_are_in_order_whatever_the_threads(both):
    slow, fast = both
    texts = [f"text number {i} " * (i % 7) for i in range(300)]
    for threads in (1, 4):
        fast.threads = threads
        assert [ids.tolist() for ids in fast.encode_batch(texts)] == [ids.tolist() for ids in slow.encode_batch(texts)]


def test_special_tokens_are_letters_unless_they_are_asked_for(tmp_path):
    raw = KINDS["gpt2"]()
    plain, asked = (fast_encoder(loaded(tmp_path, raw, special_tokens=flag)) for flag in (False, True))
    end = raw.token_to_id("<|endoftext|>")
    assert end not in plain.encode("a<|endoftext|>b").tolist()
    assert asked.encode("a<|endoftext|>b<|endoftext|>").tolist().count(end) == 2


def test_texts_with_long_runs_use_tokenizers(both, monkeypatch):
    slow, fast = both
    for text in ("a" * 9000, " " * 5000 + "x", "-" * 6000, "words " * 500 + "é" * 4200 + " end"):
        assert _has_long_run(text)
        monkeypatch.setattr(fast, "_plain", None)
        assert fast.encode(text).tolist() == slow.encode(text).tolist()
        monkeypatch.undo()
    for text in ("", "word " * 3000, "a" * 2000, "def f():\n    pass\n" * 400, "你好，世界。" * 900):
        assert not _has_long_run(text)


def test_a_byte_without_a_token_is_left_out_as_the_other_library_does(tmp_path):
    content = json.loads(KINDS["gpt2"]().to_str())
    letter = dict(_alphabet())[4]
    del content["model"]["vocab"][letter]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    slow = load_tokenizer(tmp_path)
    fast = fast_encoder(slow)
    assert fast.lacks
    for text in ("a\x04b", "\x04", "ab", "x \x04\x04 y" * 5):
        assert fast.encode(text).tolist() == slow.encode(text).tolist()


def test_the_alphabet_is_the_librarys():
    assert sorted(letter for _, letter in _alphabet()) == sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    raw = trained(byte_level(), vocab_size=257)
    for value, letter in _alphabet():
        if value < 128:
            assert raw.encode(chr(value)).tokens == [letter]


REFUSED = {
    "pre-tokenizer": lambda: trained(byte_level(add_prefix_space=True)),
    "not equivalent to one": lambda: trained(
        tokenizers.pre_tokenizers.Sequence([tokenizers.pre_tokenizers.Whitespace(), byte_level()])
    ),
    "no one regular|pre-tokenizer": lambda: trained(split_by(LLAMA3, behavior="removed", invert=True)),
    "normalizer is NFKC": lambda: trained(byte_level(), normalizer=tokenizers.normalizers.NFKC()),
    "with unk_token": lambda: trained(byte_level(), unk_token="<unk>", special=("<|endoftext|>", "<unk>")),
}


@pytest.mark.parametrize("why", REFUSED)
def test_unprovable_tokenizers_are_refused_with_the_reason(tmp_path, why):
    with pytest.raises(NotProven, match=why):
        fast_encoder(loaded(tmp_path, REFUSED[why]()))


def test_added_tokens_that_take_in_spaces_are_refused(tmp_path):
    raw = KINDS["gpt2"]()
    raw.add_tokens([tokenizers.AddedToken("<x>", lstrip=True, normalized=False)])
    with pytest.raises(NotProven, match="absorb white space"):
        fast_encoder(loaded(tmp_path, raw))


def test_merges_that_ranks_would_get_wrong_are_refused(tmp_path):
    content = json.loads(KINDS["gpt2"]().to_str())
    content["model"]["merges"] = [["b", "c"], ["a", "b"], ["ab", "c"]]
    letters = [letter for _, letter in _alphabet()]
    content["model"]["vocab"] = {token: i for i, token in enumerate([*letters, "bc", "ab", "abc", "<|endoftext|>"])}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(NotProven, match="could be merged from a pair"):
        fast_encoder(load_tokenizer(tmp_path))


def test_a_pattern_that_tiktoken_reads_otherwise_is_found_by_the_probes(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_GPT2", module._GPT2.replace(r"\s+(?!\S)|", ""))
    with pytest.raises(EncodersDiffer, match="disagree on a text"):
        fast_encoder(loaded(tmp_path, KINDS["gpt2"]()))
    monkeypatch.setattr(module, "_GPT2", r"\p{L}+| ")
    with pytest.raises(EncodersDiffer):
        fast_encoder(loaded(tmp_path, KINDS["gpt2"]()))


def test_without_the_package_it_is_not_proven(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(NotProven, match="tiktoken package is not installed"):
        fast_encoder(loaded(tmp_path, KINDS["gpt2"]()))


# -- builds


@pytest.fixture
def sources(tmp_path):
    rng = random.Random(0)
    texts = corpus()
    for i in range(130):
        (tmp_path / f"{i:03d}.txt").write_text("".join(rng.choices(texts, k=2)))
    return f"{tmp_path}/*.txt"


@pytest.mark.slow
def test_both_engines_build_the_same_version_and_the_record_says_which(sources, tmp_path, monkeypatch):
    options = BuildOptions(vocab_size=400)
    first = build_dataset(tmp_path / "one", [sources], options, engine="tokenizers")
    two = build_dataset(tmp_path / "two", [sources], options, engine="tiktoken")
    three = build_dataset(tmp_path / "three", [sources], options)
    assert first.manifest.version == two.manifest.version == three.manifest.version
    assert [b.engine.split()[0] for b in (first, two, three)] == ["tokenizers", "tiktoken", "tiktoken"]
    assert json.loads((tmp_path / "two" / "sources.json").read_text())["engine"] == two.engine
    again = build_dataset(tmp_path / "two", [sources], options, engine="tokenizers")
    assert (again.changed, again.engine) == (False, two.engine)
    monkeypatch.setattr(sys.modules["headway.data.build"], "PROOF_BYTES_PER_TOKEN", 10**6)
    assert build_dataset(tmp_path / "four", [sources], options).engine == first.engine


def test_a_difference_during_a_build_makes_tokenizers_do_it_all_again(sources, tmp_path, monkeypatch):
    """tiktoken gets wrong tokens for text number 128, which is one that is checked."""
    options = BuildOptions(vocab_size=400)
    right = build_dataset(tmp_path / "right", [sources], options, engine="tokenizers")
    ranks = module.TiktokenEncoder._ranks

    bad = (tmp_path / "128.txt").read_text()

    def spoilt(self, text):
        return ranks(self, text)[::-1] if text == bad else ranks(self, text)

    monkeypatch.setattr(module.TiktokenEncoder, "_ranks", spoilt)
    notes = []
    built = build_dataset(tmp_path / "out", [sources], options, on_note=notes.append)
    assert built.manifest.version == right.manifest.version
    assert built.engine == right.engine
    assert len(notes) == 1
    assert "disagree on a text" in notes[0]
    assert not list(tmp_path.glob(".out.*"))


def test_requesting_tiktoken_for_an_unprovable_tokenizer_is_an_error(sources, tmp_path):
    raw = trained(byte_level(), normalizer=tokenizers.normalizers.NFKC())
    (tmp_path / "tokenizer.json").write_text(raw.to_str())
    options = BuildOptions(tokenizer=str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match="normalizer is NFKC") as error:
        build_dataset(tmp_path / "out", [sources], options, engine="tiktoken")
    assert "--tokenizer-engine" in error.value.hint
    notes = []
    assert build_dataset(tmp_path / "out", [sources], options, on_note=notes.append).engine.startswith("tokenizers")
    assert notes == []


def test_probes_are_always_the_same_and_of_many_kinds():
    texts = list(probes(["<x>"]))
    assert texts == list(probes(["<x>"]))
    whole = "".join(texts)
    assert 100_000 < len(whole.encode()) < 500_000
    assert {unicodedata.category(letter)[0] for letter in whole} >= set("CLMNPSZ")
    assert "<x><x>" in whole
