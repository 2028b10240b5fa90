"""What a wheel of the repository holds, and the first commands of somebody who has only that."""

import json
import os
import shlex
import subprocess
import sys
import tomllib
import venv
import zipfile
from importlib.metadata import Distribution
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = sorted(PROJECT["optional-dependencies"])
PINS = dict(
    line.split("==")
    for line in (ROOT / "requirements.lock").read_text(encoding="utf-8").lower().replace("_", "-").splitlines()
    if not line.startswith("#")
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from hatchling.builders.wheel import WheelBuilder

    (path,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path_factory.mktemp("wheel")), versions=["standard"])
    return Path(path)


def test_wheel_holds_the_package_its_types_and_every_recipe(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        for recipe in (ROOT / "recipes").rglob("*.toml"):
            assert archive.read(f"headway/recipes/{recipe.relative_to(ROOT / 'recipes')}") == recipe.read_bytes()
    sources = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "headway").rglob("*.py")}
    assert sources | {"headway/py.typed"} <= names
    assert {name.partition("/")[0] for name in names} == {"headway", wheel.name.rpartition("-py3")[0] + ".dist-info"}


@pytest.mark.parametrize("extra", ["", *EXTRAS])
def test_lock_holds_what_the_wheel_and_each_extra_need(extra: str) -> None:
    for text in PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]:
        requirement = Requirement(text)
        pin = PINS.get(requirement.name.lower().replace("_", "-"))
        assert pin is not None, f"{text} is not in requirements.lock"
        assert Version(pin) in requirement.specifier, f"{text}: requirements.lock has {pin}"


class Installed:
    """A virtual environment with the wheel, and with everything else that this one has."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.bin = folder / "bin"
        (self.site,) = folder.glob("lib/python*/site-packages")
        self.pip("install", "--no-deps", str(wheel))
        assert (self.site / "headway" / "__main__.py").is_file()
        numpy = find_spec("numpy")
        assert numpy is not None
        (self.site / "others.pth").write_text(f"{Path(str(numpy.origin)).parents[1]}\n")

    def pip(self, *words: str) -> str:
        """Run this environment's pip on that one, without any index."""
        command = [sys.executable, "-m", "pip", "--python", str(self.bin / "python"), "--disable-pip-version-check"]
        return self._run([*command, words[0], "--no-index", *words[1:]], self.bin)

    def headway(self, folder: Path, *words: str, module: bool = False) -> str:
        """Run the installed command, as a script or as a module."""
        program = [str(self.bin / "python"), "-m", "headway"] if module else [str(self.bin / "headway")]
        return self._run([*program, *words], folder)

    def _run(self, command: list[str], folder: Path) -> str:
        hidden = ("PYTHON", "HEADWAY_", "VIRTUAL_ENV")
        environment = {key: value for key, value in os.environ.items() if not key.startswith(hidden)}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{shlex.join(command)}: {done.stderr}"
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("installed"), wheel)


@pytest.mark.slow
def test_installed_wheel_trains_the_demo_outside_the_repository(installed: Installed, tmp_path: Path) -> None:
    """From the wheel to a trained model with what `recipe cp` says to type next, the data and the steps made fewer."""
    version = Distribution.at(next(installed.site.glob("headway-*.dist-info"))).version
    assert installed.headway(tmp_path, "--version", module=True) == f"headway {version}\n"
    listed = json.loads(installed.headway(tmp_path, "recipe", "ls", "--json"))
    assert {Path(file["path"]).parents[len(Path(file["name"]).parts)] for file in listed} == {
        installed.site / "headway"
    }
    assert {file["name"] for file in listed} >= {"demo", "llama3-8b", "clusters/h100-rail"}
    copied = json.loads(installed.headway(tmp_path, "recipe", "cp", "demo", "--json"))
    assert copied["files"] == ["demo.toml"]
    build, train = (shlex.split(command)[1:] for command in copied["next"])
    build = [word.replace("/*.py", "/json/*.py").replace("2048", "512") for word in build]
    installed.headway(tmp_path, *build)
    said = installed.headway(
        tmp_path, *train, "--set", "train.steps=2", "--set", "train.warmup_steps=1", "--name", "two"
    )
    assert "two: finished at step 2 of 2" in said
    assert "finished, step 2" in installed.headway(tmp_path, "report", "two", module=True)


@pytest.mark.slow
@pytest.mark.parametrize("extra", EXTRAS)
def test_every_extra_resolves_for_the_installed_wheel(installed: Installed, extra: str) -> None:
    """Without an index: with the versions of requirements.lock, what this environment has is enough."""
    said = installed.pip("install", "--dry-run", f"headway[{extra}]")
    assert "does not provide the extra" not in said
    assert "Would install" not in said
