"""A virtual environment to submit from, made in a second."""

import shutil
import subprocess
import sys
from pathlib import Path

import headway

__all__ = ["small_venv"]


def small_venv(folder: Path) -> Path:
    """A virtual environment of its own: headway copied into it, what that needs led to where it is."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (real,) = Path(sys.prefix).glob("lib/python*/site-packages")
    for entry in real.iterdir():
        if entry.name not in ("headway", "__pycache__") and entry.suffix != ".pth":
            (site / entry.name).symlink_to(entry)
    shutil.copytree(Path(headway.__file__).parent, site / "headway", ignore=shutil.ignore_patterns("__pycache__"))
    return folder / "bin" / "python"
