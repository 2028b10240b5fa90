"""How code gets to machines: what is packed, what is started, and what cannot be."""

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
from headway.cluster.submit.provenance import find_package, record_provenance, source_version
from headway.errors import UsageError
from headway.recipe import Data, Model, Recipe
from headway.track import RunFolder


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """A virtual environment with one package in it, and one outside that it is led to."""
    made = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(made)], check=True)
    (site,) = made.glob("lib/python*/site-packages")
    (site / "inside.py").write_text("WORD = 'inside'\n")
    (site / "inside-1.0.dist-info").mkdir()
    (site / "inside-1.0.dist-info" / "RECORD").write_text("inside.py,,\n")
    outside = tmp_path / "elsewhere"
    outside.mkdir()
    (outside / "editable.py").write_text("WORD = 'editable'\n")
    (site / "editable.pth").write_text(f"{outside}\n")
    return made


def start(packed: staging.VenvArchive, *words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    environment = {"PATH": os.defpath, **variables}
    return subprocess.run(["bash", str(packed.start), *words], env=environment, capture_output=True, text=True)


ASK = "import sys, inside, editable; print(sys.prefix, inside.__file__, editable.__file__)"


def test_a_staged_environment_works_without_the_one_it_was_made_of(tmp_path: Path, venv: Path) -> None:
    packed = staging.venv_archive(tmp_path / "runs", venv, python_path="")
    staging.write_archive(packed, str(tmp_path / "node"))
    venv.rename(tmp_path / "moved")
    (tmp_path / "elsewhere").rename(tmp_path / "moved-too")
    (tmp_path / "node").mkdir()
    done = start(packed, "-c", ASK)
    assert done.returncode == 0, done.stderr
    own = tmp_path / "node" / f"headway-{os.getuid()}" / packed.key
    assert [Path(word).is_relative_to(own) for word in done.stdout.split()] == [True, True, True]


def test_it_is_unpacked_once_by_many_at_a_time(tmp_path: Path, venv: Path) -> None:
    packed = staging.venv_archive(tmp_path / "runs", venv, python_path="")
    staging.write_archive(packed, "$WHERE/node")
    words = ["bash", str(packed.start), "-c", "import inside"]
    environment = {"PATH": os.defpath, "WHERE": str(tmp_path)}
    (tmp_path / "node").mkdir()
    together = [subprocess.Popen(words, env=environment) for _ in range(6)]
    assert [one.wait() for one in together] == [0] * 6
    packed.archive.unlink()  # whoever comes later needs it no more
    assert start(packed, "-c", "import inside", WHERE=str(tmp_path)).returncode == 0


def test_a_damaged_archive_is_refused(tmp_path: Path, venv: Path) -> None:
    packed = staging.venv_archive(tmp_path / "runs", venv, python_path="")
    staging.write_archive(packed, str(tmp_path))
    data = bytearray(packed.archive.read_bytes())
    data[len(data) // 2] ^= 1
    packed.archive.write_bytes(data)
    done = start(packed, "-c", "pass")
    assert (done.returncode, "is damaged" in done.stderr) == (1, True)
    assert not list(tmp_path.glob("headway-*/*/bin"))


def test_somebody_elses_folder_is_not_trusted(tmp_path: Path, venv: Path) -> None:
    packed = staging.venv_archive(tmp_path / "runs", venv, python_path="")
    staging.write_archive(packed, str(tmp_path))
    (tmp_path / "theirs").mkdir()
    (tmp_path / f"headway-{os.getuid()}").symlink_to(tmp_path / "theirs")
    done = start(packed, "-c", "pass")
    assert (done.returncode, "somebody else's" in done.stderr) == (1, True)


def test_the_key_changes_with_what_is_installed_or_written(tmp_path: Path, venv: Path) -> None:
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


def test_it_is_packed_once_and_its_digest_is_right(tmp_path: Path, venv: Path) -> None:
    packed = staging.venv_archive(tmp_path / "runs", venv, python_path=str(tmp_path / "none"))
    staging.write_archive(packed, "/tmp")
    written = packed.archive.stat().st_mtime_ns
    staging.write_archive(packed, "/tmp")
    assert packed.archive.stat().st_mtime_ns == written
    assert packed.digest.read_text().strip() == hashlib.sha256(packed.archive.read_bytes()).hexdigest()
    with tarfile.open(packed.archive) as archive:
        assert {"bin/python", "pyvenv.cfg", "outside/0/editable.py"} <= set(archive.getnames())


def test_what_is_no_environment_cannot_be_staged(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no virtual environment"):
        staging.venv_archive(tmp_path, tmp_path)


# -- containers


def contained(tmp_path: Path, engine: str = "local", gpus: int = 0, **fields: object) -> tuple[str, ...]:
    settings = EngineSettings(**fields)  # type: ignore[arg-type]
    return code_for(
        settings, engine, tmp_path / "runs", gpus=gpus, data=["/data/set"], snapshot=None, pack=False
    ).words  # fmt: skip


def test_apptainer_is_given_the_folders_that_a_run_needs(tmp_path: Path) -> None:
    words = contained(tmp_path, gpus=2, container="docker://org/image:1", mounts=("/scratch", "/a:/b:ro"))
    runs = tmp_path / "runs"
    assert words == (
        "apptainer", "exec", "--nv", "--bind", f"{runs}:{runs}", "--bind", "/data/set:/data/set",
        "--bind", "/scratch:/scratch", "--bind", "/a:/b:ro", "docker://org/image:1", "python",
    )  # fmt: skip
    (tmp_path / "image.sif").touch()
    assert contained(tmp_path, container=str(tmp_path / "image.sif"))[-2:] == (str(tmp_path / "image.sif"), "python")
    assert "--nv" not in contained(tmp_path, container="docker://org/image:1")


def test_pyxis_is_told_by_srun(tmp_path: Path) -> None:
    settings = EngineSettings(container="docker://host#org/image:1", runtime="pyxis", mounts=("/my data:/there",))
    code = code_for(settings, "slurm", tmp_path / "runs", gpus=1, data=[], snapshot=None, pack=False)
    assert code.words == ("python",)
    script = batch_script(LaunchRequest("r", (*code.words, "-V"), tmp_path, site=code.site), tmp_path / "job", None)
    (line,) = [one for one in script.replace("\\\n", " ").splitlines() if one.strip().startswith("srun")]
    words = shlex.split(line)
    assert "--container-image=docker://host#org/image:1" in words
    assert f"--container-mounts={tmp_path}/runs:{tmp_path}/runs,/my data:/there" in words
    assert words.index("bash") > words.index("--container-image=docker://host#org/image:1")


@pytest.mark.parametrize(
    ("engine", "fields", "told"),
    [
        ("local", {"code": "copied"}, "shared or staged"),
        ("local", {"runtime": "docker", "container": "docker://a"}, "apptainer or pyxis"),
        ("ray", {"runtime": "pyxis", "container": "docker://a"}, "a part of Slurm"),
        ("local", {"code": "staged", "container": "docker://a"}, "in the one or in the other"),
        ("local", {"runtime": "apptainer"}, "no container"),
        ("local", {"mounts": ("/a",)}, "no container"),
        ("local", {"container": "none.sif"}, "no container image"),
        ("local", {"container": "docker://a", "mounts": ("a,b",)}, "mounts has 'a,b'"),
        ("local", {"code": "staged", "stage_to": "$(id)"}, "stage_to"),
        ("local", {"code": "staged", "stage_to": "`id`"}, "stage_to"),
        ("local", {"code": "staged", "stage_to": '"; id; "'}, "stage_to"),
        ("kubernetes", {"container": "docker://a"}, "image"),
    ],
)
def test_what_does_not_go_together(tmp_path: Path, engine: str, fields: dict[str, object], told: str) -> None:
    with pytest.raises(UsageError) as error:
        contained(tmp_path, engine, **fields)
    assert told in f"{error.value.message} {error.value.hint}"


# -- where a class comes from


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    done = subprocess.run(["git", "-C", str(folder), *who, *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of the user's own in a repository, on PYTHONPATH."""
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


def test_a_class_in_a_repository_is_known_by_its_commit(tmp_path: Path, mine: Path) -> None:
    assert find_package("my_models") == mine
    clean = source_version(mine)
    assert (clean["commit"], clean["dirty"]) == (git(mine, "rev-parse", "HEAD"), False)
    (mine / "gpt.py").write_text("class GPT:\n    wide = True\n")
    changed = source_version(mine)
    assert (changed["commit"], changed["dirty"]) == (clean["commit"], True)
    assert changed["sha256"] != clean["sha256"]


def test_a_snapshot_has_what_was_there(tmp_path: Path, mine: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    folder = record_provenance(run, recipe_of("my_models.gpt:GPT"), copy=True)
    assert folder == run.path / "code"
    assert (folder / "my_models" / "gpt.py").read_text() == "class GPT: ...\n"
    facts = json.loads((run.path / "code.json").read_text())
    assert (facts["package"], facts["snapshot"], facts["dirty"]) == ("my_models", True, False)
    assert facts["sha256"] == source_version(folder / "my_models")["sha256"]
    shared = code_for(EngineSettings(), "local", tmp_path, gpus=0, data=[], snapshot=folder, pack=False)
    assert shared.environment["PYTHONPATH"].split(os.pathsep) == [str(folder), str(mine.parent)]


def test_an_installed_class_is_known_by_its_version(tmp_path: Path) -> None:
    import pydantic

    found = find_package("pydantic")
    assert found is not None
    assert source_version(found)["version"] == pydantic.VERSION


def test_one_that_is_not_here_is_perhaps_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(tmp_path)
    assert record_provenance(run, recipe_of("nowhere.gpt:GPT"), copy=False) is None
    with pytest.raises(UsageError, match="no package nowhere"):
        record_provenance(run, recipe_of("nowhere.gpt:GPT"), copy=True)
    (tmp_path / "lies_about.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert find_package("lies_about") is None  # workers do not look into the folder that one happens to be in
