"""A sweep on a real Ray cluster without a shared folder: each task fetches its run from the store, wherever it lands,
and the table equals that of the same runs on this machine."""

import json
from pathlib import Path

import pytest
from engine_runs import ONE_CORE, demo, train_uninterrupted
from ray_cluster import ray_cluster

from conftest import Lived
from headway.cluster.submit.grid import parse_grid
from headway.cluster.submit.sweep_request import request_sweep
from headway.cluster.submit.sweep_results import wait_for_sweep
from headway.cluster.submit.sweep_start import start_sweep
from headway.cluster.submit.sweep_sync import SweepSync
from headway.hardware import parse_on
from headway.recipe import to_toml
from headway.track import RunFolder, summarize

OWN = 'export TMPDIR={}/$HEADWAY_MACHINES; mkdir -p "$TMPDIR"'


@pytest.mark.slow
def test_array_tasks_get_their_runs_from_the_store(tmp_path: Path, dataset: Path, monkeypatch) -> None:
    monkeypatch.delenv("HEADWAY_RUNS", raising=False)
    monkeypatch.setenv("HEADWAY_ENGINES", str(tmp_path / "engines.toml"))
    (tmp_path / "store").mkdir()
    stored = {"checkpoint__store__url": f"file://{tmp_path}/store", "checkpoint__store__every_steps": 40}
    (tmp_path / "r.toml").write_text(to_toml(demo(dataset, **stored)))
    with ray_cluster() as cluster:
        setup = json.dumps([OWN.format(tmp_path / "machines"), ONE_CORE])
        (tmp_path / "engines.toml").write_text(
            f'[ray]\nshared = false\naddress = "{cluster.address}"\nsetup = {setup}\n'
        )
        axes = parse_grid(["seed=1,2"], [])
        wanted = request_sweep(tmp_path / "r.toml", [], axes, engine="ray", on=parse_on("cpux2"), name="s")
        sweep, _ = start_sweep(wanted, tmp_path / "runs")
        records = SweepSync(tmp_path / "runs", sweep)
        rows = wait_for_sweep(tmp_path / "runs", sweep, records, lambda _: None)
    assert {row.state for row in rows} == {"finished"}, rows
    assert records.trouble == ""
    ran = sorted(path.name for path in (tmp_path / "machines").glob("*/headway-*/runs/*"))
    assert ran == ["s-seed_1", "s-seed_2"]
    for row in rows:
        recipe = demo(dataset, seed=int(row.settings["seed"]), **(stored | {"name": f"alone-{row.run}"}))
        uninterrupted = train_uninterrupted(recipe, tmp_path / "alone", workers=1)
        swept = Lived(RunFolder(tmp_path / "runs" / row.run), None)
        assert (swept.chain, swept.digest) == (uninterrupted.chain, uninterrupted.digest)
        assert row.loss == summarize(uninterrupted.run).loss
