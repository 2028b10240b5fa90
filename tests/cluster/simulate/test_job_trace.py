"""Job traces: valid files are read, and errors name the line of a mistake."""

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
def write_trace(tmp_path):
    def write(content: str | bytes, name: str = "jobs.csv") -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def assert_same_jobs(actual: JobTrace, expected: JobTrace) -> None:
    assert (actual.names, actual.tenants) == (expected.names, expected.tenants)
    for column in ("submit_s", "duration_s", "gpus", "tenant", "limit_s", "deadline_s"):
        np.testing.assert_array_equal(getattr(actual, column), getattr(expected, column))


def test_plain_trace_is_read(write_trace):
    trace = read_trace(write_trace(GOOD))
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
        ("Windows line endings", GOOD.replace("\n", "\r\n")),
        ("no newline at the end", GOOD.rstrip("\n")),
        ("empty lines", GOOD.replace("\n", "\n\n")),
        ("spaces around values", f"{HEAD}\n a , 0,100 , 8\nb,5, 50.5,1\n"),
        ("quotes", f'{HEAD}\n"a","0","100","8"\n"b",5,50.5,1\n'),
        ("whole numbers with a point", f"{HEAD}\na,0.0,1e2,8.0\nb,5.0,50.5,1.0\n"),
        ("more columns, in another order", "note,num_gpus,duration_s,submit_s,job_id\nx,8,100,0,a\n,1,50.5,5,b\n"),
        ("empty optional columns", f"{HEAD},vc,limit_s,deadline_s\na,0,100,8,,,\nb,5,50.5,1,,,\n"),
        ("byte order mark", b"\xef\xbb\xbf" + GOOD.encode()),
    ],
    ids=lambda value: value if isinstance(value, str) and "," not in value and "\n" not in value else "",
)
@pytest.mark.parametrize("name_on_disk", ["jobs.csv", "jobs.csv.gz", "jobs"])
def test_equivalent_files_give_the_same_trace(write_trace, name, content, name_on_disk):
    assert_same_jobs(read_trace(write_trace(content, name_on_disk)), read_trace(write_trace(GOOD, "good.csv")))


def test_optional_columns_are_read(write_trace):
    trace = read_trace(
        write_trace(
            f"{HEAD},vc,user,limit_s,deadline_s\na,0,100,8,red,me,200,\nb,0,50,1,blue,you,,900\nc,0,1,1,red,,,\n"
        )
    )
    assert trace.tenants == ("blue", "red")
    assert [trace.tenants[row] for row in trace.tenant] == ["red", "blue", "red"]
    np.testing.assert_array_equal(trace.limit_s, [200.0, math.nan, math.nan])
    np.testing.assert_array_equal(trace.deadline_s, [math.nan, 900.0, math.nan])
    assert trace.demand().tolist() == [50.0, 801.0]


def test_padding_of_tenant_names_is_ignored(write_trace):
    assert read_trace(write_trace(f"{HEAD},vc\na,0,1,1,red\nb,0,1,1, red \n")).tenants == ("red",)


@pytest.mark.parametrize(
    ("name", "lines", "message"),
    [
        ("text for a time", ["a,soon,100,8"], "line 2: submit_s is 'soon'"),
        ("text for a duration", ["a,0,100,8", "b,1,long,8"], "line 3: duration_s is 'long'"),
        ("nothing for a duration", ["a,0,,8"], "line 2: duration_s is ''"),
        ("too few fields", ["a,0,100,8", "b,5"], "line 3: duration_s is ''"),
        ("negative time", ["a,-1,100,8"], "line 2: submit_s is -1"),
        ("negative duration", ["a,0,-0.5,8"], "line 2: duration_s is -0.5"),
        ("not a number", ["a,0,nan,8"], "line 2: duration_s is nan"),
        ("infinite", ["a,0,inf,8"], "line 2: duration_s is inf"),
        ("too long", ["a,0,2e9,8"], "line 2: duration_s is 2e9"),
        ("more values than names", ["a,0,100,8", "b,0,100,8,9"], "line 3 has more values than line 1 has columns"),
        ("text for GPUs", ["a,0,100,many"], "line 2: num_gpus is 'many'"),
        ("no GPUs", ["a,0,100,0"], "line 2: num_gpus is 0"),
        ("negative GPUs", ["a,0,100,-8"], "line 2: num_gpus is -8"),
        ("half a GPU", ["a,0,100,8", "b,0,100,0.5"], "line 3: num_gpus is 0.5"),
        ("more GPUs than can be counted", ["a,0,100,1e300"], "line 2: num_gpus is 1e300"),
        ("no name", ["a,0,100,8", ",0,100,8"], "line 3: no job_id"),
        ("only spaces for a name", ["  ,0,100,8"], "line 2: no job_id"),
        ("duplicate name", ["a,0,100,8", "b,0,100,8", "a,0,100,8"], "line 4: duplicate job 'a'"),
        ("out of order", ["a,9,100,8", "b,8,100,8"], "line 3: job b was submitted before the previous one"),
        ("after empty lines", ["a,0,100,8", "", "", "b,x,100,8"], "line 5: submit_s is 'x'"),
        ("old Mac line endings", ["a,0,100,8\rb,0,100,8"], "line 2"),
        ("a quote that never ends", ["a,0,100,8", 'b,0,100,"8' + "x" * 200_000], "line 3"),
    ],
    ids=lambda value: value if isinstance(value, str) and "," not in value else "",
)
@pytest.mark.parametrize("pack", [str.encode, lambda text: gzip.compress(text.encode())], ids=["plain", "gzipped"])
def test_error_names_the_line_of_a_mistake(write_trace, name, lines, message, pack):
    path = write_trace(pack("\n".join([HEAD, *lines]) + "\n"))
    with pytest.raises(UsageError) as error:
        read_trace(path)
    assert error.value.message.startswith(f"{path}: {message}")
    assert "\n" not in error.value.message


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (f"{HEAD},priorty", "line 1 has unknown column 'priorty'"),
        (f"{HEAD},Deadline_s", "line 1 has unknown column 'Deadline_s'"),
        (f"{HEAD},vc,vc", "line 1 has column vc twice"),
        (f"{HEAD},num_gpus", "line 1 has column num_gpus twice"),
        ("job_id,submit_s,durations,num_gpus", "line 1 lacks duration_s"),
    ],
)
def test_misspelled_or_duplicate_column_is_rejected(write_trace, head, message):
    with pytest.raises(UsageError, match=message):
        read_trace(write_trace(f"{head}\na,0,100,8\n"))


def test_unrelated_columns_are_ignored(write_trace):
    assert_same_jobs(
        read_trace(write_trace(f"{HEAD},state,gpu_type\na,0,100,8,ok,x\nb,5,50.5,1,,\n")),
        read_trace(write_trace(GOOD, "b")),
    )


@pytest.mark.parametrize("column", ["limit_s", "deadline_s"])
@pytest.mark.parametrize("value", ["-1", "nan", "inf", "late"])
def test_optional_columns_are_checked(write_trace, column, value):
    with pytest.raises(UsageError, match=f"line 2: {column} is '?{value}'?$"):
        read_trace(write_trace(f"{HEAD},{column}\na,0,100,8,{value}\n"))


def test_columns_of_job_fields_are_read(write_trace):
    columns = "kind,priority,preemptible,min_run_s,save_every_s,restart_s,within,sizes"
    lines = (
        "a,0,100,4,Service,-3,yes,60,900,0,rack,4:1 8:1.8",
        "b,0,100,4,,,,,,,,",
        "c,0,100,4,array,12,0,,,,,",
    )
    trace = read_trace(write_trace("\n".join((f"{HEAD},{columns}", *lines))))
    assert trace.extra == (
        {
            "kind": "service", "priority": -3, "preemptible": True, "min_run_s": 60.0, "save_every_s": 900.0,
            "restart_s": 0.0, "within": "rack", "sizes": ((4, 1.0), (8, 1.8)),
        },
        {},
        {"kind": "array", "priority": 12, "preemptible": False},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("column", "value", "message"),
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
def test_error_of_a_job_field_names_its_line(write_trace, column, value, message):
    path = write_trace(f"{HEAD},{column}\na,0,100,8,\nb,0,100,8,{value}\n")
    with pytest.raises(UsageError) as error:
        read_trace(path)
    assert error.value.message == f"{path}: line 3: {message}"
    assert error.value.hint


@pytest.mark.parametrize("value", ["many", "-8", "inf"])
def test_hint_for_gpus_mentions_gpus(write_trace, value):
    with pytest.raises(UsageError) as error:
        read_trace(write_trace(f"{HEAD}\na,0,100,{value}\n"))
    assert error.value.hint is not None
    assert "GPUs" in error.value.hint


@pytest.mark.parametrize("missing", HEAD.split(","))
def test_missing_column_is_named(write_trace, missing):
    head = ",".join(name for name in HEAD.split(",") if name != missing)
    with pytest.raises(UsageError, match=f"line 1 lacks {missing}$"):
        read_trace(write_trace(f"{head}\n1,2,3\n"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty", b"", "line 1 lacks job_id, submit_s, duration_s, num_gpus"),
        ("no jobs", HEAD.encode(), "has no jobs"),
        ("not text", b"\xff\xfe\x00job", "cannot read"),
        ("half a gzipped file", gzip.compress(GOOD.encode())[:30], "cannot read"),
        ("a gzipped file with a wrong sum", gzip.compress(GOOD.encode())[:-8] + bytes(8), "cannot read"),
        ("a damaged gzipped file", gzip.compress(GOOD.encode())[:10] + b"\xff" * 40, "cannot read"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unreadable_trace_is_rejected(write_trace, name, content, message):
    path = write_trace(content)
    with pytest.raises(UsageError, match=message) as error:
        read_trace(path)
    assert str(path) in error.value.message
    assert "\n" not in error.value.message


def test_missing_file_is_rejected(tmp_path):
    with pytest.raises(UsageError, match=r"no such file: .*none\.csv"):
        read_trace(tmp_path / "none.csv")
    with pytest.raises(UsageError, match="cannot read"):
        read_trace(tmp_path)
