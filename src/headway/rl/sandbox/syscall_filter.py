"""The system calls that code in a sandbox may not make, as a seccomp filter: pure arithmetic.

The namespaces do not cover what these reach: sockets of the hypervisor (AF_VSOCK belongs to no network namespace),
memory that no limit counts (memfd, System V), keys, other processes' memory, and parts of the kernel where privileges
were most often gained. Each fails with EPERM, clone3 with ENOSYS so that the C library falls back to clone.
"""

import errno
import struct

DENIED = {
    "x86_64": {
        "shmget": 29, "shmat": 30, "socket": 41, "semget": 64, "msgget": 68, "ptrace": 101, "syslog": 103,
        "personality": 135, "modify_ldt": 154, "pivot_root": 155, "adjtimex": 159, "chroot": 161, "acct": 163,
        "settimeofday": 164, "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169, "iopl": 172,
        "ioperm": 173, "init_module": 175, "delete_module": 176, "quotactl": 179, "clock_settime": 227, "mq_open": 240,
        "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250, "unshare": 272, "vmsplice": 278,
        "perf_event_open": 298, "fanotify_init": 300, "name_to_handle_at": 303, "open_by_handle_at": 304,
        "clock_adjtime": 305, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312,
        "finit_module": 313, "memfd_create": 319, "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323,
    },
    "aarch64": {
        "umount2": 39, "mount": 40, "pivot_root": 41, "chroot": 51, "quotactl": 60, "vmsplice": 75, "acct": 89,
        "personality": 92, "unshare": 97, "kexec_load": 104, "init_module": 105, "delete_module": 106,
        "clock_settime": 112, "syslog": 116, "ptrace": 117, "reboot": 142, "settimeofday": 170, "adjtimex": 171,
        "mq_open": 180, "msgget": 186, "semget": 190, "shmget": 194, "shmat": 196, "socket": 198, "add_key": 217,
        "request_key": 218, "keyctl": 219, "swapon": 224, "swapoff": 225, "perf_event_open": 241, "fanotify_init": 262,
        "name_to_handle_at": 264, "open_by_handle_at": 265, "clock_adjtime": 266, "setns": 268,
        "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "finit_module": 273, "memfd_create": 279,
        "bpf": 280, "userfaultfd": 282, "kexec_file_load": 294,
    },
}  # fmt: skip
"""System calls by machine, as in its asm/unistd.h."""
DENIED_EVERYWHERE = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_open": 434, "pidfd_getfd": 438,
    "mount_setattr": 442, "quotactl_fd": 443, "memfd_secret": 447,
}  # fmt: skip
"""Newer ones have the same number on all machines."""
CLONE = {"x86_64": 56, "aarch64": 220}
CLONE3 = 435
NEW_NAMESPACES = 0x7E020000
"""Flags of clone that make namespaces."""

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCH_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_KILL, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000


def filter_bytes(machine: str) -> bytes:
    """Return the filter of a machine (`x86_64`, `aarch64`) as an array of struct sock_filter."""
    denied = sorted({*DENIED[machine].values(), *DENIED_EVERYWHERE.values()})
    program = [
        _instruction(_LOAD, _ARCH_AT),
        _instruction(_JUMP_EQUAL, _AUDIT_ARCH[machine], 1, 0),
        _instruction(_RETURN, _KILL),  # 32-bit calls have other numbers
        _instruction(_LOAD, _NUMBER_AT),
        _instruction(_JUMP_AT_LEAST, _X32_BIT, 0, 1),
        _instruction(_RETURN, _ERRNO | errno.EPERM),
        _instruction(_JUMP_EQUAL, CLONE3, 0, 1),  # its flags are in memory, where no filter can look
        _instruction(_RETURN, _ERRNO | errno.ENOSYS),
    ]
    for number in denied:
        program += [_instruction(_JUMP_EQUAL, number, 0, 1), _instruction(_RETURN, _ERRNO | errno.EPERM)]
    program += [
        _instruction(_JUMP_EQUAL, CLONE[machine], 0, 3),
        _instruction(_LOAD, _FIRST_ARGUMENT_AT),
        _instruction(_JUMP_SET, NEW_NAMESPACES, 0, 1),
        _instruction(_RETURN, _ERRNO | errno.EPERM),
        _instruction(_RETURN, _ALLOW),
    ]
    return b"".join(program)


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)
