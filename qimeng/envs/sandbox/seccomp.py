"""Limits the system calls of a process to those that computing, compiling and CUDA need.

Deals in a small program for the kernel's filter (classic BPF), which it checks at every call. A refused call returns an
error, so libraries that only probe for it continue. Knows nothing about files, which are landlock's. Source:
seccomp(2).
"""

from __future__ import annotations

import ctypes
import errno
import struct
from collections.abc import Collection
from dataclasses import dataclass

from qimeng.envs.sandbox.layer import Unavailable, machine, prctl, syscall
from qimeng.envs.sandbox.syscalls import AUDIT, NUMBERS

REFUSED = (
    # other processes' memory, files and tracing
    "ptrace process_vm_readv process_vm_writev process_madvise kcmp pidfd_getfd "
    # the kernel: programs in it, counters, faults, keys, modules, itself
    "bpf perf_event_open userfaultfd keyctl add_key request_key init_module finit_module delete_module kexec_load "
    "kexec_file_load reboot syslog lookup_dcookie fanotify_init migrate_pages "
    # file systems and namespaces
    "mount umount2 pivot_root chroot move_mount open_tree fsopen fsconfig fsmount fspick mount_setattr unshare setns "
    "open_by_handle_at quotactl quotactl_fd acct swapon swapoff "
    # the machine's names, clocks and ports
    "sethostname setdomainname settimeofday clock_settime clock_adjtime adjtimex iopl ioperm modify_ldt uselib vhangup "
    "nfsservctl "
    # leaving the process group, which is killed as a whole
    "setsid setpgid "
    # memory and queues that outlive a process, or that no limit counts
    "shmget semget msgget mq_open memfd_secret"
).split()
"""Fail with EPERM."""

HOSTS = "unshare setsid setpgid pidfd_getfd".split()
"""Of these, what a judge in a sandbox needs: its own processes enter sandboxes too, lead groups, and hand over the
memory that they hold on a GPU."""

SOCKETS = "socket connect bind listen accept accept4".split()
"""Fail with EPERM as well: a pair of sockets is all that a process needs (`socketpair`, for streams: one for datagrams
could send to any socket that has a name)."""

ABSENT = (
    "io_uring_setup io_uring_enter io_uring_register clone3 setxattrat removexattrat open_tree_attr file_setattr"
).split()
"""Fail with ENOSYS, as on an older kernel: a filter cannot see what they ask for, or they are new."""

PRETENDED = (
    "chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat setxattr lsetxattr fsetxattr removexattr "
    "lremovexattr fremovexattr utime utimes futimesat utimensat"
).split()
"""Succeed and do nothing: modes, owners and times of files, which landlock leaves open wherever they lie, and which
linkers and copies set in passing."""

ONLY_SELF = {
    "prlimit64": 0,
    "setpriority": 1,
    "sched_setaffinity": 0,
    "sched_setscheduler": 0,
    "sched_setparam": 0,
    "sched_setattr": 0,
    "ioprio_set": 1,
}
"""Number of the argument that names a process: only 0, the caller, is allowed."""

_NEW_NAMESPACES = 0x7E020000
"""Flags of clone that ask for a namespace of any kind."""
_AF_UNIX = 1
_KIND, _STREAMS = 0xF, (1, 5)
_X32 = 0x40000000
_SET_FILTER, _ALL_THREADS = 1, 1  # SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN, _AND = 0x20, 0x15, 0x35, 0x45, 0x06, 0x54
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data; little-endian: low words come first


@dataclass(frozen=True)
class Instruction:
    """One instruction; the jumps count instructions to leave out."""

    code: int
    value: int
    if_true: int = 0
    if_false: int = 0

    def pack(self) -> bytes:
        """As the kernel's struct sock_filter."""
        return struct.pack("=HBBI", self.code, self.if_true, self.if_false, self.value)


def program(architecture: str, sockets: str = "pairs", spared: Collection[str] = ()) -> list[Instruction]:
    """The filter for `architecture` (a key of `syscalls.NUMBERS`).

    Args:
        architecture: of the kernel.
        sockets: ``"pairs"`` and no others; ``"local"`` (those with a name on this machine as well, but none is ever
            connected: CUDA makes one when it begins); ``"all"``, for what has a network of its own.
        spared: system calls among `REFUSED` that are allowed all the same.
    """
    numbers = NUMBERS[architecture]
    denied, absent, done = (Instruction(_RETURN, _ERROR | number) for number in (errno.EPERM, errno.ENOSYS, 0))
    allowed = Instruction(_RETURN, _ALLOW)
    out = [
        Instruction(_LOAD, _ARCHITECTURE),
        Instruction(_EQUAL, AUDIT[architecture], 1, 0),
        Instruction(_RETURN, _KILL),  # the 32-bit entry into the kernel has other numbers
        Instruction(_LOAD, _NUMBER),
    ]
    if architecture == "x86_64":
        out += [Instruction(_AT_LEAST, _X32, 0, 1), absent]
    refused = {"pairs": SOCKETS, "local": ["connect"], "all": []}[sockets]
    never = [name for name in REFUSED if name not in spared]
    for names, answer in ((never, denied), (refused, denied), (ABSENT, absent), (PRETENDED, done)):
        for name in names:
            if name in numbers:
                out += [Instruction(_EQUAL, numbers[name], 0, 1), answer]
    for name, argument in ONLY_SELF.items():
        out += [*_argument(numbers[name], argument), Instruction(_EQUAL, 0, 0, 1), allowed, denied]
    if sockets == "local":
        out += [*_argument(numbers["socket"], 0), Instruction(_EQUAL, _AF_UNIX, 0, 1), allowed, denied]
    if sockets != "all":
        out += _pairs(numbers, allowed, denied)
    out += [*_argument(numbers["clone"], 0), Instruction(_ANY_BIT, _NEW_NAMESPACES, 0, 1), denied, allowed]
    return [*out, allowed]


def _argument(number: int, argument: int) -> list[Instruction]:
    """For system call `number` load an argument and go on with the next three instructions; else leave them out."""
    return [Instruction(_EQUAL, number, 0, 4), Instruction(_LOAD, _ARGUMENTS + 8 * argument)]


def _pairs(numbers: dict[str, int], allowed: Instruction, denied: Instruction) -> list[Instruction]:
    """Of pairs of sockets, those for streams are allowed."""
    return [
        Instruction(_EQUAL, numbers["socketpair"], 0, 8),
        Instruction(_LOAD, _ARGUMENTS),
        Instruction(_EQUAL, _AF_UNIX, 0, 4),
        Instruction(_LOAD, _ARGUMENTS + 8),
        Instruction(_AND, _KIND),
        Instruction(_EQUAL, _STREAMS[0], 2, 0),
        Instruction(_EQUAL, _STREAMS[1], 1, 0),
        denied,
        allowed,
    ]


def enter(sockets: str = "pairs", spared: Collection[str] = ()) -> str:
    """Put the filter in force, for this process and its children, for good.

    Args:
        sockets: see `program`.
        spared: see `program`.

    Raises:
        Unavailable: the kernel has no filters, or the architecture is unknown.
    """
    _put_in_force(program(machine(), sockets, spared))
    said = {"pairs": "no sockets but pairs", "local": "no connections", "all": "sockets allowed"}[sockets]
    return f"{len(REFUSED) - len(spared)} system calls refused, {said}"


def close_sockets() -> None:
    """Refuse all sockets but pairs from now on, to every thread of this process: CUDA has begun.

    Raises:
        Unavailable: as of `enter`.
    """
    numbers = NUMBERS[machine()]
    denied, allowed = Instruction(_RETURN, _ERROR | errno.EPERM), Instruction(_RETURN, _ALLOW)
    out = [Instruction(_LOAD, _NUMBER)]
    for name in SOCKETS:
        out += [Instruction(_EQUAL, numbers[name], 0, 1), denied]
    _put_in_force([*out, allowed])


def _put_in_force(instructions: list[Instruction]) -> None:
    body = ctypes.create_string_buffer(b"".join(i.pack() for i in instructions))
    pointer_at = struct.calcsize("P")
    header = ctypes.create_string_buffer(struct.pack("H", len(instructions)).ljust(pointer_at, b"\0"), 2 * pointer_at)
    struct.pack_into("P", header, pointer_at, ctypes.addressof(body))
    prctl(38, 1)  # PR_SET_NO_NEW_PRIVS, without which only root may
    address = ctypes.c_void_p(ctypes.addressof(header))
    if thread := syscall(NUMBERS[machine()]["seccomp"], _SET_FILTER, _ALL_THREADS, address):
        raise Unavailable(f"thread {thread} cannot take the filter")


__all__ = [
    "ABSENT", "HOSTS", "ONLY_SELF", "PRETENDED", "REFUSED", "SOCKETS", "Instruction", "close_sockets", "enter",
    "program",
]  # fmt: skip
