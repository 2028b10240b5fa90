"""Runs one command in a sandbox: `python -I -S launch.py DESCRIPTOR`, with the JSON of its configuration to read there.

A script of its own that imports nothing of Headway: it starts in 20 ms, and holds nothing that code inside could want.
Three processes: this one stays outside, keeps the time and removes the cgroup; its child is process 1 of the new
namespaces, builds the file system and waits; the grandchild gives up all privileges and becomes the command. When
process 1 ends, the kernel kills everything that is left inside.

Exit status: that of the command if it is 0, else 1; 124 after the time limit; 125 and a sentence on stderr if the
sandbox cannot be built.
"""

import ctypes
import errno
import json
import os
import resource
import select
import signal
import sys
import time
from contextlib import suppress
from typing import Any, NoReturn

FAILED, TIMED_OUT, NOT_BUILT = 1, 124, 125
FIRST_UID = 0x70000000
"""Of sandboxes that root builds: each has an unused uid, counted from here."""
NOBODY = 65534
UID_INSIDE = 1000
"""Of sandboxes that a user without privileges builds: the user's own uid appears as this one."""

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x8, 0x1000, 0x4000, 0x40000
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV, ATTR_NOEXEC = 0x1, 0x2, 0x4, 0x8
AT_FDCWD, AT_RECURSIVE, MNT_DETACH = -100, 0x8000, 2
PR_SET_PDEATHSIG, PR_SET_SECCOMP, SECCOMP_MODE_FILTER, PR_SET_NO_NEW_PRIVS = 1, 22, 2, 38
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
SYS_MOUNT_SETATTR = 442
DEVICES = ("null", "zero", "full", "random", "urandom")
CGROUPS = "/sys/fs/cgroup"
CGROUP_PREFIX = "headway-sandbox-"

libc = ctypes.CDLL(None, use_errno=True)


class NotBuilt(Exception):
    """Why there is no sandbox on this machine, in words."""


class Stopped(BaseException):
    """The parent wants no result any more, or has died."""


def main() -> int:
    """Build the sandbox, run the command, and return the exit status."""
    signal.signal(signal.SIGTERM, _stop)
    os.umask(0o022)  # a private run's is 077, and then the code, which is another user, could not read its interpreter
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    with os.fdopen(int(sys.argv[1]), "rb") as file:
        config = json.load(file)
    config["uid_offset"] = os.getpid()
    if os.getppid() != config["parent"]:
        return FAILED
    cgroups: list[str] = []
    init = 0
    try:
        deadline = time.monotonic() + config["seconds"]
        cgroups = make_cgroups(config)
        new_processes()
        status_reader, status_writer = os.pipe()
        init = os.fork()
        if init == 0:
            os.close(status_reader)
            _run_init(config, cgroups, status_writer)
        os.close(status_writer)
        for descriptor in (0, 1, *filter(None, [config["verdict"]])):
            os.close(descriptor)  # what reads them must see their end when the command ends
        if problem := _read_all(status_reader):
            raise NotBuilt(problem)
        return _wait(init, deadline)
    except NotBuilt as error:
        os.write(2, str(error).encode())
        return NOT_BUILT
    except Stopped:
        return FAILED
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if init:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(init, signal.SIGKILL)
                os.waitpid(init, 0)
        remove_cgroups(cgroups)


def _stop(_number: int, _frame: Any) -> NoReturn:
    raise Stopped


def _wait(init: int, deadline: float) -> int:
    descriptor = os.pidfd_open(init)
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
        return TIMED_OUT
    _, status = os.waitpid(init, 0)
    return 0 if status == 0 else FAILED


def _read_all(descriptor: int) -> str:
    with os.fdopen(descriptor, "rb") as file:
        return file.read().decode(errors="replace")


# -- outside: cgroups, and the namespace of processes


def make_cgroups(config: dict[str, Any]) -> list[str]:
    """Make a cgroup that limits processes and, with version 2, memory; return its folder.

    Root must have one: no other limit counts the processes of a sandbox when the uid has been used before.
    """
    for parent, unified in _cgroup_parents():
        _remove_stale(parent)
        folder = f"{parent}/{CGROUP_PREFIX}{os.getpid()}"
        try:
            os.mkdir(folder)
        except OSError:
            continue
        # 2 more: process 1 and, while it starts, its child.
        limits = {"pids.max": config["processes"] + 2}
        if unified:
            limits |= {"memory.max": config["total_bytes"], "memory.swap.max": 0}
        written = {name: _write(f"{folder}/{name}", str(value)) for name, value in limits.items()}
        if written["pids.max"]:
            return [folder]
        remove_cgroups([folder])
    if os.geteuid() == 0:
        raise NotBuilt("no cgroup with pids.max can be made below /sys/fs/cgroup, and root has no other process limit")
    return []  # RLIMIT_NPROC counts the processes of a user namespace


def _cgroup_parents() -> list[tuple[str, bool]]:
    """Return folders below which a cgroup may be made, this process's own first, and whether each is of version 2."""
    parents = []
    with open("/proc/self/cgroup") as file:
        lines = [line.rstrip("\n").split(":", 2) for line in file]
    for _, controllers, path in lines:
        if controllers == "":
            while True:
                parents += [(f"{mount}{path}".rstrip("/"), True) for mount in (CGROUPS, f"{CGROUPS}/unified")]
                if path == "/":
                    break
                path = os.path.dirname(path)
        elif "pids" in controllers.split(","):
            parents.insert(0, (f"{CGROUPS}/{controllers}{path}".rstrip("/"), False))
    return [(parent, unified) for parent, unified in parents if os.access(f"{parent}/cgroup.procs", os.W_OK)]


def _remove_stale(parent: str) -> None:
    """Remove what was left by sandboxes whose process outside was killed."""
    for name in os.listdir(parent):
        pid = name.removeprefix(CGROUP_PREFIX)
        if pid != name and not os.path.exists(f"/proc/{pid}"):
            with suppress(OSError):
                os.rmdir(f"{parent}/{name}")


def remove_cgroups(folders: list[str]) -> None:
    """Remove cgroups; those that the kernel still empties are tried again for a second."""
    for folder in folders:
        for _ in range(100):
            try:
                os.rmdir(folder)
                break
            except FileNotFoundError:
                break
            except OSError:
                time.sleep(0.01)


def new_processes() -> None:
    """Give the next child namespaces of processes and, without privileges, of users."""
    root, uid, gid = os.geteuid() == 0, os.geteuid(), os.getegid()
    if libc.unshare(CLONE_NEWPID | (0 if root else CLONE_NEWUSER)) != 0:
        what = "this process lacks CAP_SYS_ADMIN" if root else "the kernel allows no user namespaces"
        raise NotBuilt(f"{what} (unshare: {os.strerror(ctypes.get_errno())})")
    if not root:
        for name, text in [
            ("setgroups", "deny"), ("uid_map", f"{UID_INSIDE} {uid} 1"), ("gid_map", f"{UID_INSIDE} {gid} 1"),
        ]:  # fmt: skip
            if not _write(f"/proc/self/{name}", text):
                raise NotBuilt(f"/proc/self/{name} cannot be written")


def _write(path: str, text: str) -> bool:
    try:
        descriptor = os.open(path, os.O_WRONLY)  # never creates it: a folder may be no cgroup
    except OSError:
        return False
    try:
        os.write(descriptor, text.encode())
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


# -- process 1


def _run_init(config: dict[str, Any], cgroups: list[str], status: int) -> NoReturn:
    """Build what the command sees, start it, and end with it."""
    code = FAILED
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        poller = select.poll()
        poller.register(status, 0)
        if poller.poll(0):  # the reading end is closed: the process outside died before prctl was called
            os._exit(FAILED)
        for folder in cgroups:
            if not _write(f"{folder}/cgroup.procs", "0"):
                raise NotBuilt(f"cannot join the cgroup {folder}")
        _call("unshare", libc.unshare(CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS))
        _call("sethostname", libc.sethostname(b"sandbox", 7))
        build_root(config)
        command = os.fork()
        if command == 0:
            _become(config, status)
        for descriptor in (0, 1, 2, status, *filter(None, [config["verdict"]])):
            os.close(descriptor)
        while True:
            pid, result = os.wait()
            if pid == command:
                code = 0 if result == 0 else FAILED
                break
    except BaseException as error:
        with suppress(OSError):
            os.write(status, str(error).encode())
    finally:
        os._exit(code)


def build_root(config: dict[str, Any]) -> None:
    """Make a read-only root with Python and nothing else, a small /tmp, and five devices."""
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    places = [(path, os.open(path, os.O_PATH)) for path in config["binds"]]
    devices = [(f"/dev/{name}", os.open(f"/dev/{name}", os.O_PATH)) for name in DEVICES]
    root = "/tmp"
    _mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, f"mode=755,size={config['scratch_bytes']},nr_inodes=4096")
    for path, target in config["links"].items():
        os.makedirs(os.path.dirname(root + path), mode=0o755, exist_ok=True)
        os.symlink(target, root + path)
    for path, descriptor in places:
        _bind(descriptor, root + path, ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV)
    for path, descriptor in devices:
        _bind(descriptor, root + path, ATTR_RDONLY | ATTR_NOSUID | ATTR_NOEXEC)
    for path, text in config["files"].items():
        os.makedirs(os.path.dirname(root + path), mode=0o755, exist_ok=True)
        with open(root + path, "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(text)
    os.mkdir(f"{root}/tmp")
    _set_attributes(root, ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV, recursive=False)
    options = f"mode=1777,size={config['scratch_bytes']},nr_inodes=1024"
    _mount("tmpfs", f"{root}/tmp", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, options)
    os.chdir(root)
    _call("pivot_root", libc.syscall(SYS_PIVOT_ROOT[os.uname().machine], b".", b"."))
    _call("umount2", libc.umount2(b".", MNT_DETACH))
    os.chdir("/tmp")


def _bind(descriptor: int, target: str, attributes: int) -> None:
    os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
    if os.path.isdir(f"/proc/self/fd/{descriptor}"):
        os.makedirs(target, mode=0o755, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(f"/proc/self/fd/{descriptor}", target, None, MS_BIND | MS_REC)
    _set_attributes(target, attributes, recursive=True)
    os.close(descriptor)


def _set_attributes(target: str, attributes: int, recursive: bool) -> None:
    attribute = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    flags = AT_RECURSIVE if recursive else 0
    result = libc.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, target.encode(), flags, attribute, ctypes.sizeof(attribute))
    _call(f"mount_setattr {target}", result)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    arguments = [text.encode() if text is not None else None for text in (source, target, kind, options)]
    result = libc.mount(arguments[0], arguments[1], arguments[2], ctypes.c_ulong(flags), arguments[3])
    _call(f"mount {target}", result)


def _call(what: str, result: int) -> None:
    if result != 0:
        raise NotBuilt(f"{what}: {os.strerror(ctypes.get_errno())}")


# -- the command


def _become(config: dict[str, Any], status: int) -> NoReturn:
    """Give up all privileges and become the command; what fails is written to `status`."""
    try:
        os.setsid()
        _keep_descriptors(config["verdict"], status)
        own_uid = _drop_privileges(config["uid_offset"])
        _set_limits(config, own_uid)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        _call("no_new_privs", libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        _install_filter(bytes.fromhex(config["filter"]))
        environment = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8"}
        os.execve(config["command"][0], config["command"], environment)
    except BaseException as error:
        with suppress(OSError):
            os.write(status, (str(error) or type(error).__name__).encode())
    finally:
        os._exit(FAILED)


def _keep_descriptors(verdict: int | None, status: int) -> None:
    """Leave open stdin, stdout, the verdict's as 3 and, until the command starts, `status`."""
    null = os.open("/dev/null", os.O_WRONLY)
    os.dup2(null, 2)
    keep = {0, 1, 2, status}
    if verdict is not None:
        if verdict != 3:
            assert status != 3
            os.dup2(verdict, 3)
        os.set_inheritable(3, True)
        keep.add(3)
    first = 0
    for descriptor in [*sorted(keep), 1 << 20]:
        if first < descriptor:
            os.closerange(first, descriptor)
        first = descriptor + 1


def _drop_privileges(offset: int) -> bool:
    """Become the sandbox's user; return whether the uid is used by no other process."""
    if os.getuid() != 0:
        return True  # in a user namespace; exec takes the capabilities
    os.setgroups([])
    own = True
    for uid in (FIRST_UID + offset, NOBODY):
        try:
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        except OSError as error:
            if error.errno != errno.EINVAL:  # it is not in this container's map of uids
                raise
            own = False
            continue
        return own
    raise NotBuilt("this container has no uid without privileges")


def _set_limits(config: dict[str, Any], own_uid: bool) -> None:
    limits = {
        resource.RLIMIT_AS: config["memory_bytes"],
        resource.RLIMIT_CPU: int(config["seconds"]) + 1,
        resource.RLIMIT_FSIZE: config["scratch_bytes"],
        resource.RLIMIT_NOFILE: config["descriptors"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    if own_uid:
        limits[resource.RLIMIT_NPROC] = config["processes"] + 2
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))


def _install_filter(instructions: bytes) -> None:
    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))

    program = Program(len(instructions) // 8, instructions)
    result = libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0)
    _call("seccomp", result)


if __name__ == "__main__":
    sys.exit(main())
