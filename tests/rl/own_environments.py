"""Environments of a user, good and bad, that tests name."""

import os
import re
import sys
import time

from headway.rl.environments import Reply, Turn


class Calculator:
    """Replies to `2+3=` with the sum, as many times as it is asked to; any other turn is the answer."""

    def __init__(self, *, before: str = "") -> None:
        self.before = before

    def reply(self, turn: Turn) -> Reply:
        """Evaluate a sum, or judge the answer by the field `target`; the state counts the sums."""
        sums = turn.state or 0
        asked = re.fullmatch(r"(\d+)\+(\d+)=", turn.text)
        if asked is None:
            return Reply(done=True, reward=float(turn.text == str(turn.fields["target"])))
        value = str(int(asked[1]) + int(asked[2]))
        return Reply(text=f"{self.before}{value};", state=sums + 1, reward=-0.125 if sums else None)


class Chat:
    """Replies by messages of the chat template."""

    def reply(self, turn: Turn) -> Reply:
        """Say which turn it was."""
        return Reply(messages=[{"role": "user", "content": f"turn {turn.number}"}])


class Acts:
    """Does what a turn says."""

    def reply(self, turn: Turn) -> object:
        """See the cases."""
        match turn.text:
            case "raise":
                raise ValueError("no good")
            case "die":
                os._exit(3)
            case "hang":
                while True:
                    time.sleep(1)
            case "flood":
                return Reply(text="x" * 10_000_000)
            case "print":
                os.write(1, b"not json\n" * 100_000)
                print("{" * 100_000)
            case "state":
                return Reply(text="x", state=[0] * 1_000_000)
            case "object":
                return Reply(text="x", state=object())
            case "none":
                return None
            case "empty":
                return Reply()
            case "half":
                return Reply(text="\ud83d")
            case "both":
                return Reply(text="x", messages=[{"role": "user", "content": "x"}])
            case "messages":
                return Reply(messages=["x"])
            case "nan":
                return Reply(done=True, reward=float("nan"))
            case "pid":
                return Reply(text="x", state=os.getpid())
            case "torch":
                return Reply(text=str("torch" in sys.modules))
        return Reply(text=turn.text, state={"before": turn.state, "fields": turn.fields}, reward=0.5)


class Refuses:
    """Cannot be constructed."""

    def __init__(self) -> None:
        raise RuntimeError("no licence")


class Silent:
    """Has no method to call."""
