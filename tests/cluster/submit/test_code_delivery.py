"""How code reaches machines: staging, containers, and where a model class comes from."""

import hashlib
import json
import os
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from headway.cluster.engines.engine import LaunchRequest
from headway.cluster.engines.settings import EngineSettings
from headway.cluster.engines.slurm.batch_script import batch_script
from headway.cluster.submit import staging
from headway.cluster.submit.code_delivery import code_for
from headway.cluster.submit.provenance import record_provenance, source_version
from headway.errors import UsageError
from headway.recipe import Data, Model, Recipe
from headway.recipe.find_own_code import find_package
from headway.track import RunFolder


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """A virtual environment with one package in it, and one outside in a .pth file."""
    folder = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "inside.py").write_text("WORD = 'inside'\n")
    (site / "inside-1.0.dist-info").mkdir()
    (site / "inside-1.0.dist-info" / "RECORD").write_text("inside.py,,\n")
    outside = tmp_path / "elsewhere"
    outside.mkdir()
    (outside / "editable.py").write_text("WORD = 'editable'\n")
    (site / "editable.pth").write_text(f"{outside}\n")
    return folder


def start(packed: staging.VenvArchive, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    environment = {"PATH": os.defpath, **variables}
    return subprocess.run(["bash", str(packed.start), *arguments], env=environment, capture_output=True, text=True)


PRINT_ORIGINS = "import sys, inside, editable; print(sys.prefix, inside.__file__, editable.__file__)"


def test_staged_environment_works_without_the_original(tmp_path: Path, venv: Path) -> None:
    packed = staging.venv_archive(tmp_path / "runs", venv, python_path="")
    staging.write_archive(packed, str(tmp_path / "node"))
    venv.rename(tmp_path / "moved")
    (tmp_path / "elsewhere").rename(tmp_path / "moved-too")
    (tmp_path / "node").mkdir()
    done = start(packed, "-c", PRINT_ORIGINS)
    assert done.returncode == 0, done.stderr
    own = tmp_path / "node" / f"headway-{os.getuid()}" / packed.key
    assert [Path(path).is_relative_to(own) for path in done.stdout.split()] == [True, True, True]


def test_concurrent_starts_unpack_once(tmp_path: Path, venv: Path) -> None:
    packed = staging.venv_archive(tmp_path / "runs", venv, python_path="")
    staging.write_archive(packed, "$WHERE/node")
    command = ["bash", str(packed.start), "-c", "import inside"]
    environment = {"PATH": os.defpath, "WHERE": str(tmp_path)}
    (tmp_path / "node").mkdir()
    processes = [subprocess.Popen(command, env=environment) for _ in range(6)]
    assert [process.wait() for process in processes] == [0] * 6
    packed.archive.unlink()  # later starts do not need it
    assert start(packed, "-c", "import inside", WHERE=str(tmp_path)).returncode == 0


def test_damaged_archive_is_refused(tmp_path: Path, venv: Path) -> None:
    packed = staging.venv_archive(tmp_path / "runs", venv, python_path="")
    staging.write_archive(packed, str(tmp_path))
    data = bytearray(packed.archive.read_bytes())
    data[len(data) // 2] ^= 1
    packed.archive.write_bytes(data)
    done = start(packed, "-c", "pass")
    assert (done.returncode, "is damaged" in done.stderr) == (1, True)
    assert not list(tmp_path.glob("headway-*/*/bin"))


def test_folder_of_another_user_is_not_trusted(tmp_path: Path, venv: Path) -> None:
    packed = staging.venv_archive(tmp_path / "runs", venv, python_path="")
    staging.write_archive(packed, str(tmp_path))
    (tmp_path / "other").mkdir()
    (tmp_path / f"headway-{os.getuid()}").symlink_to(tmp_path / "other")
    done = start(packed, "-c", "pass")
    assert (done.returncode, "belongs to another user" in done.stderr) == (1, True)


def test_key_changes_with_packages_and_sources(tmp_path: Path, venv: Path) -> None:
    def key(path: str = "") -> str:
        return staging.venv_archive(tmp_path / "runs", venv, python_path=path).key

    before = key()
    assert key() == before
    (tmp_path / "elsewhere" / "editable.py").write_text("WORD = 'other'\n")
    edited = key()
    (record,) = venv.glob("lib/*/site-packages/*.dist-info/RECORD")
    record.write_text("inside.py,,\nmore.py,,\n")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "m.py").write_text("")
    assert len({before, edited, key(), key(str(tmp_path / "mine"))}) == 4


def test_archive_is_written_once_with_its_digest(tmp_path: Path, venv: Path) -> None:
    packed = staging.venv_archive(tmp_path / "runs", venv, python_path=str(tmp_path / "none"))
    staging.write_archive(packed, "/tmp")
    assert [path for path in (packed.folder, *packed.folder.iterdir()) if path.stat().st_mode & 0o077] == []
    written = packed.archive.stat().st_mtime_ns
    staging.write_archive(packed, "/tmp")
    assert packed.archive.stat().st_mtime_ns == written
    assert packed.digest.read_text().strip() == hashlib.sha256(packed.archive.read_bytes()).hexdigest()
    with tarfile.open(packed.archive) as archive:
        assert {"bin/python", "pyvenv.cfg", "outside/0/editable.py"} <= set(archive.getnames())


def test_only_virtual_environments_can_be_staged(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a virtual environment"):
        staging.venv_archive(tmp_path, tmp_path)


# -- containers


def contained(tmp_path: Path, engine: str = "local", gpus: int = 0, **fields: object) -> tuple[str, ...]:
    settings = EngineSettings(**fields)  # type: ignore[arg-type]
    return code_for(
        settings, engine, tmp_path / "runs", gpus=gpus, data=["/data/set"], snapshot=None, pack=False
    ).command  # fmt: skip


def test_apptainer_binds_the_folders_of_a_run(tmp_path: Path) -> None:
    command = contained(tmp_path, gpus=2, container="docker://org/image:1", mounts=("/scratch", "/a:/b:ro"))
    runs = tmp_path / "runs"
    assert command == (
        "apptainer", "exec", "--nv", "--bind", f"{runs}:{runs}", "--bind", "/data/set:/data/set",
        "--bind", "/scratch:/scratch", "--bind", "/a:/b:ro", "docker://org/image:1", "python",
    )  # fmt: skip
    (tmp_path / "image.sif").touch()
    assert contained(tmp_path, container=str(tmp_path / "image.sif"))[-2:] == (str(tmp_path / "image.sif"), "python")
    assert "--nv" not in contained(tmp_path, container="docker://org/image:1")


def test_pyxis_options_go_to_srun(tmp_path: Path) -> None:
    settings = EngineSettings(container="docker://host#org/image:1", runtime="pyxis", mounts=("/my data:/there",))
    code = code_for(settings, "slurm", tmp_path / "runs", gpus=1, data=[], snapshot=None, pack=False)
    assert code.command == ("python",)
    script = batch_script(LaunchRequest("r", (*code.command, "-V"), tmp_path, site=code.site), tmp_path / "job", None)
    (line,) = [row for row in script.replace("\\\n", " ").splitlines() if row.strip().startswith("srun")]
    arguments = shlex.split(line)
    assert "--container-image=docker://host#org/image:1" in arguments
    assert f"--container-mounts={tmp_path}/runs:{tmp_path}/runs,/my data:/there" in arguments
    assert arguments.index("bash") > arguments.index("--container-image=docker://host#org/image:1")


@pytest.mark.parametrize(
    ("engine", "fields", "message"),
    [
        ("local", {"code": "copied"}, "shared or staged"),
        ("local", {"runtime": "docker", "container": "docker://a"}, "apptainer or pyxis"),
        ("ray", {"runtime": "pyxis", "container": "docker://a"}, "a plugin of Slurm"),
        ("local", {"code": "staged", "container": "docker://a"}, "both staged code and a container"),
        ("local", {"runtime": "apptainer"}, "without a container"),
        ("local", {"mounts": ("/a",)}, "without a container"),
        ("local", {"container": "none.sif"}, "not found"),
        ("local", {"container": "docker://a", "mounts": ("a,b",)}, "mounts has 'a,b'"),
        ("local", {"code": "staged", "stage_to": "$(id)"}, "stage_to"),
        ("local", {"code": "staged", "stage_to": "`id`"}, "stage_to"),
        ("local", {"code": "staged", "stage_to": '"; id; "'}, "stage_to"),
        ("kubernetes", {"container": "docker://a"}, "image"),
    ],
)
def test_contradicting_settings_are_refused(
    tmp_path: Path, engine: str, fields: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError) as error:
        contained(tmp_path, engine, **fields)
    assert message in f"{error.value.message} {error.value.hint}"


# -- where a class comes from


def git(folder: Path, *arguments: str) -> str:
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    done = subprocess.run(["git", "-C", str(folder), *author, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's package in a repository, on PYTHONPATH."""
    package = tmp_path / "repository" / "my_models"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('it was imported')\n")
    (package / "gpt.py").write_text("class GPT: ...\n")
    git(package.parent, "init", "-q")
    git(package.parent, "add", ".")
    git(package.parent, "commit", "-qm", "one")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.syspath_prepend(str(package.parent))
    return package


def recipe_of(name: str) -> Recipe:
    return Recipe(model=Model(class_=name), data=Data(path="d"))


def test_class_in_a_repository_is_recorded_by_commit(tmp_path: Path, package: Path) -> None:
    assert find_package("my_models") == package
    clean = source_version(package)
    assert (clean["commit"], clean["dirty"]) == (git(package, "rev-parse", "HEAD"), False)
    (package / "gpt.py").write_text("class GPT:\n    wide = True\n")
    changed = source_version(package)
    assert (changed["commit"], changed["dirty"]) == (clean["commit"], True)
    assert changed["sha256"] != clean["sha256"]


def test_snapshot_copies_the_package(tmp_path: Path, package: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    folder = record_provenance(run, recipe_of("my_models.gpt:GPT"), copy=True)
    assert folder == run.path / "code"
    assert (folder / "my_models" / "gpt.py").read_text() == "class GPT: ...\n"
    facts = json.loads((run.path / "code.json").read_text())
    assert (facts["package"], facts["snapshot"], facts["dirty"]) == ("my_models", True, False)
    assert facts["sha256"] == source_version(folder / "my_models")["sha256"]
    shared = code_for(EngineSettings(), "local", tmp_path, gpus=0, data=[], snapshot=folder, pack=False)
    assert shared.environment["PYTHONPATH"].split(os.pathsep) == [str(folder), str(package.parent)]


def test_installed_class_is_recorded_by_version(tmp_path: Path) -> None:
    import pydantic

    location = find_package("pydantic")
    assert location is not None
    assert source_version(location)["version"] == pydantic.VERSION


def test_missing_package_fails_only_with_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(tmp_path)
    assert record_provenance(run, recipe_of("nowhere.gpt:GPT"), copy=False) is None
    with pytest.raises(UsageError, match="package nowhere was not found"):
        record_provenance(run, recipe_of("nowhere.gpt:GPT"), copy=True)
    (tmp_path / "stray_module.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert find_package("stray_module") is None  # workers do not import from the current folder
