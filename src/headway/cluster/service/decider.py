"""Decides in a process of its own, so that a slow or failing decision never keeps the service from answering.

The process folds the record into a LiveState as it grows, and answers one JSON line per question. It is started on the
first question, and again when it has died or does not answer in time; it then reads the record from its beginning.
"""

import contextlib
import json
import subprocess
import sys
from base64 import b64decode, b64encode
from dataclasses import asdict
from queue import Empty, Queue
from threading import Lock, Thread
from typing import Any

from headway.cluster.scheduler.jobs import Job, job_from_json, job_to_json
from headway.cluster.scheduler.months import month_start
from headway.cluster.scheduler.wait_reasons import explain_wait
from headway.cluster.service.grants import LiveDecision, decode, encode
from headway.cluster.service.live_state import LiveState
from headway.cluster.service.record_lines import RecordLines, packed, unpacked
from headway.cluster.service.trials import try_change
from headway.errors import EngineError, UsageError

ANSWER_S = 60.0
"""How long a decision may take, or the start of the process with the first part of the record."""
MOST_LINES = 2000
"""Of the record that the process is told at a time."""
_MODULE = "headway.cluster.service.decider"


class InProcessDecider:
    """Decides in this process: for simulations and tests."""

    def __init__(self) -> None:
        self.state, self.seen = LiveState(), 0

    def decide(self, lines: RecordLines, now_s: float) -> list[LiveDecision]:
        """Return the decisions for the state that a record leads to."""
        self._follow(lines)
        return self.state.decide(now_s)

    def why(self, lines: RecordLines, now_s: float, job: str) -> dict[str, Any]:
        """Explain the state of a job."""
        self._follow(lines)
        state, snapshot = self.state, self.state.snapshot.copy()
        snapshot.advance(max(now_s, snapshot.now_s))
        explanation = explain_wait(snapshot, snapshot.now_s, state.policy, job, state.history)
        return asdict(explanation) | {"sentence": explanation.reason.sentence, "policy": state.policy.name}

    def tenants(self, lines: RecordLines, now_s: float) -> dict[str, Any]:
        """Return what tenants hold, wait for and have spent, and the month."""
        self._follow(lines)
        snapshot = self.state.snapshot.copy()
        snapshot.advance(max(now_s, snapshot.now_s))
        table, month = snapshot.tenants, month_start(snapshot.unix_zero_s + snapshot.now_s)
        usage = {
            name: {
                "gpus": int(table.used[row]),
                "wanted_gpus": int(table.wanted[row]),
                "spent_gpu_h": float(table.spent_gpu_s[row]) / 3600,
            }
            for name, row in table.rows.items()
        }
        return {"month": month.strftime("%Y-%m"), "usage": usage}

    def simulate(self, lines: RecordLines, now_s: float, job: Job | None, policy: str | None) -> dict[str, Any]:
        """Return what a new job or another policy would change."""
        self._follow(lines)
        return try_change(self.state, now_s, job, policy)

    def _follow(self, lines: RecordLines) -> None:
        fold, news = lines.since(self.seen)
        if fold is not None:
            self.state, self.seen = LiveState.from_json(fold.text), fold.seq
        self.state.apply_all(news)
        self.seen += len(news)

    def close(self) -> None:
        """Nothing to end."""


class DeciderProcess:
    """Has another process decide."""

    def __init__(self, answer_s: float = ANSWER_S) -> None:
        self._answer_s = answer_s
        self._process: subprocess.Popen[str] | None = None
        self._answers: Queue[str] = Queue()
        self._seen, self._lock = 0, Lock()

    def decide(self, lines: RecordLines, now_s: float) -> list[LiveDecision]:
        """See InProcessDecider."""
        return [decode(fields) for fields in self._ask(lines, {"decide": now_s})["decisions"]]

    def why(self, lines: RecordLines, now_s: float, job: str) -> dict[str, Any]:
        """See InProcessDecider."""
        answer: dict[str, Any] = self._ask(lines, {"why": job, "at": now_s})["why"]
        return answer

    def tenants(self, lines: RecordLines, now_s: float) -> dict[str, Any]:
        """See InProcessDecider."""
        answer: dict[str, Any] = self._ask(lines, {"tenants": now_s})["tenants"]
        return answer

    def simulate(self, lines: RecordLines, now_s: float, job: Job | None, policy: str | None) -> dict[str, Any]:
        """See InProcessDecider."""
        added = None if job is None else job_to_json(job)
        answer: dict[str, Any] = self._ask(lines, {"simulate": now_s, "job": added, "policy": policy})["simulate"]
        return answer

    def fold(self, lines: RecordLines, until: int) -> bytes:
        """Return the state that so many lines lead to, as a fold has it."""
        # compressed there: to read tens of megabytes of JSON here would stop all threads meanwhile
        return b64decode(self._ask(lines, {"fold": until}, until)["fold"])

    def _ask(self, lines: RecordLines, question: dict[str, Any], until: int | None = None) -> dict[str, Any]:
        with self._lock:
            for last in (False, True):  # once more with a new process
                try:
                    return self._exchange(lines, question, until)
                except (OSError, Empty, ValueError):
                    self._end()
                    if last:
                        break
            raise EngineError("the scheduler's process does not answer", hint="see the log of headway up")

    def _exchange(self, lines: RecordLines, question: dict[str, Any], until: int | None) -> dict[str, Any]:
        if self._process is None or self._process.poll() is not None:
            self._start()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        fold, news = lines.since(self._seen, until)
        if fold is not None:
            self._tell({"state": b64encode(fold.state).decode(), "lines": []})
            self._seen = fold.seq
        while len(news) > MOST_LINES:  # each part has its time: a long record must not look like a process that hangs
            self._tell({"lines": news[:MOST_LINES]})
            self._seen, news = self._seen + MOST_LINES, news[MOST_LINES:]
        answer = self._tell({"lines": news, **question})
        self._seen += len(news)
        if "usage" in answer:
            raise UsageError(answer["usage"], hint=answer["hint"])
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer

    def _tell(self, question: dict[str, Any]) -> dict[str, Any]:
        """Send a question, or only what it will be about, and return the answer."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._answers.get(timeout=self._answer_s))
        return answer

    def _start(self) -> None:
        self._end()
        self._process = subprocess.Popen(
            [sys.executable, "-m", _MODULE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._seen, self._answers = 0, Queue()
        Thread(target=_collect, args=(self._process.stdout, self._answers), daemon=True).start()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        with contextlib.suppress(OSError):
            assert process.stdin is not None
            process.stdin.close()
        process.wait()

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()


def _collect(stream: Any, answers: "Queue[str]") -> None:
    """Move answers from a pipe to a queue; an empty one at the end."""
    with stream:
        for line in stream:
            answers.put(line)
    answers.put("")


def main() -> None:
    """Answer questions from standard input until it ends."""
    decider, lines = InProcessDecider(), RecordLines()  # no lines: they come with the questions
    for text in sys.stdin:
        question = json.loads(text)
        if "state" in question:
            decider.state = LiveState.from_json(unpacked(b64decode(question["state"])))
        decider.state.apply_all(question["lines"])
        try:
            if "why" in question:
                answer: dict[str, Any] = {"why": decider.why(lines, question["at"], question["why"])}
            elif "simulate" in question:
                job = None if question["job"] is None else job_from_json(question["job"])
                answer = {"simulate": decider.simulate(lines, question["simulate"], job, question["policy"])}
            elif "fold" in question:
                answer = {"fold": b64encode(packed(decider.state.to_json())).decode()}
            elif "tenants" in question:
                answer = {"tenants": decider.tenants(lines, question["tenants"])}
            elif "decide" not in question:
                answer = {}
            else:
                decisions = decider.decide(lines, question["decide"])
                answer = {"decisions": [encode(decision) for decision in decisions]}
        except UsageError as error:
            answer = {"usage": error.message, "hint": error.hint}
        print(json.dumps(answer, default=str), flush=True)


if __name__ == "__main__":
    main()
