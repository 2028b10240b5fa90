"""Jobs on a node: as their tenant's user, in control groups, with a folder of their own."""

import json
import os
import pwd
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

pytest.importorskip("sqlalchemy")

from eventually import eventually
from headway.cluster.engines import LaunchRequest
from headway.cluster.engines.engine import read_exit_report
from headway.cluster.engines.submissions import request_to_json
from headway.cluster.service.cgroups import Cgroups, find_cgroups
from headway.cluster.service.host_starts import HostStarts
from headway.cluster.service.isolation import Isolation, isolation_of, remove_scratch
from headway.cluster.service.messages import NodeOrders, WantedStart
from headway.cluster.service.node import ClusterNode
from headway.cluster.service.node_agent import NodeSettings, join_cluster, run_node
from headway.cluster.service.outcome import RankResult
from headway.errors import EngineUnreachable, UsageError

RED, BLUE = "daemon", "nobody"
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="running jobs as other users needs root")


def hierarchy(root: Path, version: int) -> Path:
    """A folder that looks like that of control groups."""
    if version == 2:
        (root / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
        (root / "cgroup.subtree_control").touch()
    else:
        for controller in ("cpu", "memory", "pids"):
            (root / controller).mkdir()
    return root


@pytest.mark.parametrize("version", [1, 2])
def test_limits_are_written_where_the_version_has_them(tmp_path: Path, version: int) -> None:
    groups = find_cgroups(Path("/node"), hierarchy(tmp_path, version))
    assert groups is not None
    assert groups.version == version
    entries = groups.create("1:1:0", 2.0, 2**30)
    assert len(entries) == (1 if version == 2 else 3)
    written = {
        path.name: path.read_text() for folder in set(groups.folders.values()) for path in folder.glob("1:1:0/*")
    }
    if version == 2:
        assert written == {"cpu.max": "200000 100000", "memory.max": str(2**30), "pids.max": "16384"}
    else:
        assert written == {"cpu.cfs_quota_us": "200000", "memory.limit_in_bytes": str(2**30), "pids.max": "16384"}
    assert groups.kill("1:1:0")


def test_machine_without_control_groups_has_none(tmp_path: Path) -> None:
    assert find_cgroups(Path("/node"), tmp_path) is None
    (tmp_path / "cgroup.controllers").write_text("cpu\n")
    assert find_cgroups(Path("/node"), tmp_path) is None


def test_node_runs_only_jobs_of_its_tenants(tmp_path: Path) -> None:
    node = ClusterNode("m1", HostStarts(tmp_path / "node", isolation=Isolation(("red",))))
    request = LaunchRequest("job", ("touch", str(tmp_path / "ran")), tmp_path)
    start = WantedStart("1:1:0", "run", (), 0, ("m1",), 1, None, request_to_json(request), tenant="blue")
    node.obey(NodeOrders(1, "c", (start,)))
    (report,) = node.report().starts
    assert report.result == RankResult(error="this node runs jobs of red only, not of blue")
    assert not (tmp_path / "ran").exists()


def test_job_can_put_its_scratch_folder_into_lists_of_paths(tmp_path: Path) -> None:
    script = (
        'mkdir "$HEADWAY_SCRATCH/bin"; printf "#!/bin/sh\\necho mine" >"$HEADWAY_SCRATCH/bin/own-tool"; '
        'chmod +x "$HEADWAY_SCRATCH/bin/own-tool"; PATH="$HEADWAY_SCRATCH/bin:$PATH" own-tool'
    )
    starts = HostStarts(tmp_path / "node")
    request = LaunchRequest("job", ("bash", "-c", script), tmp_path)
    starts.begin(WantedStart("20_3:1:0", "run", (), 0, ("m1",), 1, 3, request_to_json(request)))
    eventually(lambda: starts.report()[0].state == "exited")
    assert [path.read_text() for path in tmp_path.glob("jobs/*/*/*.log")] == ["mine\n"]


def test_start_in_a_folder_named_by_its_key_is_still_found_and_forgotten(tmp_path: Path) -> None:
    folders = [tmp_path / kind / "1:1:0" for kind in ("starts", "scratch", "secrets")]
    for folder in folders:
        folder.mkdir(parents=True)
    fields = {"key": "1:1:0", "boot": "an earlier one", "began": 0.0, "limit_s": None, "grace_s": 1.0, "folder": None}
    (folders[0] / "start.json").write_text(json.dumps(fields))
    starts = HostStarts(tmp_path)
    (report,) = starts.report()
    assert report.result is not None
    assert (report.key, report.result.lost) == ("1:1:0", True)
    starts.forget("1:1:0")
    assert not any(folder.exists() for folder in folders)


@pytest.mark.parametrize(
    ("tenants", "users", "sentence"),
    [
        (["red", "blue"], {}, "jobs of one tenant only"),
        (["red"], {"red": "no-such-user"}, "no Unix user 'no-such-user'|only root"),
        (["red"], {"red": "root"}, "would run jobs as root|only root"),
    ],
)
def test_node_that_cannot_keep_tenants_apart_is_refused(
    tmp_path: Path, tenants: list[str], users: dict[str, str], sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence):
        isolation_of(tmp_path, tenants, users)


@pytest.mark.parametrize("uid", [0, 1000])
def test_jobs_run_as_root_only_if_root_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int) -> None:
    monkeypatch.setattr("headway.cluster.service.isolation.find_cgroups", lambda folder: None)
    monkeypatch.setattr("os.geteuid", lambda: uid)
    settings = NodeSettings("https://127.0.0.1:1", "m1", "0" * 64, {"name": "m1"})
    accepted = (EngineUnreachable, "does not answer")
    refusal, words = (UsageError, "would run as root") if uid == 0 else accepted
    with pytest.raises(refusal, match=words):  # before its token is used
        join_cluster(tmp_path / "a", settings, "t" * 20)
    with pytest.raises(accepted[0], match=accepted[1]):
        join_cluster(tmp_path / "b", replace(settings, jobs_as_root=True), "t" * 20)


def test_agent_of_root_that_joined_before_is_refused_without_the_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    fields = {"url": "https://127.0.0.1:1", "name": "m1", "fingerprint": None, "spec": {"tenants": ["red"]}}
    (tmp_path / "node.json").write_text(json.dumps({"format": 1, "users": {}} | fields))
    with pytest.raises(UsageError, match="would run as root") as refused:
        run_node(tmp_path)
    assert "--jobs-as-root" in (refused.value.hint or "")


def test_report_of_a_job_is_read_from_a_plain_file_only(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("75\nnode-1\n")
    assert read_exit_report(plain) == (75, ("node-1",))
    (tmp_path / "link").symlink_to(plain)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "bytes").write_bytes(b"\xff")
    for name in ("link", "pipe", "bytes", "none", "."):
        assert read_exit_report(tmp_path / name) is None


def test_scratch_is_removed_without_following_links(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "link").symlink_to(tmp_path / "kept")
    remove_scratch(tmp_path / "scratch")
    assert (tmp_path / "kept" / "file").exists()
    assert not (tmp_path / "scratch").exists()


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that other users reach."""
    folder = Path(tempfile.mkdtemp(prefix="headway-isolation-"))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def starts(place: Path) -> HostStarts:
    (place / "node").mkdir(mode=0o711)
    users = {"red": RED, "blue": BLUE}
    groups = find_cgroups(place / "node")
    if groups is None or shutil.which("setpriv") is None:
        pytest.skip("needs control groups and setpriv")
    return HostStarts(place / "node", isolation=Isolation(tuple(users), users, groups))


def run(
    starts: HostStarts, place: Path, tenant: str, key: str, script: str, **options: object
) -> tuple[RankResult, str]:
    """Run a job to its end, and return how it ended and what it printed."""
    user = pwd.getpwnam({"red": RED, "blue": BLUE}[tenant])
    folder = place / f"{tenant}-{key[0]}"
    folder.mkdir(exist_ok=True)
    os.chown(folder, user.pw_uid, user.pw_gid)
    folder.chmod(0o700)
    request = LaunchRequest("job", ("bash", "-c", script), folder, **options)  # type: ignore[arg-type]
    wanted = WantedStart(key, "run", ("a",), 0, ("m1", "m2"), 1, None, request_to_json(request), tenant=tenant)
    starts.begin(wanted)
    eventually(lambda: next(start for start in starts.report() if start.key == key).state == "exited")
    result = next(start.result for start in starts.report() if start.key == key)
    assert result is not None
    logs = list((folder / "jobs").glob("*/*.log")) if not (folder / "jobs").is_symlink() else []
    return result, "".join(path.read_text() for path in logs)


@ROOT
@pytest.mark.slow
def test_job_runs_as_its_tenant_s_user_and_sees_no_other(starts: HostStarts, place: Path) -> None:
    script = 'id -un; id -G; echo "$HOME"; umask; touch "$HEADWAY_SCRATCH/mine"; echo 75 >"$HEADWAY_END"; exit 75'
    result, printed = run(starts, place, "red", "1:1:0", script)
    user = pwd.getpwnam(RED)
    assert (result.status, result.reported) == (75, 75)
    assert printed.split("\n")[:3] == [RED, str(user.pw_gid), user.pw_dir]
    scratch = place / "node" / "scratch" / "1-1-0"
    assert (scratch / "mine").stat().st_uid == user.pw_uid
    log = place / "red-1" / "jobs" / "1" / "0001-0.log"
    peek = f"ls {scratch}; ls {place}/node/starts; ls {place}/red-1; cat {log}; kill -0 {os.getpid()}"
    result, printed = run(starts, place, "blue", "2:1:0", peek)
    assert (result.status, printed.count("ermission denied") + printed.count("not permitted")) == (1, 5), printed
    starts.forget("1:1:0")
    assert not scratch.exists()


@ROOT
@pytest.mark.slow
def test_links_of_a_job_lead_nothing_of_root_elsewhere(starts: HostStarts, place: Path) -> None:
    """Its log and its report are where it can put links to what it may not read or write."""
    secret = place / "secret"
    secret.mkdir(mode=0o700)
    (secret / "status").write_text("42\n")
    folder = place / "red-1"
    folder.mkdir()
    (folder / "jobs").symlink_to(secret)
    result, _ = run(starts, place, "red", "1:1:0", "true")
    assert result.status == 1
    assert [path.name for path in secret.iterdir()] == ["status"]
    (folder / "jobs").unlink()
    result, _ = run(starts, place, "red", "1:2:0", f'ln -s {secret}/status "$HEADWAY_END"')
    assert (result.status, result.reported) == (0, None)


@ROOT
@pytest.mark.slow
def test_job_without_its_folder_runs_in_its_scratch_and_cannot_reach_its_log(starts: HostStarts, place: Path) -> None:
    script = "id -un; pwd; ls logs ../../logs; echo forged >../../logs/1-1-0.log"
    request = LaunchRequest("job", ("bash", "-c", script), place / "elsewhere")
    starts.begin(WantedStart("1:1:0", "run", (), 0, ("m1",), 1, None, request_to_json(request), tenant="red"))
    eventually(lambda: starts.report()[0].state == "exited")
    with starts.logs.open("1:1:0") as log:
        lines = log.read().decode().splitlines()
    assert lines[:2] == [RED, str(place / "node" / "scratch" / "1-1-0")]
    assert sum("ermission denied" in line for line in lines) == 2, lines
    assert "forged" not in lines
    assert not (place / "elsewhere").exists()
    starts.forget("1:1:0")
    starts.logs.open("1:1:0").close()


@ROOT
@pytest.mark.slow
def test_control_group_limits_memory_and_leaves_nothing_behind(starts: HostStarts, place: Path) -> None:
    script = 'setsid sleep 1000 & echo $! >"$HEADWAY_SCRATCH/pid"; head -c 200000000 /dev/zero | tail | wc -c'
    result, printed = run(starts, place, "red", "1:1:0", f"set -o pipefail; {script}", memory_bytes=64 * 2**20)
    assert result.status != 0, printed
    pid = int((place / "node" / "scratch" / "1-1-0" / "pid").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    groups = starts._isolation.cgroups
    assert isinstance(groups, Cgroups)
    starts.forget("1:1:0")
    assert not any((folder / "1-1-0").exists() for folder in groups.folders.values())
    for folder in set(groups.folders.values()):
        folder.rmdir()


@ROOT
@pytest.mark.slow
def test_multi_tenant_node_without_control_groups_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.cluster.service.isolation.find_cgroups", lambda folder: None)
    assert isolation_of(place, ["red"], {"red": RED}).cgroups is None
    with pytest.raises(UsageError, match="no control groups"):
        isolation_of(place, ["red", "blue"], {"red": RED, "blue": BLUE})
    as_root = isolation_of(place, ["red"], {}, jobs_as_root=True)
    assert replace(as_root, cgroups=None) == Isolation(("red",))
