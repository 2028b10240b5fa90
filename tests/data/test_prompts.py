"""Prompts for reinforcement learning: rows, ids as the server sees them, fields, and the order of a run's samples."""

import json
from collections import Counter

import numpy as np
import pytest
from chat_datasets import chat_dataset
from typer.testing import CliRunner

from chat_models import CHATML, DROPS_REASONING, TEMPLATES, byte_tokenizer, chat_template, write_model_folder
from headway.cli.data import app
from headway.data import chat_batches
from headway.data.chat_build import ChatOptions, build_chat_dataset
from headway.data.chat_processes import ChatJob, encoded_batches, read_frame, write_frame
from headway.data.chat_rows import BadRow
from headway.data.corpus import open_corpus
from headway.data.mixture import DataMixture, MixturePhase, shares_of
from headway.data.order import Split, held_out, order_at
from headway.data.prompt_rows import MOST_BYTES, parse_prompt
from headway.data.prompts import PromptOrder, PromptReader
from headway.data.shards import open_dataset
from headway.data.sources import ReadOptions, find_sources
from headway.errors import DamagedData, DataError
from headway.recipe import Recipe

TOKENIZER = byte_tokenizer("\n\n", " a")
USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
TOOL = {"role": "tool", "content": "3"}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.fixture
def model(tmp_path):
    return write_model_folder(tmp_path / "model", TOKENIZER, CHATML)


def build(tmp_path, model, rows, name="out", **options):
    errors = options.pop("errors", "strict")
    notes = []
    file = tmp_path / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reading = ReadOptions(errors=errors)
    chosen = ChatOptions(model, prompts=True, reading=reading, **options)
    built = build_chat_dataset(tmp_path / name, [file], chosen, force=True, on_note=notes.append)
    return built, notes


def recipe(path=None, *, data=None, rl=None, **more):
    where = {} if path is None else {"path": str(path)}
    return Recipe.model_validate({
        "objective": {"kind": "grpo"},
        "rl": {"rewards": ["countdown"], "max_tokens": 20, **(rl or {})},
        "data": {"seq": 60, "holdout": 0.2, **where, **(data or {})},
        "train": {"batch": 4},
        **more,
    })  # fmt: skip


# -- rows


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"prompt": "hi"}, [USER]),
        ({"prompt": [USER]}, [USER]),
        ({"prompt": "hi", "system": "Be brief."}, [SYSTEM, USER]),
        ({"messages": [SYSTEM, USER]}, [SYSTEM, USER]),
        ({"messages": [USER, ANSWER, TOOL], "system": ""}, [USER, ANSWER, TOOL]),
        ({"messages": [{"from": "human", "value": "hi"}], "prompt": None}, [USER]),
    ],
)
def test_a_prompt_is_a_string_or_messages(row, messages):
    (conversation,) = parse_prompt({**row, "target": 3}).conversations
    assert conversation.messages == messages
    assert json.loads(parse_prompt({**row, "target": 3}).line)["fields"] == {"target": 3}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [USER, ANSWER]}, "ends with an assistant turn"),
        ({"prompt": [SYSTEM]}, "ends with a system message"),
        ({"prompt": "hi", "messages": [USER]}, "both prompt and messages"),
        ({"text": "hi", "x": None}, "no prompt or messages; it has text"),
        ({"prompt": []}, "no messages"),
        ({"prompt": 3}, "prompt is a number, not a list of messages"),
        ({"prompt": "hi", "system": 3}, "system is a number, not a string"),
        ({"messages": [SYSTEM, USER], "system": "x"}, "messages begins with a system message"),
        ({"prompt": "hi", "tools": "{"}, "tools is a string, but not JSON"),
        ({"prompt": "hi", "chat_template_kwargs": 3}, "chat_template_kwargs is a number"),
        ({"prompt": "hi", "target": float("nan")}, "field target holds a number that is not finite"),
        ({"prompt": "hi", "a": 1, "target": [1, {"b": float("inf")}]}, "field target holds a number that is not"),
        ({"prompt": "hi", "target": b"3"}, r"field target is no JSON value \(bytes\)"),
        ({"prompt": "hi", "tests": "x" * MOST_BYTES}, "its text and fields take 1,048,6.. bytes as JSON, more than"),
    ],
)
def test_a_row_that_is_no_prompt_is_refused_with_the_reason(row, message):
    with pytest.raises(BadRow, match=message):
        parse_prompt(row)


def test_the_text_is_what_the_user_asked_or_all_messages():
    def text(row):
        return json.loads(parse_prompt(row).line)["text"]

    assert text({"prompt": "hi", "system": "Be brief."}) == "hi"
    assert json.loads(text({"messages": [USER, ANSWER, USER]})) == [USER, ANSWER, USER]


# -- datasets


def test_ids_are_those_that_the_server_feeds(tmp_path):
    from torch import device, nn

    from headway.inference.chat import render_chat
    from headway.inference.load import LoadedModel
    from headway.inference.text_engine import encoded

    parts = [{"type": "text", "text": "a b"}, {"type": "text", "text": "\n\n"}]
    rows = [
        [USER],
        [USER, ANSWER, {"role": "user", "content": "\n\n ab <|im_end|> a"}],
        [USER, {"role": "assistant", "content": "<think>no</think>\nyo"}, {"role": "user", "content": "ünïcode"}],
        [USER, ANSWER, TOOL],
        [{"role": "user", "content": parts}],
        [{"role": "user", "content": ""}],
    ] * 2  # later rows take the layouts of earlier ones
    for name, text in TEMPLATES.items():
        folder = write_model_folder(tmp_path / name, TOKENIZER, text)
        built, _ = build(tmp_path, folder, [{"messages": messages} for messages in rows], name=f"{name}-out")
        special = {"bos_token": "<bos>", "eos_token": "<|im_end|>"}
        served = LoadedModel(
            "m", nn.Linear(1, 1), device("cpu"), 10, 10, TOKENIZER, chat_template=text, special_tokens=special
        )
        reader = PromptReader(open_dataset(built.path))
        assert len(reader) == len(rows)
        for number, messages in enumerate(rows):
            assert list(reader.prompt(number).ids) == encoded(TOKENIZER, render_chat(served, messages))


def test_tools_and_arguments_reach_the_template_as_the_servers(tmp_path):
    tools = [{"type": "function", "function": {"name": "add"}}]
    template = "{{ mood }}" + DROPS_REASONING
    folder = write_model_folder(tmp_path / "model", TOKENIZER, template)
    row = {"prompt": "1+1", "tools": tools, "chat_template_kwargs": {"mood": "gay"}}
    built, _ = build(tmp_path, folder, [row, {"prompt": "1+1"}], arguments={"mood": "sad"})
    reader = PromptReader(open_dataset(built.path))
    messages = [{"role": "user", "content": "1+1"}]
    for number, (mood, given) in enumerate([("gay", tools), ("sad", None)]):
        text = chat_template("drops-reasoning").render(messages, tools=given)
        assert TOKENIZER.decode(reader.prompt(number).ids) == mood + text


def test_tools_that_the_template_does_not_name_are_refused_as_by_the_server(tmp_path, model):
    with pytest.raises(DataError, match="line 1: the chat template does not use tools"):
        build(tmp_path, model, [{"prompt": "1+1", "tools": [{"name": "add"}]}])


def test_fields_come_back_as_they_were(tmp_path, model):
    rng = np.random.default_rng(0)
    values = [0, -1, 10**30, 0.1, 1e300, "", "ünï\n\t\u2028", True, None, [], {}, [1, [2, {"a": None}]], {"b": {"": 1}}]
    fields = [
        {f"f{key}": values[index] for key, index in enumerate(rng.integers(0, len(values), rng.integers(0, 5)))}
        for _ in range(50)
    ]
    rows = [{"prompt": f"p{number}", **extra} for number, extra in enumerate(fields)]
    built, _ = build(tmp_path, model, rows, shard_tokens=100)
    dataset = open_dataset(built.path)
    assert len(dataset.fields) > 5
    reader = PromptReader(dataset)
    for number in rng.permutation(50).tolist():
        prompt = reader.prompt(number)
        assert (prompt.number, prompt.text, prompt.fields) == (number, f"p{number}", fields[number])
    assert reader.lengths.tolist() == [len(reader.prompt(number).ids) for number in range(50)]
    with pytest.raises(DataError, match="there is no prompt 50"):
        reader.prompt(50)
    twice = PromptReader(dataset, dataset)
    assert twice.prompt(57).fields == fields[7]


def test_jsonl_and_parquet_give_the_same_dataset(tmp_path, model):
    import pyarrow
    import pyarrow.parquet

    rows = [{"prompt": f"p{n}", "numbers": [n, 2], "target": n, "note": None if n else "x"} for n in range(5)]
    built, _ = build(tmp_path, model, rows)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    options = ChatOptions(model, prompts=True)
    other = build_chat_dataset(tmp_path / "other", [tmp_path / "rows.parquet"], options)
    assert other.manifest.version == built.manifest.version


def test_refused_rows_end_the_build_or_are_counted(tmp_path, model):
    rows = [{"prompt": "a"}, {"messages": [USER, ANSWER]}, {"prompt": "b", "x": float("nan")}, {"prompt": "c"}]
    with pytest.raises(DataError, match="line 2: the prompt ends with an assistant turn"):
        build(tmp_path, model, rows)
    built, _ = build(tmp_path, model, rows, errors="skip")
    assert (built.skipped, built.manifest.documents) == (2, 2)
    with pytest.raises(DataError, match="the sources hold no prompt"):
        build(tmp_path, model, rows[1:3], errors="skip")


def test_a_number_that_python_does_not_read_is_named(tmp_path, model):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "n": ' + "9" * 5000 + "}")
    with pytest.raises(DataError, match="line 1: a number with too many digits"):
        build_chat_dataset(tmp_path / "out", [tmp_path / "a.jsonl"], ChatOptions(model, prompts=True))


def test_repeated_prompts_are_kept_and_noted(tmp_path, model):
    built, notes = build(tmp_path, model, [{"prompt": "a", "x": 1}, {"prompt": "b"}, {"prompt": "a", "x": 2}])
    assert built.manifest.documents == 3
    assert notes == ["prompts that repeat an earlier one: 1 of 3"]
    assert build(tmp_path, model, [{"prompt": "a"}, {"prompt": "b"}], name="other")[1] == []


def test_the_end_of_a_turn_is_that_of_chats(tmp_path):
    for name, text in TEMPLATES.items():
        folder = write_model_folder(tmp_path / name, TOKENIZER, text)
        built, _ = build(tmp_path, folder, [{"prompt": "a"}], name=f"{name}-prompts")
        (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": [USER, ANSWER]}))
        chats = build_chat_dataset(tmp_path / f"{name}-chats", [tmp_path / "chats.jsonl"], ChatOptions(folder))
        assert built.manifest.end_of_text == chats.manifest.end_of_text


def test_processes_give_the_batches_of_one(tmp_path, monkeypatch):
    import io

    monkeypatch.setattr(chat_batches, "BATCH_ROWS", 5)
    rows = [{"prompt": f"p{n}", "target": n} if n % 7 else {"text": "of no use"} for n in range(33)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = tuple(find_sources([tmp_path / "a.jsonl"]))
    job = ChatJob("", chat_template("chatml"), files, ReadOptions(), fast=False, prompts=True)
    assert ChatJob.from_json(job.to_json()) == job

    def facts(batch):
        units = [([np.concatenate(s.ids).tolist() for s in unit.samples], *unit[1:]) for unit in batch.units]
        return batch.kind, units, batch.refused

    one = [facts(batch) for batch in encoded_batches(job, TOKENIZER, TOKENIZER.encode_batch)]
    assert [json.loads(unit[-1])["fields"]["target"] for _, units, _ in one for unit in units] == [
        n for n in range(33) if n % 7
    ]
    for index in range(3):
        own = []
        for batch in encoded_batches(job, TOKENIZER, TOKENIZER.encode_batch, index, 3):
            stream = io.BytesIO()
            write_frame(stream, batch)
            stream.seek(0)
            own.append(facts(read_frame(stream)))
        assert own == one[index::3]


def test_damaged_fields_are_refused(tmp_path, model):
    built, _ = build(tmp_path, model, [{"prompt": "a", "x": 1}, {"prompt": "b", "x": 2}])
    file = built.path / "fields-00000.jsonl"
    content = file.read_bytes()
    file.write_bytes(content.replace(b'"x": 2', b'"x": 3'))
    with pytest.raises(DamagedData, match=r"fields-00000.jsonl should have sha256"):
        open_dataset(built.path)
    file.write_bytes(content[:-1])
    with pytest.raises(DamagedData, match=r"fields-00000.jsonl should have \d+ bytes"):
        open_dataset(built.path)
    file.write_bytes(content[:-2] + b"\n\n")
    reader = PromptReader(open_dataset(built.path, verify="sizes"))
    assert reader.prompt(0).fields == {"x": 1}
    with pytest.raises(DamagedData, match="the fields of prompt 1 in shard 0 are damaged"):
        reader.prompt(1)


def test_a_manifest_whose_field_files_disagree_is_refused(tmp_path, model):
    built, _ = build(tmp_path, model, [{"prompt": "a"}])
    file = built.path / "manifest.json"
    content = json.loads(file.read_text())
    content["chat"]["files"][1]["bytes"] += 8
    file.write_text(json.dumps(content))
    with pytest.raises(DamagedData, match="chat entries for shard 0 disagree"):
        open_dataset(built.path)


def test_versions_of_chats_are_those_from_before_there_were_prompts(tmp_path):
    versions = {kind: chat_dataset(tmp_path / kind, kind, 7)[0].version for kind in ("chat", "pairs", "labelled")}
    assert versions == {"chat": "cbdf634c6fc79f03", "pairs": "4ada43227b0d6ffe", "labelled": "deb26246fc8f2347"}


# -- the order


@pytest.mark.parametrize("seed", range(4))
def test_an_epoch_has_each_usable_training_prompt_once_however_it_is_drawn(seed):
    rng = np.random.default_rng(seed)
    size = int(rng.integers(2, 200))
    split = Split(size, int(size * rng.random() * 0.5), "key")
    usable = rng.random(size) < rng.choice([0.1, 0.5, 0.95])
    kept_out = set(held_out(split).tolist())
    wanted = {number for number in range(size) if usable[number]} - kept_out
    if not wanted:
        wanted = {int(order_at(split, seed, 0, np.zeros(1, dtype=np.int64))[0])}
        usable[list(wanted)] = True
    order = PromptOrder(split, seed, usable)
    whole = order.next(0, 3 * len(wanted))
    for epoch in range(3):
        assert Counter(whole.prompts[epoch * len(wanted) : (epoch + 1) * len(wanted)]) == Counter(wanted)
    # By definition: the run's samples one by one, without those whose prompts are not usable.
    numbers = order_at(split, seed, 0, np.arange(whole.cursor, dtype=np.int64)).tolist()
    by_definition = [(sample, number) for sample, number in enumerate(numbers) if usable[number]]
    assert list(zip(whole.samples, whole.prompts, strict=True)) == by_definition
    samples, prompts, cursor = [], [], 0
    while len(samples) < len(whole.samples):
        draw = order.next(cursor, min(int(rng.integers(1, 9)), len(whole.samples) - len(samples)))
        assert cursor < draw.cursor == draw.samples[-1] + 1
        samples += draw.samples
        prompts += draw.prompts
        cursor = draw.cursor
    assert (tuple(samples), tuple(prompts), cursor) == whole


def test_skipped_samples_are_left_out_and_no_others():
    split = Split(50, 5, "key")
    usable = np.arange(50) % 3 != 0
    plain = PromptOrder(split, 1, usable).next(0, 200)
    order = PromptOrder(split, 1, usable, ((0, 4), (17, 90), (90, 91)))
    kept = [
        (sample, prompt)
        for sample, prompt in zip(plain.samples, plain.prompts, strict=True)
        if not (sample < 4 or 17 <= sample < 91)
    ]
    for size in (1, 7, len(kept)):
        drawn, cursor = [], 0
        while len(drawn) < len(kept):
            draw = order.next(cursor, min(size, len(kept) - len(drawn)))
            drawn += zip(draw.samples, draw.prompts, strict=True)
            cursor = draw.cursor
        assert drawn == kept


def test_a_mixture_of_prompts_keeps_the_order_of_each_dataset():
    splits = (Split(20, 4, "a"), Split(30, 0, "b"))
    usable = np.arange(50) % 5 != 0
    mixture = DataMixture(splits, (MixturePhase(0, shares_of([1, 3])),), "ab")
    prompts = PromptOrder(mixture, 5, usable).next(0, 60).prompts
    for split, first in zip(splits, mixture.first_windows, strict=True):
        own = [number - first for number in prompts if first <= number < first + split.windows]
        alone = PromptOrder(split, 5, usable[first : first + split.windows])
        assert tuple(own) == alone.next(0, len(own)).prompts
        assert len(own) > 10


# -- the data of a recipe

EMPTY = len(TOKENIZER.encode(chat_template("chatml").render([{"role": "user", "content": ""}])))
"""Tokens around what a user says."""


def prompts_of(*lengths):
    """Rows with prompts of so many tokens, all different."""
    return [
        {"prompt": f"{number:04}" + "x" * (length - EMPTY - 4), "n": number} for number, length in enumerate(lengths)
    ]


@pytest.fixture
def dataset(tmp_path, model):
    return build(tmp_path, model, prompts_of(*([30] * 20 + [40] * 20 + [41] * 7)))[0].path


def test_prompts_without_room_for_an_answer_are_left_out_and_noted(dataset):
    corpus = open_corpus(recipe(dataset))
    assert corpus.notes() == [
        "out: 47 prompts, 9 held out",
        "out: 7 prompts of more than 40 tokens leave no room for rl.max_tokens (20): left out",
    ]
    reader, order = corpus.prompt_reader(), corpus.prompt_order()
    kept_out = set(held_out(Split(47, 9, corpus.version)).tolist())
    epoch = [number for number in range(47) if number < 40 and number not in kept_out]
    assert sorted(order.next(0, len(epoch)).prompts) == epoch
    assert {len(reader.prompt(number).ids) for number in epoch} == {30, 40}
    assert sorted(corpus.held_out(100).tolist()) == sorted(number for number in kept_out if number < 40)
    assert corpus.held_out(2).tolist() == corpus.held_out(100).tolist()[:2]
    assert open_corpus(recipe(dataset, data={"seq": 61})).notes() == ["out: 47 prompts, 9 held out"]


def test_the_recipe_may_say_to_stop_at_a_long_prompt(dataset):
    with pytest.raises(DataError, match="7 prompts of more than 40 tokens leave no room") as error:
        open_corpus(recipe(dataset, rl={"if_prompt_long": "stop"}))
    assert "set data.seq to 61" in error.value.hint
    open_corpus(recipe(dataset, rl={"if_prompt_long": "stop"}, data={"seq": 61}))
    with pytest.raises(DataError, match="no prompt to train on leaves room") as error:
        open_corpus(recipe(dataset, data={"seq": 49}))


def test_an_epoch_is_all_usable_training_prompts(dataset):
    corpus = open_corpus(recipe(dataset, train={"epochs": 3, "batch": 4}))
    usable = sum(number < 40 for number in set(range(47)) - set(held_out(Split(47, 9, corpus.version)).tolist()))
    assert corpus.train().steps == -(-3 * usable // 4)
    notes = open_corpus(recipe(dataset, train={"epochs": 3, "batch": usable + 1})).notes()
    assert notes[-1] == f"an epoch has {usable} prompts, fewer than a batch ({usable + 1}): steps repeat prompts"


def test_datasets_of_prompts_are_mixed(tmp_path, model):
    for name, count in (("a", 20), ("b", 30)):
        build(tmp_path, model, [{"prompt": f"{name}{n}", "from": name} for n in range(count)], name=name)
    mixture = {"mixture": {name: {"path": str(tmp_path / name), "weight": 1} for name in "ab"}}
    corpus = open_corpus(recipe(data=mixture))
    draw = corpus.prompt_order().next(0, 40)
    reader = corpus.prompt_reader()
    assert Counter(reader.prompt(number).fields["from"] for number in draw.prompts) == {"a": 20, "b": 20}
    assert [len(ids) for ids in corpus.by_dataset(np.array(draw.prompts))] == [20, 20]
    assert set(corpus.held_out(50).tolist()).isdisjoint(draw.prompts)
    assert len(corpus.held_out(50)) == 10


def test_prompts_are_not_rows(dataset):
    with pytest.raises(DataError, match="prompts are not rows to train on"):
        open_corpus(recipe(dataset)).reader()


@pytest.mark.parametrize("kind", ["sft", "pretrain", "dpo"])
def test_other_objectives_refuse_prompts(dataset, kind):
    wanted = Recipe.model_validate({"objective": {"kind": kind}, "data": {"path": str(dataset), "seq": 64}})
    with pytest.raises(DataError, match=f"objective {kind} needs data of kind .*, but out is of kind prompts") as error:
        open_corpus(wanted)
    assert "objective.kind=grpo" in error.value.hint


def test_policies_refuse_chats(tmp_path):
    chats, _ = chat_dataset(tmp_path / "chats", "chat", 1)
    with pytest.raises(
        DataError, match="objective dapo needs data of kind prompts, but chats is of kind chat"
    ) as error:
        open_corpus(recipe(chats.path, objective={"kind": "dapo"}))
    assert "--prompts" in error.value.hint
    with pytest.raises(DataError, match="holds chat, not prompts"):
        PromptReader(chats)


def test_a_run_is_prepared_with_tokenizer_and_template(dataset, tmp_path):
    from headway.agent.launch.prepare import new_run

    small = {"layers": 1, "dim": 16, "heads": 2}
    attempt = new_run(recipe(dataset, model=small), tmp_path / "runs", workers=1)
    assert (attempt.folder.companions / "chat_template.jinja").read_text() == CHATML
    assert json.loads(attempt.folder.data_file.read_bytes())["chat"]["kind"] == "prompts"
    assert "out: 47 prompts, 9 held out" in attempt.notes


# -- commands


def invoke(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_commands_build_show_and_verify(tmp_path, model):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "Make 12.", "numbers": [3, 4], "a_long_name_of_a_field": "x\ny"}) + "\n")
    built = invoke("build", tmp_path / "out", file, "--chat", model, "--prompts")
    assert built.exit_code == 0, built.output
    assert "kind       prompts for reinforcement learning" in built.output
    assert "--set objective.kind=grpo --set data.path=" in built.output
    assert not json.loads(invoke("build", tmp_path / "out", file, "--chat", model, "--prompts", "--json").stdout)[
        "changed"
    ]
    shown = invoke("show", tmp_path / "out").output
    assert '  fields: {"numbers": [3, 4], "a_long_name_of_a_field": "x\\ny"}' in shown
    assert "packing" not in shown
    assert json.loads(invoke("show", tmp_path / "out", "--json").stdout)["samples"][0]["fields"]["numbers"] == [3, 4]
    assert invoke("show", tmp_path / "out", "--chat", 0).output.splitlines() == [
        f"prompt 0 of 1: {EMPTY + len('Make 12.')} tokens",
        "rendered   <|im_start|>user\\n",
        "           Make 12.<|im_end|>\\n",
        "           <|im_start|>assistant\\n",
        "numbers    [3, 4]",
        "a_long_na… x\\n",
        "           y",
    ]
    assert json.loads(invoke("show", tmp_path / "out", "--chat", 0, "--json").stdout)["text"] == "Make 12."
    assert "there is no prompt 1" in str(invoke("show", tmp_path / "out", "--chat", 1).exception)
    assert "7 files, all match" in invoke("verify", tmp_path / "out").output
    assert "--prompts is for chats" in str(invoke("build", tmp_path / "x", file, "--prompts").exception)
