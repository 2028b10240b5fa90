"""Logs of jobs: good files as they are meant, and of bad ones the line."""

import gzip
import math
from pathlib import Path

import numpy as np
import pytest

from headway.cluster.simulate import JobTrace, read_trace
from headway.errors import UsageError

HEAD = "job_id,submit_s,duration_s,num_gpus"
GOOD = f"{HEAD}\na,0,100,8\nb,5,50.5,1\n"


@pytest.fixture
def written(tmp_path):
    def write(content: str | bytes, name: str = "jobs.csv") -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def assert_same_jobs(one: JobTrace, other: JobTrace) -> None:
    assert (one.names, one.tenants) == (other.names, other.tenants)
    for column in ("submit_s", "duration_s", "gpus", "tenant", "limit_s", "deadline_s"):
        np.testing.assert_array_equal(getattr(one, column), getattr(other, column))


def test_a_plain_file(written):
    trace = read_trace(written(GOOD))
    assert len(trace) == 2
    assert trace.names == ("a", "b")
    assert trace.submit_s.tolist() == [0.0, 5.0]
    assert trace.duration_s.tolist() == [100.0, 50.5]
    assert trace.gpus.tolist() == [8, 1]
    assert len(trace.tenants) == 1
    assert np.isnan(trace.limit_s).all()
    assert np.isnan(trace.deadline_s).all()
    assert trace.demand().tolist() == [850.5]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("gzipped", gzip.compress(GOOD.encode())),
        ("gzipped in two parts", gzip.compress(GOOD[:20].encode()) + gzip.compress(GOOD[20:].encode())),
        ("lines of another system", GOOD.replace("\n", "\r\n")),
        ("no end of the last line", GOOD.rstrip("\n")),
        ("empty lines", GOOD.replace("\n", "\n\n")),
        ("spaces around values", f"{HEAD}\n a , 0,100 , 8\nb,5, 50.5,1\n"),
        ("quotes", f'{HEAD}\n"a","0","100","8"\n"b",5,50.5,1\n'),
        ("whole numbers with a point", f"{HEAD}\na,0.0,1e2,8.0\nb,5.0,50.5,1.0\n"),
        ("more columns, in another order", "note,num_gpus,duration_s,submit_s,job_id\nx,8,100,0,a\n,1,50.5,5,b\n"),
        ("empty columns that may be", f"{HEAD},vc,limit_s,deadline_s\na,0,100,8,,,\nb,5,50.5,1,,,\n"),
        ("a mark of the encoding in front", b"\xef\xbb\xbf" + GOOD.encode()),
    ],
    ids=lambda value: value if isinstance(value, str) and "," not in value and "\n" not in value else "",
)
@pytest.mark.parametrize("name_on_disk", ["jobs.csv", "jobs.csv.gz", "jobs"])
def test_the_same_jobs_written_in_other_ways(written, name, content, name_on_disk):
    assert_same_jobs(read_trace(written(content, name_on_disk)), read_trace(written(GOOD, "good.csv")))


def test_columns_that_may_be_there(written):
    trace = read_trace(
        written(f"{HEAD},vc,user,limit_s,deadline_s\na,0,100,8,red,me,200,\nb,0,50,1,blue,you,,900\nc,0,1,1,red,,,\n")
    )
    assert trace.tenants == ("blue", "red")
    assert [trace.tenants[row] for row in trace.tenant] == ["red", "blue", "red"]
    np.testing.assert_array_equal(trace.limit_s, [200.0, math.nan, math.nan])
    np.testing.assert_array_equal(trace.deadline_s, [math.nan, 900.0, math.nan])
    assert trace.demand().tolist() == [50.0, 801.0]


def test_a_tenant_is_one_however_it_is_padded(written):
    assert read_trace(written(f"{HEAD},vc\na,0,1,1,red\nb,0,1,1, red \n")).tenants == ("red",)


@pytest.mark.parametrize(
    ("name", "lines", "says"),
    [
        ("text for a time", ["a,soon,100,8"], "line 2: submit_s is 'soon'"),
        ("text for a duration", ["a,0,100,8", "b,1,long,8"], "line 3: duration_s is 'long'"),
        ("nothing for a duration", ["a,0,,8"], "line 2: duration_s is ''"),
        ("too few fields", ["a,0,100,8", "b,5"], "line 3: duration_s is ''"),
        ("negative time", ["a,-1,100,8"], "line 2: submit_s is -1"),
        ("negative duration", ["a,0,-0.5,8"], "line 2: duration_s is -0.5"),
        ("no number", ["a,0,nan,8"], "line 2: duration_s is nan"),
        ("endless", ["a,0,inf,8"], "line 2: duration_s is inf"),
        ("longer than people live", ["a,0,2e9,8"], "line 2: duration_s is 2e9"),
        ("more values than names", ["a,0,100,8", "b,0,100,8,9"], "line 3 has more values than line 1 has names"),
        ("text for GPUs", ["a,0,100,many"], "line 2: num_gpus is 'many'"),
        ("no GPUs", ["a,0,100,0"], "line 2: num_gpus is 0"),
        ("negative GPUs", ["a,0,100,-8"], "line 2: num_gpus is -8"),
        ("half a GPU", ["a,0,100,8", "b,0,100,0.5"], "line 3: num_gpus is 0.5"),
        ("more GPUs than can be counted", ["a,0,100,1e300"], "line 2: num_gpus is 1e300"),
        ("no name", ["a,0,100,8", ",0,100,8"], "line 3: a job without a job_id"),
        ("only spaces for a name", ["  ,0,100,8"], "line 2: a job without a job_id"),
        ("a name twice", ["a,0,100,8", "b,0,100,8", "a,0,100,8"], "line 4: job a is named twice"),
        ("out of order", ["a,9,100,8", "b,8,100,8"], "line 3: job b was submitted before the one above it"),
        ("after empty lines", ["a,0,100,8", "", "", "b,x,100,8"], "line 5: submit_s is 'x'"),
        ("lines of an old system", ["a,0,100,8\rb,0,100,8"], "line 2"),
        ("a quote that never ends", ["a,0,100,8", 'b,0,100,"8' + "x" * 200_000], "line 3"),
    ],
    ids=lambda value: value if isinstance(value, str) and "," not in value else "",
)
@pytest.mark.parametrize("pack", [str.encode, lambda text: gzip.compress(text.encode())], ids=["plain", "gzipped"])
def test_the_line_of_a_mistake_is_named(written, name, lines, says, pack):
    path = written(pack("\n".join([HEAD, *lines]) + "\n"))
    with pytest.raises(UsageError) as error:
        read_trace(path)
    assert error.value.message.startswith(f"{path}: {says}")
    assert "\n" not in error.value.message


@pytest.mark.parametrize(
    ("head", "says"),
    [
        (f"{HEAD},priorty", "line 1 names 'priorty', which nothing reads"),
        (f"{HEAD},Deadline_s", "line 1 names 'Deadline_s', which nothing reads"),
        (f"{HEAD},vc,vc", "line 1 names vc twice"),
        (f"{HEAD},num_gpus", "line 1 names num_gpus twice"),
        ("job_id,submit_s,durations,num_gpus", "line 1 names no duration_s"),
    ],
)
def test_a_column_that_was_meant_otherwise(written, head, says):
    with pytest.raises(UsageError, match=says):
        read_trace(written(f"{head}\na,0,100,8\n"))


def test_columns_for_other_readers_may_have_any_other_name(written):
    assert_same_jobs(
        read_trace(written(f"{HEAD},state,gpu_type\na,0,100,8,ok,x\nb,5,50.5,1,,\n")), read_trace(written(GOOD, "b"))
    )


@pytest.mark.parametrize("column", ["limit_s", "deadline_s"])
@pytest.mark.parametrize("value", ["-1", "nan", "inf", "late"])
def test_columns_that_may_be_there_are_checked_too(written, column, value):
    with pytest.raises(UsageError, match=f"line 2: {column} is '?{value}'?$"):
        read_trace(written(f"{HEAD},{column}\na,0,100,8,{value}\n"))


def test_columns_that_say_more_of_a_job(written):
    columns = "kind,priority,preemptible,min_run_s,save_every_s,restart_s,within,sizes"
    lines = (
        "a,0,100,4,Service,-3,yes,60,900,0,rack,4:1 8:1.8",
        "b,0,100,4,,,,,,,,",
        "c,0,100,4,array,12,0,,,,,",
    )
    trace = read_trace(written("\n".join((f"{HEAD},{columns}", *lines))))
    assert trace.asked == (
        {
            "kind": "service", "priority": -3, "preemptible": True, "min_run_s": 60.0, "save_every_s": 900.0,
            "restart_s": 0.0, "within": "rack", "sizes": ((4, 1.0), (8, 1.8)),
        },
        {},
        {"kind": "array", "priority": 12, "preemptible": False},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        ("kind", "cron", "kind is 'cron'"),
        ("priority", "high", "priority is 'high'"),
        ("priority", "1.5", "priority is '1.5'"),
        ("priority", "9999999999", "priority is '9999999999'"),
        ("preemptible", "perhaps", "preemptible is 'perhaps'"),
        ("min_run_s", "-1", "min_run_s is -1"),
        ("save_every_s", "0", "save_every_s is 0"),
        ("save_every_s", "inf", "save_every_s is inf"),
        ("restart_s", "slow", "restart_s is 'slow'"),
        ("sizes", "8", "sizes is '8'"),
        ("sizes", "8:fast", "sizes is '8:fast'"),
        ("sizes", "4:1 8:1.8", "job b: sizes are 4: 1.0, 8: 1.8"),
        ("sizes", "8:1 16:0.9", "job b: sizes are 8: 1.0, 16: 0.9"),
        ("sizes", "8:1 16:nan", "job b: sizes are 8: 1.0, 16: nan"),
    ],
)
def test_what_a_job_cannot_be_is_told_with_its_line(written, column, value, says):
    path = written(f"{HEAD},{column}\na,0,100,8,\nb,0,100,8,{value}\n")
    with pytest.raises(UsageError) as error:
        read_trace(path)
    assert error.value.message == f"{path}: line 3: {says}"
    assert error.value.hint


@pytest.mark.parametrize("value", ["many", "-8", "inf"])
def test_a_hint_for_gpus_speaks_of_gpus(written, value):
    with pytest.raises(UsageError) as error:
        read_trace(written(f"{HEAD}\na,0,100,{value}\n"))
    assert error.value.hint is not None
    assert "GPUs" in error.value.hint


@pytest.mark.parametrize("missing", HEAD.split(","))
def test_a_column_that_is_missing_is_named(written, missing):
    head = ",".join(name for name in HEAD.split(",") if name != missing)
    with pytest.raises(UsageError, match=f"line 1 names no {missing}$"):
        read_trace(written(f"{head}\n1,2,3\n"))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("empty", b"", "line 1 names no job_id, submit_s, duration_s, num_gpus"),
        ("no jobs", HEAD.encode(), "has no jobs"),
        ("not text", b"\xff\xfe\x00job", "cannot be read"),
        ("half a gzipped file", gzip.compress(GOOD.encode())[:30], "cannot be read"),
        ("a gzipped file with a wrong sum", gzip.compress(GOOD.encode())[:-8] + bytes(8), "cannot be read"),
        ("a damaged gzipped file", gzip.compress(GOOD.encode())[:10] + b"\xff" * 40, "cannot be read"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_files_that_are_no_log(written, name, content, says):
    path = written(content)
    with pytest.raises(UsageError, match=says) as error:
        read_trace(path)
    assert str(path) in error.value.message
    assert "\n" not in error.value.message


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match=r"there is no .*none\.csv"):
        read_trace(tmp_path / "none.csv")
    with pytest.raises(UsageError, match="cannot be read"):
        read_trace(tmp_path)
