"""Images of handwritten digits, from scikit-learn: 1,797 PNG files of 8 x 8 pixels, with captions and labels 0 to 9.

    python examples/make_digits.py [OUT]

OUT/images has the files and OUT/captions.jsonl a row for each. Build a dataset from them with
`headway data build data/digits 'OUT/images/*.png' --kind image --captions OUT/captions.jsonl`.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description="Images of handwritten digits, with captions and labels 0 to 9.")
    parser.add_argument("out", metavar="OUT", nargs="?", default="data/digits-files", help="folder (%(default)s)")
    out = Path(parser.parse_args().out)
    (out / "images").mkdir(parents=True, exist_ok=True)
    images, labels = load_digits(return_X_y=True)
    with (out / "captions.jsonl").open("w") as captions:
        for number, (pixels, label) in enumerate(zip(images, labels.tolist(), strict=True)):
            name = f"{number:04d}.png"
            levels = np.minimum(pixels.reshape(8, 8) * 16, 255).astype(np.uint8)  # 0 to 16 in the set
            Image.fromarray(levels).save(out / "images" / name)
            print(json.dumps({"file": name, "caption": f"the digit {NAMES[label]}", "label": label}), file=captions)
    print(f"{out}: {len(labels)} images of digits with labels 0 to 9")


if __name__ == "__main__":
    main()
