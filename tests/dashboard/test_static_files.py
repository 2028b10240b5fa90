"""The built app: small, complete, of these sources, and without an address of another machine."""

import gzip
import hashlib
import json
import re
from pathlib import Path

import headway.dashboard

PACKAGE = Path(headway.dashboard.__file__).parent
STATIC, APP = PACKAGE / "static", PACKAGE / "app"


def test_app_is_small() -> None:
    sizes = {path.name: len(gzip.compress(path.read_bytes(), 9, mtime=0)) for path in STATIC.iterdir()}
    assert sum(sizes.values()) < 150_000, sizes


def test_app_is_built_from_these_sources() -> None:
    """`npm run build` writes the hash; nothing of npm is needed to compare it."""
    digest = hashlib.sha256()
    for path in sorted([*(APP / "src").iterdir(), APP / "index.html", APP / "package.json", APP / "vite.config.js"],
                       key=lambda path: path.name):  # fmt: skip
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    assert (STATIC / "sources.sha256").read_text().strip() == digest.hexdigest(), "npm run build in dashboard/app"


def test_nothing_is_loaded_from_elsewhere() -> None:
    for path in STATIC.iterdir():
        addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+", path.read_text()))
        assert addresses <= {"http://www.w3.org"}, path.name


def test_lock_names_no_registry() -> None:
    lock = json.loads((APP / "package-lock.json").read_text())
    packages = [package for name, package in lock["packages"].items() if name]
    assert packages
    assert all("resolved" not in package for package in packages)
    assert all(package["integrity"].startswith("sha512-") for package in packages)
