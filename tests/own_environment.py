"""Environments of their own for tools that a test runs beside Headway, made once and kept in .test-results/."""

import hashlib
import subprocess
import sys
import sysconfig
from pathlib import Path

FOLDER = Path(__file__).parent.parent / ".test-results" / "environments"


def python_with(*packages: str) -> Path:
    """Return the Python of an environment with these packages, besides those of this one."""
    key = hashlib.sha256("\n".join([sys.version, *packages]).encode()).hexdigest()[:12]
    folder = FOLDER / key
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        site = Path(subprocess.run(
            [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            check=True, capture_output=True, text=True,
        ).stdout.strip())  # fmt: skip
        (site / "base.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
        subprocess.run(install, check=True)
        (folder / "complete").touch()
    return python
