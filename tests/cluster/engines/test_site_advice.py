"""Advice on the configuration of a real Slurm, and a template that a real Slurm accepts."""

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


def run_cli(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["headway", *arguments])
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def test_doctor_reports_what_a_real_slurm_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    with slurm_cluster(tmp_path):
        assert run_cli(monkeypatch, "doctor", "--engine", "slurm") == 0
        lines = capsys.readouterr().out.splitlines()
        document, _ = look_at_engine("slurm")
    good = {advice["key"]: advice["good"] for advice in document["advice"]}
    assert good["SlurmctldParameters"]
    assert not good["RequeueExit"]
    assert not good["AccountingStorageType"]
    assert not good["KillWait"]
    assert "partition short" in good
    assert any("RequeueExit = not set" in line for line in lines)
    assert max(map(len, lines)) <= 80


def test_real_slurm_accepts_the_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the paths, the user and the ports of this machine; `scontrol show config` shows what it understood."""
    site, host = tmp_path / "site", socket.gethostname()
    assert (
        run_cli(monkeypatch, "cluster", "slurm-template", str(site), "--controller", host, "--nodes", "node[1-4]") == 0
    )
    assert run_cli(monkeypatch, "cluster", "slurm-template", str(site)) == 2
    (tmp_path / "slurm").mkdir()
    cluster = start_cluster(tmp_path / "slurm")  # its munged serves both
    try:
        conf = effective_configuration(site, tmp_path)
    finally:
        stop_cluster(cluster)
    good = {advice.key: advice.good for advice in advise(conf, {})}
    assert [key for key, is_good in good.items() if not is_good] == ["AccountingStorageType"]
    for script in ("prolog.sh", "epilog.sh"):
        assert subprocess.run(["bash", "-n", str(site / script)]).returncode == 0
        assert subprocess.run([str(site / script)], env={"PATH": "/usr/bin:/bin"}).returncode == 0


def effective_configuration(site: Path, folder: Path) -> dict[str, str]:
    """The configuration of a slurmctld that was started with the template."""
    for name in ("var/spool/slurmctld", "var/spool/slurmd", "var/run", "var/log"):
        (folder / name).mkdir(parents=True)
    options = {"user": "root", "var": str(folder / "var"), "cpus": 64, "memory_mb": 512000, "gpus": 8}
    text = slurm_template(socket.gethostname(), "node[1-4]", **options)["slurm.conf"]
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


def test_doctor_refuses_other_engines_and_foreign_output(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="nothing to check for engine local"):
        look_at_engine("local")
    with pytest.raises(EngineError, match="SLURM_VERSION"):
        parse_configuration(json.dumps({"slurm": 1}))
