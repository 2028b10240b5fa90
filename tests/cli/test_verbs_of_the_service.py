"""Verbs of the service, as they print what it answers; without a service."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from headway.cli import logs, nodes, secrets
from headway.cluster.engines import Machine

JOB: dict[str, Any] = {"id": "7", "name": "hello", "state": "cancelled"}


class Answers:
    """A connection that answers from a table."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.get = answers.__getitem__


@pytest.mark.parametrize("lines", [[], [("7/0001-0.log", "on GPU 2")]])
def test_logs_of_a_job_are_printed_or_said_to_be_empty(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lines: list[tuple[str, str]]
) -> None:
    answers: dict[str, Callable[..., Any]] = {
        "sweep_named": lambda *_: None, "service_job": lambda *_: [JOB], "log_lines": lambda *_, **__: iter(lines),
    }  # fmt: skip
    for name, answer in answers.items():
        monkeypatch.setattr(logs, name, answer)
    logs.logs("hello", rank=None, attempt=None)
    printed = capsys.readouterr()
    assert printed.out == "".join(f"== {name}\n{line}\n" for name, line in lines)
    assert ("job 7 (hello) has printed nothing" in printed.err) == (not lines)


def test_gpus_of_machines_that_take_no_jobs_are_not_free(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    inventory = [
        Machine("n1", "free", 4, 4, 16, 2**34),
        Machine("n2", "away", 4, 4, 16, 2**34, reason="cordoned"),
        Machine("n3", "busy", 4, 1, 16, 2**34),
    ]
    monkeypatch.setattr(nodes, "reach_engine", lambda *_: SimpleNamespace(inventory=lambda: inventory))
    nodes.nodes("service")
    assert "3 machines, 5 of 12 GPUs free" in capsys.readouterr().out


def test_secrets_are_listed_without_a_word_of_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"tenant": "red", "name": "HF_TOKEN", "user": "mia", "changed": 0.0}]
    monkeypatch.setattr(secrets, "connect", lambda _: Answers({"/api/v1/secrets": rows}))
    outputs = [CliRunner().invoke(secrets.app, words).output for words in (["--json"], ["ls", "--json"])]
    assert outputs[0] == outputs[1]
    assert "HF_TOKEN" in outputs[0]
