"""The agent as a process of its own, for detached runs: reads an Attempt as JSON and supervises it."""

import sys

from headway.agent import Attempt, supervise


def main() -> int:
    """Supervise the attempt given on standard input to its end."""
    outcome = supervise(Attempt.model_validate_json(sys.stdin.read()))
    print(f"{outcome.state}: {outcome.reason}", file=sys.stderr)
    return outcome.exit_status


if __name__ == "__main__":
    sys.exit(main())
