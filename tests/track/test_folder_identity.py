"""Which folder is at a run's path: against folders that are really renamed, copied and replaced."""

import shutil
from dataclasses import replace

import pytest

from headway.track import create_run, lock_run
from headway.track.folder_identity import FolderIdentity, compare_folders, identify, open_identity


@pytest.fixture
def run(tmp_path):
    return create_run(tmp_path, "r", "r")


def test_renamed_folder_is_gone_and_the_same_one_when_it_is_back(run):
    opened = open_identity(run)
    assert compare_folders(opened, identify(run)) == "here"
    away = run.path.rename(run.path.with_name("away"))
    assert (identify(run), compare_folders(opened, identify(run))) == (None, "gone")
    away.rename(run.path)
    assert compare_folders(opened, identify(run)) == "here"


def test_bare_mount_point_and_copy_are_other_folders_and_left_as_they_are(run):
    opened = open_identity(run)
    away = run.path.rename(run.path.with_name("away"))
    run.path.mkdir()
    assert compare_folders(opened, identify(run)) == "replaced"
    assert list(run.path.iterdir()) == []
    run.path.rmdir()
    shutil.copytree(away, run.path)
    assert identify(run).run == opened.run
    assert compare_folders(opened, identify(run)) == "replaced"


@pytest.mark.parametrize(
    ("changed", "state"),
    [
        ({}, "here"),
        ({"run": ""}, "here"),  # the id cannot be read, but no other folder has this inode on this device
        ({"device": 2}, "remounted"),
        ({"device": 2, "run": ""}, "replaced"),
        ({"device": 2, "run": "other"}, "replaced"),
        ({"inode": 8}, "replaced"),
        ({"device": 2, "inode": 8}, "replaced"),
    ],
)
def test_device_inode_and_id_decide(changed, state):
    opened = FolderIdentity(1, 7, "id")
    assert compare_folders(opened, replace(opened, **changed)) == state


def test_lock_is_taken_again_unless_another_process_has_it(run):
    with lock_run(run) as lock:
        held = run.lock_file.rename(run.path / "old-lock")  # as in a folder that was mounted again: another open file
        assert not lock.renew()  # and nothing is created
        assert not run.lock_file.exists()
        run.lock_file.write_text("")
        with lock_run(run):
            assert not lock.renew()
        assert lock.renew()
        assert held.exists()
