"""Read a checkpoint with `json`, `numpy` and `safetensors` alone, without importing Headway.

    python examples/read_checkpoint.py [runs/RUN/checkpoints/step-00000010]

Without a folder it first makes a short run with two workers, so that tensors are split over two files.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file


def read_checkpoint(folder: Path) -> dict[str, np.ndarray]:
    """Return every full tensor by name: model/<parameter> and optimizer/<parameter>/<key>."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    files = {name: load_file(folder / name) for name in manifest["files"]}
    tensors = {}
    for name, entry in manifest["tensors"].items():
        tensor = np.empty(entry["shape"], entry["dtype"])
        for piece in entry["pieces"]:
            box = tuple(slice(a, a + n) for a, n in zip(piece["start"], piece["shape"], strict=True))
            tensor[box] = files[piece["file"]][name]
        tensors[name] = tensor
    return tensors


def short_run() -> Path:
    """Train ten steps on this file and return the path of the checkpoint."""
    Path("short.toml").write_text(
        'name = "short"\nmodel.layers = 2\nmodel.dim = 32\ndata = { path = "data/short", seq = 32 }\n'
        "train = { steps = 10, batch = 4 }\n"
    )
    headway = [sys.executable, "-m", "headway.cli.main"]
    subprocess.run([*headway, "data", "build", "data/short", __file__, "--vocab-size", "300", "--force"], check=True)
    command = [*headway, "train", "short.toml", "--workers", "2", "--set", "train.device=cpu", "--json"]
    run = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)["run"]
    listed = [*headway, "checkpoint", "ls", run, "--json"]
    return Path(
        json.loads(subprocess.run(listed, check=True, stdout=subprocess.PIPE).stdout)["checkpoints"][-1]["path"]
    )


def main() -> None:
    """Print the name, dtype, shape and mean absolute value of every weight; count the optimizer's tensors."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else short_run()
    tensors = read_checkpoint(folder)
    weights = {name: tensor for name, tensor in sorted(tensors.items()) if name.startswith("model/")}
    for name, tensor in weights.items():
        print(f"{name:40} {tensor.dtype} {'x'.join(map(str, tensor.shape)):8} |{np.abs(tensor).mean():.2e}|")
    print(f"{folder}: {len(weights)} weights, {len(tensors) - len(weights)} tensors of the optimizer")


if __name__ == "__main__":
    main()
