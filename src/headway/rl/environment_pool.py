"""An environment in processes of its own: turns are sent there, and replies come back while other answers go on.

Each training worker has `rl.reward_workers` processes (`rl/call_pool.py`). A reply may take `rl.reward_timeout_s`. Any
process takes any turn: what an environment knows of an answer comes with it, as the state of its last reply.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from headway.recipe.rl import Rl
from headway.rl.call_pool import CallPool
from headway.rl.environments import Reply, Turn
from headway.rl.rollout import ENVIRONMENT


@dataclass(frozen=True, slots=True)
class TurnResult:
    """What became of a turn."""

    reply: Reply | None
    """None if the environment raised, hung, died, or returned something wrong."""
    error: str | None = None


class EnvironmentPool:
    """The environment of a recipe's `rl` section."""

    def __init__(self, rl: Rl, *, clock: Callable[[], float] = time.monotonic) -> None:
        assert rl.environment is not None, "a recipe without environment has none"
        start = {"environment": {"name": rl.environment, "args": rl.environment_args}}
        self._pool = CallPool(
            start,
            [ENVIRONMENT],
            imports=[rl.environment],
            processes=rl.reward_workers,
            limit_s=rl.reward_timeout_s,
            clock=clock,
        )

    def submit(self, turn: Turn) -> int:
        """Queue a turn; return its number, which counts up from 0. Never waits."""
        return self._pool.submit(asdict(turn))

    def poll(self, timeout_s: float = 0.0) -> dict[int, TurnResult]:
        """Return what has come back, by the turn's number; wait for something at most so long."""
        self._pool.wait_for_a_result(timeout_s)
        results = {number: calls[ENVIRONMENT] for number, calls in self._pool.take().items()}
        return {
            number: TurnResult(Reply(**result.value)) if result.error is None else TurnResult(None, result.error)
            for number, result in results.items()
        }

    def close(self) -> None:
        """End all processes; what they were running is lost."""
        self._pool.close()
