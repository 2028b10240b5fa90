"""Compare the diffusion transformers with diffusers and write their table into docs/concepts/models.md.

python docs/diffusion_table.py     about a minute; exits with 1, writing nothing, if one is not equal
"""

import importlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from families_table import GRADIENTS, LOGITS, PAGE, TESTS, short

BEGIN, END = "<!-- made by docs/diffusion_table.py: begin -->", "<!-- made by docs/diffusion_table.py: end -->"
FEATURES = {
    "text to video": "Wan: 3D rotary positions, cross-attention",
    "image to video": "Wan: image latents, attention to image embeddings",
    "first and last frame": "Wan: learned positions of image embeddings",
    "image channels, 3D patches": "Wan: patches of several frames, no cross-attention norm",
    "dit": "DiT: adaLN-zero, classes, learned variance",
}


def main() -> int:
    """Compare all cases, then write the page."""
    rows = list(compared())
    if any(output > LOGITS or gradient > GRADIENTS for _, output, gradient in rows):
        return 1
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN, 1)
    table = [f"| model | outputs (of {short(LOGITS)}) | gradients (of {short(GRADIENTS)}) |", "|---|---:|---:|"]
    table += [f"| {FEATURES[case]} | {output:.1e} | {gradient:.1e} |" for case, output, gradient in rows]
    text = "\n".join(table)
    PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END, 1)[1]}", encoding="utf-8")
    return 0


def compared() -> Iterator[tuple[str, float, float]]:
    """Yield the largest difference of outputs and of gradients, of every case of the tests."""
    sys.path.insert(0, str(TESTS))
    tests = importlib.import_module("test_diffusion_models")
    for case in FEATURES:
        with tempfile.TemporaryDirectory() as folder:
            ours, theirs, got, want = tests.compared(case, Path(folder))
        gradients = tests.gradient_differences(ours, theirs)
        yield case, float((got - want).abs().max()), max(gradients.values())


if __name__ == "__main__":
    sys.exit(main())
