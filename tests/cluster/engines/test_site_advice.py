"""What a site's Slurm lacks, asked of a real one; and a template that a real one accepts."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from slurm_cluster import slurm_cluster, start_cluster, stop_cluster

from headway.cli.doctor_engine import look_at_engine
from headway.cli.main import main
from headway.cluster.engines.slurm.site_advice import advise, parse_configuration, slurm_template
from headway.errors import EngineError, UsageError


def type_(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["headway", *words])
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def test_what_a_real_slurm_has_and_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    with slurm_cluster(tmp_path):
        assert type_(monkeypatch, "doctor", "--engine", "slurm") == 0
        lines = capsys.readouterr().out.splitlines()
        document, _ = look_at_engine("slurm")
    good = {one["key"]: one["good"] for one in document["advice"]}
    assert good["SlurmctldParameters"]
    assert not good["RequeueExit"]
    assert not good["AccountingStorageType"]
    assert not good["KillWait"]
    assert "partition short" in good
    assert any("RequeueExit = (null)" in line for line in lines)
    assert max(map(len, lines)) <= 80


def test_a_real_slurm_accepts_the_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the paths, the user and the ports of this machine; `scontrol show config` tells what it has understood."""
    site, host = tmp_path / "site", socket.gethostname()
    assert type_(monkeypatch, "cluster", "slurm-template", str(site), "--controller", host, "--nodes", "node[1-4]") == 0
    assert type_(monkeypatch, "cluster", "slurm-template", str(site)) == 2
    (tmp_path / "slurm").mkdir()
    cluster = start_cluster(tmp_path / "slurm")  # its munged serves both
    try:
        conf = understood(site, tmp_path)
    finally:
        stop_cluster(cluster)
    told = {one.key: one.good for one in advise(conf, {})}
    assert [key for key, good in told.items() if not good] == ["AccountingStorageType"]
    for script in ("prolog.sh", "epilog.sh"):
        assert subprocess.run(["bash", "-n", str(site / script)]).returncode == 0
        assert subprocess.run([str(site / script)], env={"PATH": "/usr/bin:/bin"}).returncode == 0


def understood(site: Path, folder: Path) -> dict[str, str]:
    """What a slurmctld says that was started with the template."""
    for name in ("var/spool/slurmctld", "var/spool/slurmd", "var/run", "var/log"):
        (folder / name).mkdir(parents=True)
    here = {"user": "root", "var": str(folder / "var"), "cpus": 64, "memory_mb": 512000, "gpus": 8}
    text = slurm_template(socket.gethostname(), "node[1-4]", **here)["slurm.conf"]
    written = (site / "slurm.conf").read_text()
    assert re.sub(r"/\S*/var/", "/var/", text).replace("=root", "=slurm") == written
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    conf = site / "slurm.conf"
    text = text.replace("NodeName=node[1-4] ", "NodeName=node[1-4] NodeAddr=127.0.0.[1-4] ")
    conf.write_text(f"{text}SlurmctldPort={port}\nAuthInfo=socket={folder}/slurm/munge.sock\n")
    environment = os.environ | {"SLURM_CONF": str(conf)}
    daemon = subprocess.Popen(["slurmctld", "-D", "-f", str(conf)], env=environment, stderr=subprocess.PIPE, text=True)
    try:
        command = ["scontrol", "show", "config"]
        for _ in range(100):
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.returncode == 0 or daemon.poll() is not None:
                break
        assert done.returncode == 0, done.stderr
        nodes = subprocess.run(["sinfo", "-h", "-o", "%P %D %G"], env=environment, capture_output=True, text=True)
        assert set(nodes.stdout.split("\n")) == {"batch* 4 gpu:8", "urgent 4 gpu:8", ""}
    finally:
        daemon.kill()
        daemon.communicate()
    return parse_configuration(done.stdout)


def test_other_engines_and_other_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="nothing to look at in local"):
        look_at_engine("local")
    with pytest.raises(EngineError, match="SLURM_VERSION"):
        parse_configuration(json.dumps({"slurm": 1}))
