"""The sandbox, attacked from inside; and the code reward, which decides outside of it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from eventually import eventually
from headway.errors import DataError, EngineError
from headway.recipe.rl import Rl
from headway.rl.rewards import Answer, load_reward
from headway.rl.sandbox import (
    ProgramEnd,
    SandboxLimits,
    SandboxProcess,
    TestCode,
    check_sandbox,
    process,
    programs,
    run_program,
    run_tests,
    tested_code,
)
from headway.rl.sandbox.launch import CGROUP_PREFIX, FIRST_UID
from headway.rl.sandbox.plain_data import decode, encode, to_line
from headway.rl.sandbox.syscall_filter import DENIED, DENIED_EVERYWHERE, filter_bytes
from headway.rl.scorer import Scorer

PATIENT = SandboxLimits(seconds=300, processes=8, scratch_bytes=4 << 20)
SECRET = "sesame-31337"

PROBE = """
import ctypes, errno, json, os, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
report = {}

def attempt(name, action):
    try:
        report[name] = action()
    except BaseException as error:
        report[name] = errno.errorcode.get(getattr(error, "errno", None), type(error).__name__)

def call(name, *arguments):
    result = getattr(libc, name)(*arguments)
    report[name] = "done" if result != -1 else errno.errorcode[ctypes.get_errno()]

def write(path):
    with open(path, "w") as file:
        file.write("x")
    return "written"

def fill(folder):
    total = 0
    for number in range(1000):
        with open(f"{folder}/{number}", "wb", buffering=0) as file:
            try:
                while True:
                    total += file.write(bytes(1 << 16))
            except OSError as error:
                if not file.tell():
                    report["full"] = errno.errorcode[error.errno]
                    return total

def fork_many():
    count = 0
    while True:
        try:
            if os.fork() == 0:
                signal.pause()
        except OSError as error:
            report["forks end with"] = errno.errorcode[error.errno]
            return count
        count += 1

report["uids"] = os.getresuid(), os.getresgid(), os.getgroups()
report["environment"] = sorted(os.environ)
report["descriptors"] = [number for number in range(1024) if not os.system is None and not libc.fcntl(number, 1) == -1]
report["devices"] = sorted(os.listdir("/dev"))
report["top"] = sorted(os.listdir("/"))
report["run folder"] = os.path.exists(RUN_FOLDER)
for path in ("/new", "/box/main.py", "/box/new", "/usr/lib/new", os.__file__, "/dev/new"):
    attempt(path, lambda: write(path))
for family in (1, 2, 10, 16, 17, 40):
    import socket
    attempt(f"socket {family}", lambda: socket.socket(family, 1).fileno())
attempt("memory", lambda: len(bytearray(1 << 30)))
attempt("setuid", lambda: os.setuid(0))
attempt("kill 1", lambda: os.kill(1, 9))
attempt("nice", lambda: os.setpriority(os.PRIO_PROCESS, 0, -5))
call("ptrace", 16, 1, 0, 0)
call("process_vm_readv", 1, None, 0, None, 0, 0)
call("unshare", 0x10000000)
call("mount", b"x", b"/tmp", b"tmpfs", 0, None)
call("memfd_create", b"x", 0)
call("shmget", 0, 4096, 0o1600)
call("chroot", b"/tmp")
attempt("disk", lambda: fill("/tmp"))
attempt("kill all", lambda: os.kill(-1, 9))
attempt("forks", fork_many)
print(json.dumps(report))
"""


@pytest.fixture(scope="module", autouse=True)
def _sandbox() -> None:
    try:
        check_sandbox()
    except EngineError as error:
        pytest.skip(f"{error}; as root with a pids cgroup: pytest tests/rl/test_sandbox.py")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a program could do in the sandbox; one for all tests, since each start costs CPU time."""
    folder = tmp_path_factory.mktemp("run")
    descriptor = os.open(folder, os.O_RDONLY)
    os.set_inheritable(descriptor, True)
    os.environ["HEADWAY_SECRET"] = SECRET
    try:
        end = run_program(PROBE.replace("RUN_FOLDER", repr(str(folder))), b"", PATIENT, 1 << 20)
    finally:
        del os.environ["HEADWAY_SECRET"]
        os.close(descriptor)
    assert end.status == 0, end
    return dict(json.loads(end.output))


def answer(code: str, **fields: Any) -> Answer:
    return Answer(code, "", fields, 1, "stop")


def verdicts(code: str, *tests: str, **settings: Any) -> list[bool]:
    return run_tests(code, TestCode(tests, **settings), PATIENT)


# -- what a program can do


def test_code_has_no_privileges(report: dict[str, Any]) -> None:
    uids, gids, groups = report["uids"]
    assert len(set(uids)) == len(set(gids)) == 1
    assert 0 not in {*uids, *gids}
    assert not groups or os.geteuid() != 0
    assert report["setuid"] in ("EPERM", "EINVAL")  # EINVAL: the namespace has no uid 0
    assert report["nice"] in ("EPERM", "EACCES")


def test_nothing_is_inherited(report: dict[str, Any]) -> None:
    assert report["environment"] == ["HOME", "LANG", "PATH", "TMPDIR"]
    assert report["descriptors"] == [0, 1, 2]


def test_only_python_and_harmless_devices_are_visible(report: dict[str, Any]) -> None:
    assert not report["run folder"]
    assert report["devices"] == ["full", "null", "random", "urandom", "zero"]
    assert not {"proc", "sys", "home", "var", "run"} & set(report["top"])


def test_the_root_is_read_only(report: dict[str, Any]) -> None:
    paths = [path for path in report if path.startswith("/")]
    assert len(paths) == 6
    assert {report[path] for path in paths} == {"EROFS"}


def test_no_socket_of_any_family_can_be_opened(report: dict[str, Any]) -> None:
    """AF_VSOCK is 40: it reaches the hypervisor from every network namespace."""
    assert {report[f"socket {family}"] for family in (1, 2, 10, 16, 17, 40)} == {"EPERM"}


def test_memory_and_disk_are_limited(report: dict[str, Any]) -> None:
    assert report["memory"] == "MemoryError"
    assert report["full"] == "ENOSPC"
    assert 0 < report["disk"] <= PATIENT.scratch_bytes


def test_other_processes_cannot_be_read_or_killed(report: dict[str, Any]) -> None:
    assert report["kill 1"] in (None, "EPERM")  # None: process 1 ignores it
    assert report["kill all"] in (None, "EPERM", "ESRCH")
    for name in ("ptrace", "process_vm_readv", "unshare", "mount", "memfd_create", "shmget", "chroot"):
        assert report[name] == "EPERM", name


def test_a_fork_bomb_ends_at_the_limit_and_leaves_nothing(report: dict[str, Any]) -> None:
    assert report["forks end with"] == "EAGAIN"
    assert 0 < report["forks"] <= PATIENT.processes + 2
    if os.geteuid() == 0:
        left = [
            process for process in psutil.process_iter(["uids"]) if process.info["uids"].real == report["uids"][0][0]
        ]
        assert not left
        uid = report["uids"][0][0]
        assert not list(Path("/sys/fs/cgroup").glob(f"*/{CGROUP_PREFIX}{uid - FIRST_UID}"))


def test_a_program_that_sleeps_is_ended() -> None:
    end = run_program("import time; print(1, flush=True); time.sleep(10000)", b"", SandboxLimits(seconds=0.5), 100)
    assert end.status == process.TIMED_OUT


def test_processes_of_a_private_run_build_one_too() -> None:
    """They have its umask, with which another user could not enter any folder of the sandbox."""
    umask = os.umask(0o077)
    try:
        assert run_program("print(1)", b"", PATIENT, 100).output == b"1\n"
    finally:
        os.umask(umask)


@pytest.mark.slow
def test_a_program_that_floods_is_ended() -> None:
    end = run_program("while True: print('x' * 1000)", b"", PATIENT, 5000)
    assert (end.status, len(end.output)) == (1, 5000)


def test_a_killed_launcher_takes_everything_with_it() -> None:
    """It cannot clean up; the kernel ends what is inside, and the next sandbox removes its cgroup."""
    source = "import os\nos.fork()\nprint(1, flush=True)\nimport signal\nsignal.pause()"
    with SandboxProcess("/box/a.py", {"/box/a.py": source}, PATIENT, stdout=subprocess.PIPE) as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == b"1\n"
        killed.process.kill()
        killed.stdout.read()  # its end: no process is left that could write
        with pytest.raises(EngineError, match="a sandbox was killed by SIGKILL"):
            killed.end()
    assert run_program("print(2)", b"", PATIENT, 100).output == b"2\n"
    name = f"{CGROUP_PREFIX}{killed.process.pid}"
    eventually(lambda: not list(Path("/sys/fs/cgroup").glob(f"*/{name}")))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("struck", [0, 1])
def test_code_whose_sandbox_is_killed_or_stopped_is_run_once_more(
    number: int, struck: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    class Struck(SandboxProcess):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)
            if len(started) == struck + 1:
                os.kill(self.process.pid, number)

    monkeypatch.setattr(tested_code, "SandboxProcess", Struck)
    assert verdicts("def f(): return 1", "assert f() == 1", "assert f() == 2") == [True, False]
    assert len(started) == 4
    if struck == 0:
        monkeypatch.setattr(programs, "SandboxProcess", Struck)
        started.clear()
        assert run_program("print(input())", b"7", PATIENT, 100) == ProgramEnd(0, b"7\n")
        assert len(started) == 2


def test_a_sandbox_that_cannot_be_built_is_refused_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_binds", lambda: ["/no/such/folder"])
    with pytest.raises(EngineError, match=r"sandbox here: .*No such file.*/no/such/folder") as raised:
        run_program("", b"", PATIENT, 100)
    assert raised.value.hint is not None
    assert "headway doctor --sandbox" in raised.value.hint
    with pytest.raises(EngineError, match="cannot be run in a sandbox here"):
        verdicts("def f(): return 1", "assert f() == 1")


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="become another user: sudo pytest -m slow tests/rl/test_sandbox.py")
def test_a_user_without_privileges_has_the_same_sandbox(tmp_path: Path) -> None:
    """By Debian's Python, since that of the tests may be in root's home."""
    python, source = Path("/usr/bin/python3"), str(Path(process.__file__).parents[3])
    version = "import sys; sys.exit(sys.version_info < (3, 11))"
    if not python.exists() or subprocess.run([python, "-c", version], check=False).returncode:
        pytest.skip("apt-get install python3 (3.11 or newer) enables this")
    script = (
        "import sys; from headway.rl.sandbox import *\n"
        "limits = SandboxLimits(seconds=300, processes=8, scratch_bytes=4 << 20)\n"
        "end = run_program(sys.stdin.read(), b'', limits, 1 << 20)"
        "\nprint(end.output.decode() if end.status == 0 else end)"
    )
    done = subprocess.run(
        [python, "-B", "-c", script],
        input=PROBE.replace("RUN_FOLDER", "'/home'"), env={"PYTHONPATH": source}, user=23456, group=23456,
        extra_groups=[], capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "no user namespaces" in done.stderr:
        pytest.skip("sysctl kernel.unprivileged_userns_clone=1 (or AppArmor's equivalent) enables this")
    assert done.returncode == 0, done.stderr
    mine = json.loads(done.stdout)
    for test in (
        test_code_has_no_privileges, test_nothing_is_inherited, test_the_root_is_read_only,
        test_only_python_and_harmless_devices_are_visible, test_no_socket_of_any_family_can_be_opened,
        test_memory_and_disk_are_limited, test_other_processes_cannot_be_read_or_killed,
    ):  # fmt: skip
        test(mine)
    assert 0 < mine["forks"] <= PATIENT.processes + 2


# -- what tests decide


def test_right_code_passes_tests_of_all_forms() -> None:
    code = """
import enum, math
class Stack:
    def __init__(self, *items): self.items = list(items); self.size = len(items)
    def push(self, item): self.items.append(item); return self
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __getitem__(self, place): return self.items[place]
class Kind(enum.IntEnum):
    A = 1
class Own(ValueError): pass
def double(x): return x * 2
def kind(): return Kind.A
def fails(x): raise Own(f"no {x}")
def many(): return {"a": (1, {2}, None, b"x", 1j, float("inf"))}
def count(n): yield from range(n)
def top(stack): return stack[-1]
print("noise that is no message", flush=True)
"""
    tests = [
        "assert double(2) == 4", "assert double('ab') == 'abab' and double([1]) == [1, 1]",
        "assert abs(double(x=0.1) - 0.2) < 1e-9", "assert close(double(0.5), 1.0)",
        "assert many() == {'a': (1, {2}, None, b'x', 1j, float('inf'))}", "assert type(many()['a']) is tuple",
        "stack = Stack(1, 2)\nassert list(stack.push(3)) == [1, 2, 3]\nassert len(stack) == 3 and stack.size == 2",
        "assert stack[0] == 1 and top(stack) == 3 and stack", "assert list(count(3)) == [0, 1, 2]",
        "try:\n    fails(1)\n    assert False\nexcept ValueError as error:\n    assert str(error) == 'no 1'",
        "def test_kind():\n    assert kind() == 1", "assert double(10**5000) == 2 * 10**5000",
    ]  # fmt: skip
    assert verdicts(code, *tests, setup="from math import isclose as close") == [True] * len(tests)


def test_wrong_code_fails_only_what_it_gets_wrong() -> None:
    code = "def f(x):\n    if x > 2: raise KeyError(x)\n    return x + 2"
    tests = [
        "assert f(2) == 4", "assert f(1) == 2", "assert f(3) == 6", "assert g(1) == 1", "pass", "assert 1 == 1",
        "def test_late():\n    assert f(1) == 2", "assert f(lambda: 1) == 2", "assert f(2) == 4",
    ]  # fmt: skip
    assert verdicts(code, *tests) == [True, False, False, False, False, False, False, False, True]


@pytest.mark.parametrize(
    "code",
    [
        "import os\ndef f(x): os._exit(0)",
        pytest.param("import sys\nsys.exit(0)", marks=pytest.mark.slow),
        # Values that equal everything, and new meanings for what tests compare with.
        "class Any:\n    __eq__ = __le__ = __lt__ = lambda self, other: True\n    __hash__ = None\n"
        "    def __sub__(self, other): return 0\n    __abs__ = __rsub__ = __sub__\n    __float__ = __sub__\n"
        "def f(x): return Any()\nabs = round = float = lambda *a: 0\nclass math:\n    isclose = lambda *a: True\n"
        "class AssertionError(Exception): pass\n",
        # The marks of a passed test, into every descriptor.
        """
import os
def f(x):
    for number in range(64):
        for line in (b'{"passed": true}\\n', b'{"value": ["ref", 0]}\\n', b'{"value": true}\\n'):
            try: os.write(number, line)
            except OSError: pass
    return ["passed", True]
""",
    ],
    ids=["exit", "exit at once", "equal to everything", "forged messages"],
)  # fmt: skip
def test_no_trick_passes_a_test(code: str) -> None:
    tests = [f"assert f(1) == '{SECRET}'", "assert abs(f(1) - 0.5) < 1e-6", "assert math.isclose(f(1), 0.5)"]
    assert verdicts(code, *tests, setup="import math") == [False, False, False]


def test_expected_values_cannot_be_read() -> None:
    """From files, frames and objects; a word in the answer's own file shows that the search works."""
    code = """
import gc, os, re, sys
def find(word):
    seen = [str(sys.argv), str(os.environ), repr(gc.get_objects()), str(sys._getframe(1).f_locals)]
    for top in ("/box", "/tmp", "/etc"):
        for folder, _, names in os.walk(top):
            seen += [open(folder + "/" + name, errors="replace").read() for name in names]
    matches = re.findall(word + "-[0-9]+", "".join(seen))
    return matches[0] if matches else None
# decoy-4711
"""
    assert verdicts(code, f"assert find('sesame') == '{SECRET}'", "assert find('decoy') == 'decoy-4711'") == [
        False,
        True,
    ]


def test_tests_that_follow_a_hang_fail_and_those_before_count() -> None:
    code = "import time\ndef f(x):\n    while x: time.sleep(1)\n    return 0"
    tests = TestCode(["assert f(0) == 0", "assert f(1) == 0", "assert f(0) == 0"])
    assert run_tests(code, tests, SandboxLimits(seconds=2)) in ([True, False, False], [False, False, False])


def test_only_the_entry_point_is_taken_from_the_answer() -> None:
    code = "def f(x): return 1\ndef isclose(*a): return True\ndef check(f): pass"
    test = "def check(candidate):\n    assert candidate(1) == 1"
    assert verdicts(code, test, "assert isclose(f(1), 2)", "assert f(1) == 1", entry_point="f") == [True, False, True]


@pytest.mark.slow
def test_rows_whose_tests_cannot_run_are_errors() -> None:
    with pytest.raises(DataError, match="tests cannot be run: test 0 is no Python"):
        verdicts("def f(): pass", "assert f( == 3")


@pytest.mark.slow
def test_tests_that_end_their_process_are_an_error() -> None:
    """Also what a tool of ours that does not start would look like: never a wrong answer."""
    with pytest.raises(DataError, match="tests ended their process"):
        verdicts("def f(): return 1", "import os\nassert f() == 1\nos._exit(1)")


def test_rows_without_usable_tests_are_errors() -> None:
    code = load_reward("code")
    for fields in (
        {"tests": [1]}, {"tests": []}, {"tests": ["x"], "setup": 3}, {}, {"inputs": ["1"]},
        {"inputs": ["1"], "outputs": []}, {"inputs": "1", "outputs": "1"},
    ):  # fmt: skip
        with pytest.raises(DataError, match="field"):
            code(answer("", **fields))


def test_programs_are_judged_by_what_they_write() -> None:
    code = load_reward("code")
    text = "First:\n```python\nprint(0)\n```\nBetter:\n```python\nprint(int(input()) * 2, '\\n')\n```\nDone."
    assert code(answer(text, inputs=["2\n", "3"], outputs=["4", "5"]), partial=True) == 0.5
    assert code(answer(text, inputs=["-3"], outputs=["-6\n"])) == 1.0
    assert code(answer("print(4); raise SystemExit(1)", inputs=["2"], outputs=["4"])) == 0.0


@pytest.mark.slow
def test_code_is_scored_beside_other_rewards_and_a_hang_costs_one_answer() -> None:
    hang = "import time\ndef f(x): time.sleep(1000)"
    code = {"name": "code", "args": {"seconds": 600}}
    fields = {"tests": ["assert f(2) == 4"], "numbers": [2], "target": 2}
    codes = ["def f(x): return x * 2", hang, "def f(x): return 2"]
    with Scorer(Rl(rewards=[code, "countdown"], reward_timeout_s=15, reward_workers=1)) as scorer:
        scores = scorer.score([answer(text, **fields) for text in codes])
    assert [score.terms["code"] for score in scores] == [1.0, 0.0, 0.0]
    assert [score.terms["countdown"] for score in scores] == [0.0, 0.0, 1.0]
    assert [score.error is None for score in scores] == [True, False, True]


def test_the_last_block_or_all_of_the_text_is_the_code() -> None:
    from headway.rl.rewards.code_tests import last_block

    assert last_block("x = 1") == "x = 1"
    assert last_block("a\n```py\n1\n```\nb\n```\n2\n```\nc") == "2\n"
    assert last_block("```python\n1\n```\n```python\n2") == "1\n"
    assert last_block("```json\n1\n```") == "```json\n1\n```"


# -- the parts


def test_values_cross_unchanged() -> None:
    value = {"a": [1, 2.5, None, True, (1,), {1}, frozenset({2}), b"\0", 1j, {"b": {1: 2}}, "\ud800"]}
    data = json.loads(to_line(encode(value, lambda value: pytest.fail(str(value)))))
    again = decode(data, lambda number: pytest.fail(str(number)))
    assert again == value
    assert [type(item) for item in again["a"]] == [type(item) for item in value["a"]]


@pytest.mark.parametrize(
    "data",
    [{}, [], ["list"], ["type", 1], ["ref", "0"], ["ref", True], ["dict", [1]], ["set", [["list", []]]]],
)  # fmt: skip
def test_malformed_values_are_refused(data: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        decode(data, lambda number: number)


def test_the_filter_denies_what_it_lists() -> None:
    """The programs run in the classic BPF machine, written anew."""
    for machine, arch, clone in (("x86_64", 0xC000003E, 56), ("aarch64", 0xC00000B7, 220)):
        denied = {*DENIED[machine].values(), *DENIED_EVERYWHERE.values()}
        for number in range(500):
            verdict = evaluate(filter_bytes(machine), number, arch)
            assert verdict == (0x50026 if number == 435 else 0x50001 if number in denied else 0x7FFF0000)
        assert evaluate(filter_bytes(machine), clone, arch, 0x10000011) == 0x50001
        assert evaluate(filter_bytes(machine), 0, 0x40000003) == 0x80000000
    assert evaluate(filter_bytes("x86_64"), 0x40000029, 0xC000003E) == 0x50001


def evaluate(program: bytes, number: int, arch: int, argument: int = 17) -> int:
    words, place, loaded = memoryview(program), 0, 0
    while True:
        code = int.from_bytes(words[place : place + 2], "little")
        true, false, value = words[place + 2], words[place + 3], int.from_bytes(words[place + 4 : place + 8], "little")
        place += 8
        match code:
            case 0x06:
                return value
            case 0x20:
                loaded = {0: number, 4: arch, 16: argument}[value]
            case _:
                holds = {0x15: loaded == value, 0x35: loaded >= value, 0x45: bool(loaded & value)}[code]
                place += 8 * (true if holds else false)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the headers of Linux")
def test_numbers_of_system_calls_are_those_of_the_headers() -> None:
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if not header.exists():
        pytest.skip("apt-get install linux-libc-dev on x86-64 enables this")
    words = [line.split() for line in header.read_text().splitlines() if line.startswith("#define __NR_")]
    numbers = {name.removeprefix("__NR_"): int(number) for _, name, number in words}
    listed = {**DENIED["x86_64"], **DENIED_EVERYWHERE}
    assert {name: numbers[name] for name in listed if name in numbers} == {
        name: number for name, number in listed.items() if name in numbers
    }
