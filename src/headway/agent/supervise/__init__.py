"""Watch a run to its end: attempts, hang detection, failure classification, recovery."""
