"""Fault injection: the matrix of what can break, and long runs under many faults."""
