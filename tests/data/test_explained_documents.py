"""What a step trained on, against the loader itself; which steps saw a document, against all steps one by one."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headway.data import BuildOptions, ReadOptions, build_dataset, open_dataset
from headway.data.compare_versions import compare_versions
from headway.data.corpus import open_corpus
from headway.data.explain import Explainer
from headway.data.origins import ORIGINS, SOURCES, read_origins
from headway.errors import UsageError
from headway.recipe.load import parse_recipe

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]


def text(number: int) -> str:
    return " ".join(f"{WORDS[(number * 7 + i * i) % 10]}{number}" for i in range(3 + number * 5 % 17))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty lines of JSONL, one of them bad, plain and compressed; rows of Parquet; and a text."""
    folder = tmp_path_factory.mktemp("explain")
    lines = [json.dumps({"text": text(number)}) for number in range(40)]
    lines[5] = "no JSON"
    (folder / "a.jsonl").write_text("\ufeff" + "\n".join([*lines[:20], "", *lines[20:30]]) + "\n")
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(("\n".join(lines[30:]) + "\n").encode()))
    pq.write_table(pa.table({"text": [text(number) for number in range(40, 50)]}), folder / "c.parquet")
    (folder / "d.txt").write_text(text(50))
    options = BuildOptions(vocab_size=300, shard_tokens=700, reading=ReadOptions(errors="skip"))
    sources = [folder / name for name in ("a.jsonl", "b.jsonl.gz", "c.parquet", "d.txt")]
    build_dataset(folder / "data", sources, options)
    return folder


def recipe_of(values: dict[str, Any], **train: Any) -> Any:
    whole = {"model": {"layers": 1, "dim": 32, "heads": 2}, "data": {"seq": 16, **values}, "seed": 3}
    return parse_recipe(whole | {"train": {"steps": 30, "batch": 4, **train}}, {}, "test")


def explainer(folder: Path, **train: Any) -> Explainer:
    return Explainer(open_corpus(recipe_of({"path": str(folder / "data")}, **train)))


def test_origins_lead_to_the_documents_text(built: Path) -> None:
    dataset = open_dataset(built / "data")
    origins = read_origins(dataset.path, dataset.manifest.documents)
    assert origins is not None
    decode = dataset.tokenizer().decode
    kinds = set()
    for number in range(dataset.manifest.documents):
        origin, path = origins[number], Path(origins[number].file)
        kinds.add(path.suffix)
        if path.suffix in (".jsonl", ".gz"):
            plain = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            line = plain[origin.offset :].partition(b"\n")[0]
            assert line == plain.splitlines()[origin.record - 1]
            expected = json.loads(line.decode("utf-8-sig"))["text"]
        elif path.suffix == ".parquet":
            expected = pq.read_table(path)["text"][origin.record - 1].as_py()
        else:
            assert origin.record == origin.offset == 0
            expected = path.read_text()
        assert decode(dataset.document(number).ids[:-1]) == expected
    assert kinds == {".jsonl", ".gz", ".parquet", ".txt"}


@pytest.mark.parametrize("train", [{}, {"batch_ramp": [[4, 8], [10, 12]]}])
def test_documents_of_a_step_have_the_tokens_that_the_loader_reads(built: Path, train: dict[str, Any]) -> None:
    explain = explainer(built, **train)
    corpus = explain.corpus
    dataset = corpus.datasets[0]
    reader = corpus.reader()
    for step in (1, 3, 4, 9, 17, 30):
        batch = corpus.recipe.train.batch_at(step)
        read = corpus.loader(reader).read(corpus.cursor_before(step), batch=batch)
        parts = explain.step(step)
        for row in range(batch):
            mine = [part for part in parts if part.row == row]
            tokens = np.concatenate([dataset.document(part.document).ids[part.first : part.end] for part in mine])
            assert tokens[:-1].tolist() == read.inputs[row].tolist()
            assert all(part.tokens == len(dataset.document(part.document).ids) for part in mine)


def test_steps_of_a_document_are_those_whose_documents_have_it(built: Path) -> None:
    explain = explainer(built, batch_ramp=[[4, 6]])
    expected: dict[int, list[int]] = {}
    wanted = np.array([3, 11, 48], np.int64)
    for step in range(1, 26):
        hits = sorted({part.document for part in explain.step(step)} & set(wanted.tolist()))
        if hits:
            expected[step] = hits
    assert explain.steps(0, wanted, 25) == expected
    assert expected


def test_mixture_names_the_dataset(built: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    build_dataset(other, [built / "c.parquet"], BuildOptions(tokenizer=str(built / "data")))
    mixture = {"one": {"path": str(built / "data"), "weight": 1.0}, "two": {"path": str(other), "weight": 1.0}}
    explain = Explainer(open_corpus(recipe_of({"mixture": mixture})))
    reader, corpus = explain.corpus.reader(), explain.corpus
    found = {name: set[int]() for name in corpus.names}
    for step in range(1, 21):
        read = corpus.loader(reader).read(corpus.cursor_before(step))
        for row in range(4):
            parts = [part for part in explain.step(step) if part.row == row]
            dataset = corpus.datasets[corpus.names.index(parts[0].dataset)]
            tokens = np.concatenate([dataset.document(part.document).ids[part.first : part.end] for part in parts])
            assert tokens[:-1].tolist() == read.inputs[row].tolist()
            for part in parts:
                if part.document == 2:
                    found[part.dataset].add(step)
    for index, name in enumerate(corpus.names):
        assert set(explain.steps(index, np.array([2]), 20)) == found[name]


def test_index_does_not_change_the_version_and_older_data_gets_it(built: Path, tmp_path: Path) -> None:
    options = BuildOptions(vocab_size=300)
    first = build_dataset(tmp_path / "data", [built / "d.txt"], options)
    (tmp_path / "data" / ORIGINS).unlink()
    assert read_origins(tmp_path / "data", 1) is None
    again = build_dataset(tmp_path / "data", [built / "d.txt"], options)
    assert again.manifest.version == first.manifest.version
    assert not again.changed
    assert read_origins(tmp_path / "data", 1) is not None
    for name, content in ((ORIGINS, b"x" * 24), (ORIGINS, b""), (SOURCES, b"[]")):
        kept = (tmp_path / "data" / name).read_bytes()
        (tmp_path / "data" / name).write_bytes(content)
        assert read_origins(tmp_path / "data", 1) is None
        (tmp_path / "data" / name).write_bytes(kept)


def test_step_outside_of_the_run_is_refused(built: Path) -> None:
    with pytest.raises(UsageError, match="there is no step 31"):
        explainer(built).step(31)


def test_difference_of_versions_counts_documents_as_a_multiset(built: Path, tmp_path: Path) -> None:
    def data(name: str, texts: list[str]) -> Path:
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))
        build_dataset(tmp_path / name, [tmp_path / f"{name}.jsonl"], BuildOptions(tokenizer=str(built / "data")))
        return tmp_path / name

    a = open_dataset(data("a", ["x one", "x one", "two", "three"]))
    b = open_dataset(data("b", ["three", "x one", "four", "five"]))
    diff = compare_versions(a, b)
    assert diff.removed is not None
    assert diff.added is not None
    assert (diff.common, diff.removed.documents, diff.added.documents) == (2, 2, 2)
    assert diff.removed.tokens == sum(len(a.document(number).ids) for number in (1, 2))
    assert [number for number, _ in diff.added.examples] == [2, 3]
    assert diff.added.examples[0][1].endswith("b.jsonl:3")
    assert [Path(path).name for path in diff.sources_added] == ["b.jsonl"]
    assert compare_versions(a, a).equal
    whole = compare_versions(a, open_dataset(built / "data"))
    assert whole.tokenizers_equal
