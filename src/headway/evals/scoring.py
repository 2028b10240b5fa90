r"""Scores of an output against the reference: exact match, and math answers by value.

The answer of an output is, in this order: the last \boxed{...}; what follows the last ####; what follows the last
"answer is" or "answer:"; the last number. That of a reference is found by the same marks, or else is all of it. Two are
equal if they are the same number (1,234.50 and 1234.5; \frac{1}{2}, 1/2 and 0.5; $5, 5 and 5 dollars), or else the same
text without spaces and LaTeX's ornaments.
"""

import re
from collections.abc import Callable, Sequence
from fractions import Fraction

MOST_DIGITS = 400
"""Of a number; longer ones are compared as text."""

_NUMBER = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
_SIGNED = re.compile(rf"(?<![\w.)\]}}])[-+]?\$?\s?{_NUMBER}(?:\s*/\s*{_NUMBER})?|{_NUMBER}")
_PLAIN = re.compile(rf"([-+]?)({_NUMBER})(?:/({_NUMBER}))?")
_MIXED = re.compile(r"([-+]?)(\d+) +(\d+)/(\d+)")
_ANSWER_IS = re.compile(r"\banswer(?:\s+is\b|\s*[:=])[\s:=]*", re.IGNORECASE)
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))")
_WITH_UNIT = re.compile(rf"([-+]?{_NUMBER}(?:/{_NUMBER})?) *[A-Za-z][A-Za-z .]*")
_ORNAMENTS = re.compile(r"\\(?:left|right|displaystyle|,|;|:|!| |quad)|\^\\circ|\^\{\\circ\}|\\[()\[\]]|\$")
_TEXT = re.compile(r"\\(?:text|mathrm|mbox|textbf|mathbf)\{([^{}]*)\}")


def exact_match(output: str, reference: str, *, ignore_case: bool = False) -> bool:
    """Whether an output is the reference, but for white space around it."""
    first, second = output.strip(), reference.strip()
    return first.casefold() == second.casefold() if ignore_case else first == second


def math_match(output: str, reference: str) -> bool:
    """Whether an output gives the answer of the reference, which without a mark is the answer itself."""
    given = final_answer(output)
    return given is not None and math_value(given) == math_value(marked_answer(reference) or reference)


def final_answer(text: str) -> str | None:
    """Return the answer that a text ends in; None if it has none."""
    return marked_answer(text) or _last_number(text)


def marked_answer(text: str) -> str | None:
    """Return the answer that a text marks as such."""
    return _boxed(text) or _after_hashes(text) or _after_answer(text)


def math_value(answer: str) -> Fraction | str:
    """Return the number that an answer is, or its text in one spelling."""
    text = _TEXT.sub(r" \1", answer.replace("\N{MINUS SIGN}", "-"))
    text = _FRACTION.sub(lambda match: f"{match[1] or match[2]}/{match[3] or match[4]}", text)
    text = _ORNAMENTS.sub("", text).replace("\\%", "").replace("%", "").replace("{,}", ",")
    text = text.strip().rstrip(".").strip()
    if mixed := _MIXED.fullmatch(text):
        value = (_quotient(mixed[3], mixed[4]) or Fraction(0)) + int(mixed[2])
        return -value if mixed[1] == "-" else value
    text = text.replace(" /", "/").replace("/ ", "/").replace("- ", "-")
    if unit := _WITH_UNIT.fullmatch(text):
        text = unit[1]
    if plain := _PLAIN.fullmatch(text):
        quotient = _quotient(plain[2], plain[3] or "1")
        if quotient is not None:
            return -quotient if plain[1] == "-" else quotient
    return re.sub(r"\s+", "", text).casefold()


def extracted(text: str, pattern: str) -> str:
    """Return the last match of a pattern, its first group if it has one; nothing without a match."""
    matches = list(re.finditer(pattern, text))
    if not matches:
        return ""
    match = matches[-1]
    return next((group for group in match.groups() if group is not None), match[0])


def scorer(
    metric: str, *, extract: str | None = None, ignore_case: bool = False
) -> Callable[[str, Sequence[str]], bool]:
    """Return what scores an output against references, any of which is right."""

    def score(output: str, references: Sequence[str]) -> bool:
        texts = [output, *references]
        if extract is not None:
            # A reference is often the bare answer already.
            texts = [extracted(output, extract), *(extracted(text, extract) or text for text in references)]
        if metric == "math":
            return any(math_match(texts[0], text) for text in texts[1:])
        return any(exact_match(texts[0], text, ignore_case=ignore_case) for text in texts[1:])

    return score


def _quotient(above: str, below: str) -> Fraction | None:
    """Return a fraction of two numbers; None if it is none, or too long to be worth it."""
    above, below = above.replace(",", ""), below.replace(",", "")
    if max(len(above), len(below)) > MOST_DIGITS:
        return None
    denominator = Fraction(below)
    return None if denominator == 0 else Fraction(above) / denominator


def _boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{...} that is closed."""
    for command in ("\\boxed{", "\\fbox{"):
        start = text.rfind(command)
        if start < 0:
            continue
        depth, first = 1, start + len(command)
        for place in range(first, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return text[first:place].strip()
    return None


def _after_hashes(text: str) -> str | None:
    _, mark, rest = text.rpartition("####")
    return _first_line(rest) if mark else None


def _after_answer(text: str) -> str | None:
    """Return what follows the last "answer is": a number in it, or all of the sentence."""
    places = list(_ANSWER_IS.finditer(text))
    if not places:
        return None
    rest = _first_line(text[places[-1].end() :])
    if isinstance(math_value(rest), Fraction):
        return rest
    sentence = re.split(r"[.!?](?:\s|$)", rest, maxsplit=1)[0]
    if isinstance(math_value(sentence), Fraction) or "\\" in sentence:
        return sentence
    return _first_number(sentence) or sentence


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _first_number(text: str) -> str | None:
    match = _SIGNED.search(text)
    return match[0] if match else None


def _last_number(text: str) -> str | None:
    matches = _SIGNED.findall(text.replace("\N{MINUS SIGN}", "-"))
    return str(matches[-1]) if matches else None
