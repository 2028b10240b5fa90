"""Chat datasets from files: formats of rows, bad rows by file and line, and ids as the server sees them."""

import gzip
import json

import numpy as np
import pytest
from typer.testing import CliRunner

from chat_models import CHATML, DROPS_REASONING, TRIMS_AND_REFUSES_SYSTEM, byte_tokenizer, write_model_folder
from headway.cli.data import app
from headway.data.chat_build import ChatOptions, build_chat_dataset
from headway.data.chat_rows import BadRow, parse_row
from headway.data.chat_samples import ROLES
from headway.data.chat_template import ChatTemplate
from headway.data.corpus import open_corpus
from headway.data.loader import MASKED
from headway.data.shards import open_dataset
from headway.data.sources import ReadOptions
from headway.errors import DataError
from headway.recipe import Recipe

TOKENIZER = byte_tokenizer("\n\n", " a")
USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
CHATML_TEMPLATE = ChatTemplate(CHATML)


@pytest.fixture
def model(tmp_path):
    return write_model_folder(tmp_path / "model", TOKENIZER, CHATML)


def write_rows(path, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return str(path)


def build(tmp_path, model, rows, errors="strict", **more):
    file = write_rows(tmp_path / "rows.jsonl", rows)
    options = ChatOptions(model, reading=ReadOptions(errors=errors), **more)
    return build_chat_dataset(tmp_path / "out", [file], options, force=True)


def documents(path):
    dataset = open_dataset(path)
    texts = [TOKENIZER.decode(dataset.document(n).ids) for n in range(dataset.manifest.documents)]
    return dataset, texts


@pytest.mark.parametrize(
    ("row", "texts"),
    [
        ({"messages": [USER, ANSWER]}, ["u:hi a:yo"]),
        ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}, ["u:hi a:yo"]),
        ({"conversations": [USER, ANSWER], "system": "be"}, ["s:be u:hi a:yo"]),
        ({"prompt": "hi", "completion": "yo"}, ["u:hi a:yo"]),
        ({"prompt": [USER], "completion": [ANSWER]}, ["u:hi a:yo"]),
        ({"prompt": "hi", "chosen": "yo", "rejected": "no"}, ["u:hi a:yo", "u:hi a:no"]),
        ({"chosen": [USER, ANSWER], "rejected": [USER, {**ANSWER, "content": "x"}]}, ["u:hi a:yo", "u:hi a:x"]),
        ({"prompt": "hi", "chosen": [USER, ANSWER], "rejected": [USER, {**ANSWER, "content": "x"}]},
         ["u:hi a:yo", "u:hi a:x"]),
    ],
)  # fmt: skip
def test_formats_of_rows(tmp_path, model, row, texts):
    built = build(tmp_path, model, [row])
    dataset, written = documents(built.path)
    names = {"u": "user", "a": "assistant", "s": "system"}
    for text, expected in zip(written, texts, strict=True):
        turns = [turn.split(":") for turn in expected.split()]
        assert text == CHATML_TEMPLATE.render(
            [{"role": names[name], "content": content} for name, content in turns], add_generation_prompt=False
        )
    assert dataset.manifest.chat.kind == ("pairs" if len(texts) == 2 else "chat")
    assert dataset.manifest.end_of_text == TOKENIZER.raw.token_to_id("<|im_end|>")
    for number in range(len(texts)):
        prompt = dataset.document(number).prompt
        ids = dataset.document(number).ids.tolist()
        context = [{"role": names[t.split(":")[0]], "content": t.split(":")[1]} for t in texts[number].split()[:-1]]
        assert ids[:prompt] == TOKENIZER.encode(CHATML_TEMPLATE.render(context)).tolist()


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "a"}, "no messages, conversations, prompt and completion, or chosen and rejected; it has text"),
        ({"messages": "a", "label": 3}, "label is 3, not true or false"),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, "message 2 is an assistant turn without text"),
        ({"messages": [USER]}, "no assistant turn to train on"),
        ({"messages": [USER, {**ANSWER, "weight": 0}]}, "no assistant turn to train on"),
        ({"messages": [USER, ANSWER], "weight": -1}, "weight is -1, not a number of at least 0"),
        ({"messages": [3]}, r"messages\[0\] is a number, not a message"),
        ({"messages": 3}, "messages is a number, not a list of messages"),
        ({"messages": []}, "no messages"),
        ({"messages": [USER, ANSWER], "tools": "x"}, "tools is a string, but not JSON"),
        ({"messages": [USER, ANSWER], "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs has 'tools'"),
        ({"messages": [{"role": "user"}, ANSWER]}, "message 1 has no content"),
        (
            {"messages": [USER, {"role": "asistant", "content": "a"}, ANSWER]},
            "message 2 has the unknown role 'asistant'",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, ANSWER]}, "a part of type 'image_url'"),
        ({"conversations": [{"from": "alien", "value": "hi"}]}, "is from 'alien'; known: human"),
        ({"prompt": "hi", "chosen": "yo", "rejected": "yo"}, "chosen and rejected are equal"),
        ({"prompt": "hi", "chosen": "yo"}, "no rejected answer"),
        ({"chosen": [ANSWER], "rejected": [ANSWER]}, "no prompt"),
        ({"messages": [{"role": "user", "content": "\ud800"}, ANSWER]}, "half a surrogate pair"),
    ],
)
def test_bad_rows_are_refused_by_file_and_line_or_skipped_and_counted(tmp_path, model, row, reason):
    good = {"prompt": "hi", "chosen": "a", "rejected": "b"} if "chosen" in row else {"messages": [USER, ANSWER]}
    with pytest.raises(DataError, match=rf"rows.jsonl line 2: .*{reason}") as caught:
        build(tmp_path, model, [good, row])
    assert "--errors skip" in caught.value.hint
    built = build(tmp_path, model, [good, row, good], errors="skip")
    assert built.skipped == 1
    assert built.manifest.chat.conversations == 2


def test_rows_of_another_kind_are_refused(tmp_path, model):
    rows = [{"messages": [USER, ANSWER]}, {"prompt": "hi", "chosen": "a", "rejected": "b"}]
    with pytest.raises(DataError, match=r"line 2: a pair of answers, but .*line 1 is a conversation"):
        build(tmp_path, model, rows)


def test_a_pair_whose_difference_the_template_removes_is_refused(tmp_path):
    model = write_model_folder(tmp_path / "trims", TOKENIZER, TRIMS_AND_REFUSES_SYSTEM)
    with pytest.raises(DataError, match="chosen and rejected have equal tokens"):
        build(tmp_path, model, [{"prompt": "hi", "chosen": "a", "rejected": " a "}])


def test_samples_of_one_conversation_have_its_number_and_its_columns(tmp_path):
    model = write_model_folder(tmp_path / "drops", TOKENIZER, DROPS_REASONING)
    thinking = {"role": "assistant", "content": "<think>hm</think>yo"}
    rows = [{"messages": [USER, ANSWER], "weight": 2}, {"messages": [USER, thinking, USER, ANSWER]}]
    dataset, texts = documents(build(tmp_path, model, rows).path)
    (samples,) = dataset.samples
    assert samples["conversation"].tolist() == [0, 1, 1]
    assert samples["weight"].tolist() == [2, 1, 1]
    assert "hm" in texts[1]
    assert "hm" not in texts[2]


def test_labelled_answers_alternate_with_the_answer_of_another_row_to_the_same_prompt(tmp_path, model):
    rows = [{"prompt": f"p{n}", "completion": f"c{n}", "label": n % 2 == 0} for n in range(3)]
    rows.append({"messages": [USER, ANSWER, {**USER, "content": "p3"}, {**ANSWER, "content": "c3"}], "label": False})
    dataset, texts = documents(build(tmp_path, model, rows).path)
    assert dataset.manifest.chat.kind == "labelled"
    answers = [text.split("assistant\n")[-1].split("<")[0] for text in texts]
    assert answers == ["c0", "c1", "c1", "c0", "c2", "c1", "c3", "c2"]
    prompts = [text.split("user\n")[-1].split("<")[0] for text in texts]
    assert prompts == ["p0", "p0", "p1", "p1", "p2", "p2", "p3", "p3"]
    (samples,) = dataset.samples
    assert samples["desirable"].tolist() == [1, 1, 0, 0, 1, 1, 0, 0]
    assert samples["conversation"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [sum(span[3] for span in spans) for spans in np.split(dataset.spans[0], samples["spans_end"][:-1])] == [
        1
    ] * 8


def test_spans_name_the_roles(tmp_path, model):
    messages = [{"role": "system", "content": "be"}, USER, ANSWER, USER, {"role": "tool", "content": "1"}, ANSWER]
    dataset, _ = documents(build(tmp_path, model, [{"messages": messages}]).path)
    ids = dataset.document(0).ids
    named = [(ROLES[role], TOKENIZER.decode(ids[a:b]), bool(t)) for a, b, role, t in dataset.spans[0].tolist()]
    assert named == [
        ("system", "<|im_start|>system\nbe<|im_end|>\n", False),
        ("user", "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", False),
        ("assistant", "yo<|im_end|>", True),
        ("assistant", "\n", False),
        ("user", "<|im_start|>user\nhi<|im_end|>\n", False),
        ("tool", "<|im_start|>tool\n1<|im_end|>\n<|im_start|>assistant\n", False),
        ("assistant", "yo<|im_end|>", True),
        ("assistant", "\n", False),
    ]


def test_jsonl_gzip_and_parquet_give_the_same_dataset(tmp_path, model):
    import pyarrow
    import pyarrow.parquet

    rows = [{"messages": [USER, {**ANSWER, "content": "yo" * n}], "weight": 0.5 * n} for n in range(1, 9)]
    write_rows(tmp_path / "a.jsonl", rows)
    write_rows(tmp_path / "b.jsonl.gz", rows)
    rows[0]["messages"].append({"role": "user", "content": None, "tool_calls": None, "name": "x"})  # the schema's nulls
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "c.parquet")
    versions = {
        build_chat_dataset(tmp_path / f"out{name[0]}", [tmp_path / name], ChatOptions(model)).manifest.version
        for name in ("a.jsonl", "b.jsonl.gz", "c.parquet")
    }
    assert len(versions) == 1


def test_build_again_changes_nothing_and_another_template_does(tmp_path, model):
    built = build(tmp_path, model, [{"messages": [USER, ANSWER]}])
    file, options = tmp_path / "rows.jsonl", ChatOptions(model)
    assert not build_chat_dataset(built.path, [file], options).changed
    file.touch()
    assert not build_chat_dataset(built.path, [file], options).changed
    template = tmp_path / "other.jinja"
    template.write_text(CHATML.replace("<|im_end|>", "<eos>"))
    other = build(tmp_path, model, [{"messages": [USER, ANSWER]}], template=str(template))
    assert other.manifest.version != built.manifest.version
    assert (other.path / "chat_template.jinja").read_text() == template.read_text()
    assert (other.path / "tokenizer.json").read_bytes() == (tmp_path / "model" / "tokenizer.json").read_bytes()


def samples_of(batch):
    return set(batch.columns["sample"][batch.columns["weight"] > 0].tolist())


def test_an_epoch_shorter_than_a_batch_is_noted(tmp_path, model):
    build(tmp_path, model, [{"messages": [USER, ANSWER]}] * 3)
    folder = next(path.parent for path in tmp_path.rglob("manifest.json"))
    data = {"path": str(folder), "seq": 64, "holdout": 0}
    rows = open_corpus(Recipe.model_validate({"objective": {"kind": "sft"}, "data": data})).splits[0].training

    def notes(**train):
        recipe = {"objective": {"kind": "sft"}, "data": data, "train": train}
        return [note for note in open_corpus(Recipe.model_validate(recipe)).notes() if "epoch" in note]

    assert notes(epochs=2, batch=rows + 1) == [
        f"an epoch has {rows} rows, fewer than a batch ({rows + 1}): steps repeat rows"
    ]
    assert notes(epochs=2, batch=rows) == notes(steps=2, batch=rows + 1) == []


def test_corpus_reads_packed_rows_and_mixes_datasets(tmp_path, model):
    for name in "ab":
        rows = [{"messages": [USER, {**ANSWER, "content": name * n}]} for n in range(1, 30)]
        file = write_rows(tmp_path / f"{name}.jsonl", rows)
        build_chat_dataset(tmp_path / name, [file], ChatOptions(model))
    sft = {"objective": {"kind": "sft"}}
    single = Recipe.model_validate({**sft, "data": {"path": str(tmp_path / "a"), "seq": 256}, "train": {"batch": 2}})
    corpus = open_corpus(single)
    reader = corpus.reader()
    batch = corpus.loader(reader).read(0)
    assert batch.inputs.shape == (2, 256)
    end = TOKENIZER.raw.token_to_id("<|im_end|>")
    for inputs, labels in zip(batch.inputs, batch.labels, strict=True):
        trained = labels[labels != MASKED]
        assert set(trained.tolist()) == {end, TOKENIZER.raw.token_to_id("a")}
        assert set(inputs[1:][labels[:-1] != MASKED].tolist()) == set(trained.tolist())
    trained = [corpus.loader(reader).read(cursor) for cursor in range(0, corpus.splits[0].training, 2)]
    held_out = samples_of(reader.read(corpus.held_out(100)))
    assert held_out
    assert held_out.isdisjoint(set.union(*map(samples_of, trained)))
    mixture = {"mixture": {name: {"path": str(tmp_path / name), "weight": 1} for name in "ab"}, "seq": 256}
    mixed = open_corpus(Recipe.model_validate({**sft, "data": mixture, "train": {"batch": 4}}))
    batch = mixed.loader(mixed.reader()).read(0)
    letters = [{chr(t) for t in b"ab" if TOKENIZER.raw.token_to_id(chr(t)) in row} for row in batch.labels]
    assert sorted(map(sorted, letters)) == [["a"], ["a"], ["b"], ["b"]]


def test_command_builds_and_shows(tmp_path, model):
    file = write_rows(tmp_path / "rows.jsonl", [{"messages": [USER, ANSWER]}] * 3)
    result = CliRunner().invoke(app, ["build", str(tmp_path / "out"), file, "--chat", model])
    assert result.exit_code == 0, result.output
    assert "chat       chat: 3 conversations, 9 tokens of answers" in result.output
    assert "next: headway train RECIPE --set objective.kind=sft --set data.path=" in result.output
    shown = CliRunner().invoke(app, ["build", str(tmp_path / "out"), file, "--chat", model, "--json"])
    assert json.loads(shown.stdout)["chat"] == {"kind": "chat", "conversations": 3, "trained_tokens": 9}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--chat", "none"], "none is not a folder"),
        (["--chat", "{model}", "--template", "none.jinja"], "cannot read the chat template"),
        (["--chat", "{model}", "--template-arguments", "[1]"], "not a JSON object"),
        (["--chat", "{model}", "--template-arguments", "x"], "not JSON"),
        (["--chat", "{model}", "--template-arguments", '{"messages": []}'], "'messages' is no template argument"),
        (["--chat", "{model}", "--tokenizer", "{model}"], "--tokenizer is for text"),
        (["--chat", "{model}", "--engine", "ray"], "--engine ray is for text"),
        (["--template", "t.jinja"], "--template is for chats"),
    ],
)
def test_wrong_options_are_named(tmp_path, model, arguments, message):
    file = write_rows(tmp_path / "rows.jsonl", [{"messages": [USER, ANSWER]}])
    words = [word.replace("{model}", model) for word in arguments]
    result = CliRunner().invoke(app, ["build", str(tmp_path / "out"), file, *words])
    assert message in str(result.exception)


def test_sharegpt_function_calls_are_tool_calls():
    row = parse_row({
        "conversations": [
            {"from": "human", "value": "1+1"},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"x": 1}}'},
            {"from": "observation", "value": "2"},
            {"from": "gpt", "value": "two"},
        ],
        "tools": '[{"name": "add"}]',
    })  # fmt: skip
    (conversation,) = row.conversations
    assert [message["role"] for message in conversation.messages] == ["user", "assistant", "tool", "assistant"]
    assert conversation.messages[1]["tool_calls"][0]["function"]["name"] == "add"
    assert conversation.tools == [{"name": "add"}]
    with pytest.raises(BadRow, match="function_call, but not JSON"):
        parse_row({"conversations": [{"from": "function_call", "value": "x"}]})


class TestShow:
    @pytest.fixture
    def dataset(self, tmp_path, model):
        rows = [{"prompt": "hi\tthere", "chosen": "yo", "rejected": "no " * 60, "weight": 0.5}] * 2
        return str(build(tmp_path, model, rows).path)

    def test_prints_each_message_with_what_is_trained_on(self, dataset):
        result = CliRunner().invoke(app, ["show", dataset, "--chat", "1"])
        assert result.exit_code == 0, result.output
        lines = result.output.splitlines()
        assert lines[:2] == ["sample 1 of 2, chosen: 31 tokens, 3 trained on", "conversation 1, weight 0.5"]
        assert lines[2:6] == [
            "     user  <|im_start|>user\\n",
            "           hi\\tthere<|im_end|>\\n",
            "           <|im_start|>assistant\\n",
            "assistant +yo<|im_end|>",
        ]
        assert "sample 1 of 2, rejected: 209 tokens, 181 trained on" in lines
        assert max(map(len, lines)) <= 80

    def test_colour_marks_trained_tokens(self, dataset, monkeypatch):
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.delenv("NO_COLOR", raising=False)
        result = CliRunner().invoke(app, ["show", dataset, "--chat", "0"])
        assert "\x1b[32myo<|im_end|>" in result.output
        assert "\x1b[2m<|im_start|>user\\n" in result.output

    def test_json_has_ids_and_spans(self, dataset):
        shown = json.loads(CliRunner().invoke(app, ["show", dataset, "--chat", "0", "--json"]).stdout)
        chosen, rejected = shown["documents"]
        assert [span["role"] for span in chosen["spans"]] == ["user", "assistant", "assistant"]
        assert [span["trained"] for span in rejected["spans"]] == [False, True, False]
        whole = "".join(span["text"] for span in chosen["spans"])
        assert chosen["tokens"] == TOKENIZER.encode(whole).tolist()

    def test_packing_is_shown(self, dataset):
        assert "packing    1 row of 4,096 tokens, 88.3% padding" in CliRunner().invoke(app, ["show", dataset]).output
        facts = json.loads(CliRunner().invoke(app, ["show", dataset, "--seq", "256", "--json"]).stdout)["packing"]
        assert (facts["rows"], facts["seq"], facts["dropped"]) == (2, 256, 0)

    def test_a_sample_that_is_not_there_is_named(self, dataset):
        result = CliRunner().invoke(app, ["show", dataset, "--chat", "2"])
        assert "there is no sample 2" in str(result.exception)


def test_a_run_and_its_export_have_the_chat_template_and_end_at_its_turns(tmp_path, model):
    """Prepared without starting a process: the base model's own end of text is another token."""
    from headway.agent.launch.prepare import new_run
    from headway.state.hf_sidecars import apply_sidecars

    rows = [{"messages": [USER, {**ANSWER, "content": "a" * n}]} for n in range(1, 40)]
    built = build(tmp_path, model, rows)
    recipe = Recipe.model_validate({
        "model": {"layers": 1, "dim": 16, "heads": 2},
        "objective": {"kind": "sft"},
        "data": {"path": str(built.path), "seq": 64},
        "train": {"epochs": 2, "batch": 2, "device": "cpu"},
    })  # fmt: skip
    attempt = new_run(recipe, tmp_path / "runs", workers=1)
    run = attempt.folder
    assert (run.companions / "chat_template.jinja").read_text() == CHATML
    (tmp_path / "export").mkdir()
    apply_sidecars(run.companions, tmp_path / "export", {})
    assert (tmp_path / "export" / "chat_template.jinja").read_text() == CHATML
    stored = json.loads(run.recipe_file.read_bytes())["train"]
    corpus = open_corpus(recipe)
    assert stored["steps"] == -(-2 * corpus.splits[0].training // 2)
    assert "epochs" not in stored
    assert any("padding" in note for note in attempt.notes)


def test_the_end_of_a_turn_is_added_to_those_of_the_original(tmp_path, model):
    from headway.state.hf_sidecars import save_chat_template

    built = build(tmp_path, model, [{"messages": [USER, ANSWER]}])
    folder = tmp_path / "companions"
    folder.mkdir()
    (folder / "config.json").write_text('{"eos_token_id": 7}')
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    save_chat_template(built.path, folder, 5)
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == [5, 7]
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [5, 7]


@pytest.mark.parametrize(
    ("kind", "hint"), [("pretrain", "--set objective.kind=sft"), ("dpo", "--set objective.kind=sft")]
)
def test_an_objective_refuses_samples_of_another_kind(tmp_path, model, kind, hint):
    built = build(tmp_path, model, [{"messages": [USER, {**ANSWER, "content": "a" * n}]} for n in range(1, 40)])
    recipe = Recipe.model_validate({"objective": {"kind": kind}, "data": {"path": str(built.path), "seq": 64}})
    with pytest.raises(DataError, match="is of kind chat") as error:
        open_corpus(recipe)
    assert hint in error.value.hint
