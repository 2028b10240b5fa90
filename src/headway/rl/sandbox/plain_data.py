"""Values that cross between the answer's code and its tests: plain data as JSON, anything else as a reference.

A script of its own: it runs in sandboxes, without Headway. What is decoded is always of Python's own types, so that no
`__eq__` of the answer's decides a test.
"""

import json
from collections.abc import Callable
from typing import Any

MOST_BYTES = 4 << 20
"""Of one message."""
MOST_DIGITS = 100_000
"""Of an int; Python's own limit of 4,300 is less than the factorial of 2,000 has."""


def encode(value: Any, refer: Callable[[Any], int]) -> Any:
    """Return a value for JSON; `refer` numbers objects that are no plain data."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    for kind, name in ((list, "list"), (tuple, "tuple"), (set, "set"), (frozenset, "frozenset")):
        if isinstance(value, kind):
            return [name, [encode(item, refer) for item in value]]
    if isinstance(value, dict):
        return ["dict", [[encode(key, refer), encode(item, refer)] for key, item in value.items()]]
    if isinstance(value, bytes | bytearray):
        return ["bytes", value.hex()]
    if isinstance(value, complex):
        return ["complex", [value.real, value.imag]]
    for plain in (int, float, str):
        if isinstance(value, plain):  # of a subclass, such as an IntEnum
            return plain(value)
    return ["ref", refer(value)]


def decode(data: Any, resolve: Callable[[int], Any]) -> Any:
    """Return the value that `encode` made this of; raise ValueError or TypeError if it made it of none."""
    if not isinstance(data, list):
        if isinstance(data, dict):
            raise ValueError("an object")
        return data
    name, content = data
    match name:
        case "list" | "tuple" | "set" | "frozenset":
            kinds: dict[str, Callable[[Any], Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
            return kinds[name](decode(item, resolve) for item in content)
        case "dict":
            return {decode(key, resolve): decode(item, resolve) for key, item in content}
        case "bytes":
            return bytes.fromhex(content)
        case "complex":
            return complex(*content)
        case "ref" if type(content) is int:
            return resolve(content)
    raise ValueError(f"{name!r}")


def to_line(message: Any) -> bytes:
    """Return a message as a line; raise ValueError if it is too long."""
    line = json.dumps(message).encode() + b"\n"
    if len(line) > MOST_BYTES:
        raise ValueError("the value is too large")
    return line
