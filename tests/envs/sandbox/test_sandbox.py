"""What a layer stops: the same attempt works without it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from qimeng.envs.sandbox import Unavailable, processes
from qimeng.envs.sandbox.seccomp import ABSENT, REFUSED
from qimeng.envs.sandbox.syscalls import NUMBERS
from qimeng.envs.workers.fork_loop import _kill_greedy
from qimeng.envs.workers.forkserver import ForkServer
from qimeng.envs.workers.process_tree import memory_file_bytes
from tests.envs.sandbox.attempts import attempt, refused, start


@pytest.mark.parametrize(
    "text",
    [
        "open(outside + '/new', 'w').write('x')",
        "open(outside + '/file', 'a').write('x')",
        "open(outside + '/file').read()",
        "os.listdir(outside)",
        "os.rename(outside + '/file', outside + '/moved')",
        "os.mkdir(outside + '/folder')",
        "os.truncate(outside + '/file', 0)",
        "os.symlink('/etc', outside + '/link')",
    ],
)
def test_files_outside_are_neither_written_nor_read(server, needs, tmp_path, text):
    needs("landlock")
    (tmp_path / "file").write_text("reference")
    refused(server, text, outside=str(tmp_path))


@pytest.mark.parametrize(
    "text",
    [
        "os.chmod(path, 0o777)",
        "os.chmod(os.path.basename(path), 0o777, dir_fd=os.open(os.path.dirname(path), os.O_PATH))",
        "f = os.open(program, os.O_RDONLY); os.fchmod(f, 0o4777)",
        "os.utime(path, (1, 1))",
        "os.chown(path, os.getuid(), -1)",
        "os.setxattr(path, 'user.x', b'x')",
    ],
)
def test_modes_and_times_of_files_outside_stay(server, needs, tmp_path, text):
    needs("seccomp")
    path, program = tmp_path / "file", Path(sys.prefix, f"qimeng_test_{os.getpid()}")
    for file in (path, program):
        file.touch(mode=0o600)
    try:
        before = [os.stat(f) for f in (path, program)]
        assert attempt(server, "full", text, path=str(path), program=str(program))[0] == "done"
        assert [os.stat(f) for f in (path, program)] == before and os.listxattr(path) == []
    finally:
        program.unlink()


def test_the_own_folder_is_written_and_temporary_files_are_there(server):
    text = "open('x', 'w').write('1'); os.mkdir('d'); os.replace('x', 'd/x'); found = tempfile.mkdtemp()"
    process = start(server, "full")
    try:
        state, found = process.call("attempt", timeout_s=30, text=text, names={})[0]
        assert state == "done" and Path(found).parent == process.folder
    finally:
        process.kill()


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_there_is_no_network(server, needs, kind):
    needs("seccomp")
    with socket.socket(socket.AF_INET, kind) as listening:
        listening.bind(("127.0.0.1", 0))
        if kind == socket.SOCK_STREAM:
            listening.listen()
        port = listening.getsockname()[1]
        refused(server, f"socket.socket(socket.AF_INET, {int(kind)}).connect(('127.0.0.1', {port}))")


def test_a_service_behind_a_file_is_out_of_reach(server, needs, tmp_path):
    needs("seccomp")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        listening.listen()
        refused(server, "socket.socket(socket.AF_UNIX).connect(path)", path=str(tmp_path / "s"))


@pytest.mark.parametrize(
    "text",
    [
        "socket.socket(socket.AF_UNIX)",
        "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)",
        "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
        "a, b = socket.socketpair(); a.bind(os.getcwd() + '/s')",
    ],
)
def test_there_is_no_socket_but_a_pair(server, needs, text):
    needs("seccomp")
    refused(server, text)
    pairs = "held = [socket.socketpair(socket.AF_UNIX, k) for k in (1, 5)]; found = [a.send(b'x') for a, b in held]"
    assert attempt(server, "full", pairs) == ["done", "[1, 1]"]


def test_only_folders_of_packages_are_read(server, needs):
    needs("landlock")
    package = os.path.dirname(os.path.dirname(os.path.abspath(json.__file__)))
    assert attempt(server, "full", f"os.listdir({package!r})")[0] == "done"
    refused(server, f"os.listdir({os.getcwd()!r})")
    refused(server, f"os.listdir({str(Path.home())!r})")


def test_shared_memory_is_small_its_own_and_empty(server, needs):
    needs("shared_memory")
    with open(f"/dev/shm/qimeng_test_{os.getpid()}", "w") as mine:
        mine.write("secret")
        text = "found = os.listdir('/dev/shm'); open('/dev/shm/x', 'w').write('x')"
        assert attempt(server, "full", text) == ["done", "[]"]
        os.unlink(mine.name)
    assert not os.path.exists("/dev/shm/x")
    text = "open('/dev/shm/x', 'wb').write(bytes(1 << 27))"
    kind, why = attempt(server, "full", text)
    assert kind == "OSError" and "No space left" in why


def test_memory_files_are_counted_and_have_a_limit(needs, monkeypatch):
    needs("seccomp")
    code = (
        "import os, time\nf = os.memfd_create('m')\nos.write(f, bytes(1 << 24))\nprint(1, flush=True)\ntime.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert holder.stdout and holder.stdout.readline()
    assert memory_file_bytes([holder.pid, holder.pid]) == 1 << 24
    killed: list[int] = []
    monkeypatch.setattr("qimeng.envs.workers.fork_loop._kill_tree", killed.append)
    _kill_greedy([holder.pid])
    assert not killed
    monkeypatch.setattr("qimeng.envs.workers.fork_loop.MEMORY_FILE_BYTES", 1 << 20)
    _kill_greedy([holder.pid])
    assert killed == [holder.pid]
    holder.kill()
    holder.communicate()


def test_the_network_is_empty(server, needs):
    needs("network")
    text = "found = [line.split(':')[0].strip() for line in open('/proc/self/net/dev').readlines()[2:]]"
    names = eval(attempt(server, "full", text)[1])
    assert "lo" in names and not any(name.startswith(("eth", "en", "wl")) for name in names)


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        ("landlock", "assert 'secret' in open(f'/proc/{victim}/environ').read()"),
        ("landlock", "os.readlink(f'/proc/{victim}/fd/0')"),
        ("landlock", "open(f'/proc/{victim}/mem', 'rb').close()"),
        ("landlock", "os.kill(victim, 0)"),
        ("seccomp", "call(numbers['ptrace'], 0x4206, victim, 0, 0)"),
        ("seccomp", "call(numbers['pidfd_getfd'], os.pidfd_open(victim), 0, 0)"),
        ("seccomp", "call(numbers['kcmp'], os.getpid(), victim, 1, 0, 0)"),
        ("seccomp", "resource.prlimit(victim, resource.RLIMIT_NOFILE, (64, 64))"),
        ("seccomp", "os.setpriority(os.PRIO_PROCESS, victim, 10)"),
        ("seccomp", "os.sched_setaffinity(victim, os.sched_getaffinity(victim))"),
    ],
)
def test_other_processes_are_left_alone(server, needs, victim, layer, text):
    needs(layer)
    refused(server, text, victim=victim, numbers=NUMBERS[os.uname().machine])


def test_every_refused_call_fails(server, needs):
    needs("seccomp", "capabilities")
    numbers = NUMBERS[os.uname().machine]
    text = """
found = []
for name, number in numbers.items():
    if name in names:
        libc.syscall(*[ctypes.c_long(a) for a in (number, -1, -1, -1, -1, -1)])
        found.append(ctypes.get_errno())
found = set(found)
"""
    assert eval(attempt(server, "full", text, numbers=numbers, names=REFUSED)[1]) == {1}  # EPERM
    assert eval(attempt(server, "full", text, numbers=numbers, names=ABSENT)[1]) == {38}  # ENOSYS


def test_namespaces_and_set_uid_give_no_rights(server, needs):
    needs("seccomp", "capabilities", "no_new_privs")
    text = (
        "found = dict(line.split(':\\t') for line in open('/proc/self/status').read().splitlines() if ':\\t' in line)"
    )
    status = eval(attempt(server, "full", text)[1])
    assert {int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
    assert status["NoNewPrivs"] == "1" and status["Seccomp"] == "2"
    numbers = NUMBERS[os.uname().machine]
    text = "call(numbers['clone'], 0x10000000 | 17, 0)"
    assert attempt(server, "full", text, numbers=numbers)[0] == "PermissionError"


def test_nothing_is_inherited(monkeypatch):
    for name in ("OPENAI_API_KEY", "TORCH_SECRET", "CUDA_SECRET", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, "secret")
    server = ForkServer(preload=())
    try:
        process = start(server, "full")
        text = "found = dict(os.environ)"
        environment = eval(process.call("attempt", timeout_s=60, text=text, names={})[0][1])
        assert "secret" not in environment.values()
        assert environment["HOME"] == environment["TMPDIR"] == str(process.folder)
        text = """
def name(n):
    try:
        return os.readlink(f'/proc/self/fd/{n}').split(':')[0]
    except OSError:  # the listing's own
        return ''
found = [n for n in map(name, os.listdir('/proc/self/fd')) if n]
"""
        files = eval(process.call("attempt", timeout_s=30, text=text, names={})[0][1])
        assert sorted(files) == ["/dev/null", "/memfd", "/memfd", "socket"]
        process.kill()
    finally:
        server.close()


def test_without_mounts_of_its_own_a_process_changes_none() -> None:
    before = Path("/proc/mounts").read_text()
    with pytest.raises(Unavailable, match="no mounts of its own"):
        processes.enter(own_mounts=False)
    assert Path("/proc/mounts").read_text() == before


def test_nothing_is_imported_from_the_folder_that_a_process_works_in(server):
    text = "os.makedirs('qz', exist_ok=True)\nimport qz"
    assert attempt(server, "full", text)[0] == "ModuleNotFoundError"
