import json
import os
import random
import re
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from eventually import CEILING_S
from headway.cli.data import app
from headway.cli.data_progress import plain_progress
from headway.cli.main import main
from headway.cluster.engines.ray.engine import RayEngine
from headway.data import BuildProgress, open_dataset
from headway.errors import DataError, EngineUnreachable

runner = CliRunner()


@pytest.fixture
def texts(tmp_path):
    (tmp_path / "a.txt").write_text(
        "The first line of a text.\n\tAnother, with a tab and \x1b[31mcolour.\n" + "x" * 200
    )
    (tmp_path / "b.txt").write_text("Second document. " * 40)
    return tmp_path


def run(*arguments):
    """Exit status, stdout, stderr; errors of ours travel as they would to the main program."""
    result = runner.invoke(app, [str(a) for a in arguments])
    if isinstance(result.exception, DataError):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_build_show_verify(texts):
    out = texts / "out"
    status, shown, log = run("build", out, f"{texts}/*.txt", "--vocab-size", 300)
    assert status == 0
    version = open_dataset(out).version
    assert f"version    {version}" in shown
    assert shown.strip().splitlines()[-1] == f"next: headway train RECIPE --set data.path={out}"
    assert "encoding: 100%" in log
    assert "unchanged" in run("build", out, f"{texts}/*.txt", "--vocab-size", 300)[1]

    status, shown, log = run("show", out, "--samples", 2)
    assert (status, log) == (0, "")
    assert "The first line of a text." in shown
    assert "Second document." in shown
    assert "\x1b" not in shown
    samples = shown[shown.index("document 0") :].splitlines()[:-1]
    assert max(map(len, samples)) <= 80

    status, shown, log = run("verify", out)
    assert status == 0
    assert "3 files, all match the manifest" in shown


def test_json_is_one_object_on_stdout(texts):
    out = texts / "out"
    built = json.loads(run("build", out, f"{texts}/*.txt", "--vocab-size", 300, "--json")[1])
    dataset = open_dataset(out)
    assert built["version"] == dataset.version
    assert (built["changed"], built["sources"], built["documents"]) == (True, 2, 2)
    shown = json.loads(run("show", out, "--json", "--samples", 5)[1])
    assert [sample["document"] for sample in shown["samples"]] == [0, 1]
    assert (texts / "b.txt").read_text().startswith(shown["samples"][1]["text"])
    assert json.loads(run("verify", out, "--json")[1])["verified"] is True


def test_prompts_and_skipped_lines_are_reported(texts):
    (texts / "c.jsonl").write_text('{"q": "why", "a": "because"}\n{"q": 1}\n')
    options = ("--prompt-field", "q", "--text-field", "a", "--errors", "skip", "--vocab-size", 300)
    status, shown, log = run("build", texts / "out", texts / "c.jsonl", *options)
    assert status == 0
    assert re.search(r"prompts +\d+ tokens, not trained on", shown)
    assert "skipped    1 " in shown
    assert "c.jsonl line 2" in log
    shown = run("show", texts / "out")[1]
    assert "  prompt: why\n  text: because" in shown


def test_exclude_format_tokenizer_force(texts, monkeypatch):
    monkeypatch.setenv("RAYON_NUM_THREADS", "2")  # so that what --threads sets is undone
    run("build", texts / "one", f"{texts}/*.txt", "--exclude", "b.txt", "--vocab-size", 300)
    assert open_dataset(texts / "one").manifest.documents == 1
    (texts / "c.data").write_text('{"text": "hidden json"}\n')
    run("build", texts / "two", texts / "c.data", "--format", "jsonl", "--tokenizer", texts / "one", "--threads", 1)
    first, two = open_dataset(texts / "one"), open_dataset(texts / "two")
    assert first.manifest.tokenizer == two.manifest.tokenizer
    with pytest.raises(DataError, match="holds version"):
        run("build", texts / "two", texts / "a.txt", "--tokenizer", texts / "one")
    run("build", texts / "two", texts / "a.txt", "--tokenizer", texts / "one", "--force")
    assert open_dataset(texts / "two").version == first.version


def test_a_corrupt_shard_is_an_error(texts):
    run("build", texts / "out", f"{texts}/*.txt", "--vocab-size", 300)
    path = texts / "out" / "tokens-00000.bin"
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(DataError, match=r"tokens-00000.bin should have sha256"):
        run("verify", texts / "out")
    with pytest.raises(DataError, match=r"tokens-00000.bin should have sha256"):
        run("show", texts / "out")


@pytest.mark.parametrize("option", [("--format", "xml"), ("--errors", "ignore"), ("--threads", "0")])
def test_wrong_options_are_usage_errors(texts, option):
    assert run("build", texts / "out", texts / "a.txt", *option)[0] == 2


def test_help_imports_nothing_heavy():
    check = (
        "import sys; from headway.cli.main import app; app(['data', 'build', '--help'], standalone_mode=False); "
        "assert not {'torch', 'tokenizers', 'numpy', 'headway.data'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", check], env={"PYTHONPATH": ":".join(sys.path)}, check=True)


def test_a_terminal_gets_a_bar_and_clean_stdout(texts):
    """On a real pseudo-terminal: the bar is on stderr, the data on stdout."""
    here, there = os.openpty()
    program = "from headway.cli.data import app; app()"
    command = [sys.executable, "-c", program, "build", str(texts / "out"), f"{texts}/*.txt", "--vocab-size", "300"]
    environment = os.environ | {"PYTHONPATH": ":".join(sys.path), "TERM": "xterm", "COLUMNS": "80"}
    completed = subprocess.run([*command, "--json"], env=environment, stdout=subprocess.PIPE, stderr=there)
    os.close(there)
    drawn = os.read(here, 1 << 16).decode()
    os.close(here)
    assert json.loads(completed.stdout)["documents"] == 2
    assert "encoding" in drawn
    assert "\x1b[" in drawn


def test_encoding_library_is_chosen_and_shown(texts):
    status, shown, _ = run(
        "build", texts / "one", f"{texts}/*.txt", "--vocab-size", 300, "--tokenizer-engine", "tokenizers"
    )
    assert status == 0
    assert re.search(r"^encoder    tokenizers \d", shown, re.MULTILINE)
    pytest.importorskip("tiktoken")
    arguments = ("--vocab-size", 300, "--tokenizer-engine", "tiktoken", "--json")
    built = json.loads(run("build", texts / "two", f"{texts}/*.txt", *arguments)[1])
    assert built["engine"].startswith("tiktoken ")
    assert built["version"] == open_dataset(texts / "one").version


def test_vocabulary_that_the_text_does_not_give_is_noted(texts):
    out = texts / "out"
    note = r"note: the text gives a vocabulary of (\d+), not the 5,000 of --vocab-size"
    for _ in range(2):  # built, and then already there
        status, _, log = run("build", out, f"{texts}/*.txt", "--vocab-size", 5000)
        said = re.search(note, log)
        assert said, log
        assert (status, int(said[1])) == (0, open_dataset(out).manifest.vocab_size)
    assert "note:" not in run("build", texts / "small", f"{texts}/*.txt", "--vocab-size", 270)[2]
    assert "note:" not in run("build", texts / "given", f"{texts}/*.txt", "--tokenizer", out)[2]


def test_ctrl_c_is_answered_and_leaves_no_folder(texts, monkeypatch, capsys):
    """Typer turns it into an exit, which used to be silent."""

    def interrupt(*_arguments, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr("headway.data.build._write", interrupt)
    monkeypatch.setattr(sys, "argv", ["headway", "data", "build", str(texts / "out"), f"{texts}/*.txt"])
    before = sorted(texts.iterdir())
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert capsys.readouterr().err.endswith("interrupted\n")
    assert sorted(texts.iterdir()) == before


def test_unreachable_cluster_is_reported_before_a_tokenizer_is_trained(texts, monkeypatch):
    def probe(_engine):
        raise EngineUnreachable("no Ray cluster answers")

    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:29999")
    monkeypatch.setattr(RayEngine, "probe", probe)
    monkeypatch.setattr("headway.data.build.train_tokenizer", lambda *_: pytest.fail("a tokenizer is trained"))
    before = sorted(texts.iterdir())
    result = runner.invoke(app, ["build", str(texts / "out"), f"{texts}/*.txt", "--engine", "ray"])
    assert isinstance(result.exception, EngineUnreachable)
    assert sorted(texts.iterdir()) == before


INTERRUPTED_TRAINING = """
import os, signal, sys, threading, time
from headway.data import tokenizer

class Slow:
    def train_from_iterator(self, texts, trainer):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(1000)  # without an instruction of Python's, as the trainer

try:
    tokenizer._train(Slow(), [], None)
except KeyboardInterrupt:
    sys.exit(7)
"""


def test_interrupted_process_ends_beside_the_thread_that_trains():
    """The interpreter would abort at its end, in the thread that it stops outside of Python."""
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED_TRAINING], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (130, "")


@pytest.mark.slow
def test_ctrl_c_does_not_wait_for_the_tokenizer(tmp_path):
    """Training it takes minutes here, without an instruction of Python's."""
    chance = random.Random(1)
    words = ["".join(chance.choices("abcdefghijklmnop", k=12)) for _ in range(200_000)]
    (tmp_path / "a.txt").write_text(" ".join(words))
    command = [sys.executable, "-m", "headway.cli.main", "data", "build", "out", "a.txt", "--vocab-size", "60000"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert process.stderr.readline().startswith("training the tokenizer: ")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=CEILING_S)
    assert (process.returncode, out) == (130, "")
    assert err.endswith("interrupted\n")
    assert "encoding" not in err, "it did not end before"
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_a_line_of_progress_is_not_printed_twice(capsys):
    show = plain_progress(every_s=0.0)
    for done in (0, 1, 2, 500, 500, 1000):
        show(BuildProgress("decode", done, 1000))
    shares = [line.split()[1] for line in capsys.readouterr().err.splitlines()]
    assert shares == ["0%", "50%", "100%"]
