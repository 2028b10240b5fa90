import pytest

from headway.agent.recover import Recovery, Situation, recover

WHAT = "worker 1 was killed by signal 9 (SIGKILL)"


def situation(cause="died", left=3, memory=None, disk=(), store=(), start=True):
    return Situation(cause, WHAT, left, memory, tuple(disk), tuple(store), start)


STOP = ("stop", "start", 0)
START = ("restart", "start", 0)

TABLE = [
    # a worker died: the newest state there is, the nearest among equals
    ("nothing saved yet", situation(), START),
    ("nothing saved, and no beginning to go back to", situation(start=False), STOP),
    ("memory only", situation(memory=40), ("restart", "memory", 40)),
    ("the state of step 0 in memory", situation(memory=0), ("restart", "memory", 0)),
    ("disk only", situation(disk=[10, 30, 20]), ("restart", "disk", 30)),
    ("store only", situation(store=[10, 20]), ("restart", "store", 20)),
    ("memory is newest", situation(memory=40, disk=[30], store=[20]), ("restart", "memory", 40)),
    ("memory and disk are the same", situation(memory=40, disk=[30, 40]), ("restart", "memory", 40)),
    ("all are the same", situation(memory=40, disk=[40], store=[40]), ("restart", "memory", 40)),
    ("disk is newer than memory", situation(memory=20, disk=[10, 30], store=[20]), ("restart", "disk", 30)),
    ("disk and store are the same", situation(disk=[30], store=[30]), ("restart", "disk", 30)),
    ("store is newest", situation(memory=20, disk=[30], store=[40]), ("restart", "store", 40)),
    ("store is newer than memory", situation(memory=20, store=[40]), ("restart", "store", 40)),
    ("memory without a beginning", situation(memory=5, start=False), ("restart", "memory", 5)),
    ("the last restart", situation(left=1, disk=[30]), ("restart", "disk", 30)),
    ("no restart left", situation(left=0, memory=40, disk=[30], store=[20]), STOP),
    ("less than none", situation(left=-1, disk=[30]), STOP),
    ("no restart left and nothing saved", situation(left=0), STOP),
    # the state it went on from was damaged: the one before it, however often that happens
    ("damaged, one before it", situation("damaged", disk=[10, 20]), ("restart", "disk", 20)),
    ("damaged, no restart left", situation("damaged", left=0, disk=[10]), ("restart", "disk", 10)),
    ("damaged, memory has one", situation("damaged", memory=30, disk=[10]), ("restart", "memory", 30)),
    ("damaged, the store has one", situation("damaged", store=[10]), ("restart", "store", 10)),
    ("damaged, and it was the only one", situation("damaged"), START),
    ("damaged, and it was all there was", situation("damaged", start=False), STOP),
    # an error of the code comes again
    ("an error", situation("other", memory=40, disk=[30], store=[20]), STOP),
    ("an error at once", situation("other"), STOP),
    ("an error, no restart left", situation("other", left=0, disk=[30]), STOP),
]


@pytest.mark.parametrize(("given", "want"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_the_way_on(given, want):
    found = recover(given)
    assert (found.action, found.source, found.step) == want
    assert found.reason.startswith(WHAT)
    if found.action == "restart" and found.source != "start":
        assert f"step {found.step}, from " in found.reason
        assert found.source in found.reason


def test_the_reasons_in_words():
    assert recover(situation(memory=40)).reason == f"{WHAT}; back to step 40, from memory"
    assert recover(situation(store=[7])).reason == f"{WHAT}; back to step 7, from the object store"
    assert recover(situation()).reason == f"{WHAT}; nothing was saved since, back to the beginning"
    assert recover(situation(left=0)).reason == f"{WHAT}, and again without any progress"
    assert recover(situation("other")).reason == f"{WHAT}: starting again would not mend it"
    assert recover(situation("damaged", start=False)) == Recovery(
        "stop", "start", 0, f"{WHAT}, and no state is left to go on from"
    )
