"""Every layer stops what it is there for, the same attempt works without it, and honest work goes on inside."""

from __future__ import annotations

import ctypes
import ctypes.util
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from qimeng.envs.sandbox import LAYERS, Sandbox, Unavailable, entered_here, places, processes
from qimeng.envs.sandbox.limits import memory_bytes
from qimeng.envs.sandbox.seccomp import ABSENT, REFUSED, program
from qimeng.envs.sandbox.syscalls import AUDIT, NUMBERS
from qimeng.envs.workers.fork_loop import PROCESSES, _kill_greedy
from qimeng.envs.workers.forkserver import ForkServer, Process, WorkerFailed
from qimeng.envs.workers.process_tree import memory_file_bytes
from qimeng.envs.workers.service import serve

PREPARE = """
import ctypes, os, resource, signal, socket, subprocess, tempfile, time
libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    if libc.syscall(*(ctypes.c_long(a) for a in arguments)) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
"""


def hostile(channel):
    """The target of the processes in these tests: runs what it is told, as a candidate's text would run."""

    def attempt(text, names):
        space = dict(names)
        exec(PREPARE, space)
        try:
            exec(text, space)
        except BaseException as error:  # noqa: BLE001  whatever it was is the answer
            return [type(error).__name__, str(error)]
        return ["done", str(space.get("found", ""))]

    serve(channel, {"attempt": attempt, "layers": lambda: list(entered_here().entered)})


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    made = ForkServer(preload=("tests.envs.sandbox.test_sandbox",))
    yield made
    made.close()


@pytest.fixture(scope="module")
def layers() -> set[str]:
    return set(Sandbox("full").layers_available().entered)


@pytest.fixture
def needs(layers):
    def check(*names: str) -> None:
        if missing := set(names) - layers:
            pytest.skip(f"this machine lacks {', '.join(sorted(missing))}")

    return check


@pytest.fixture
def victim() -> Iterator[int]:
    """A process of the same user outside, with a secret in its environment."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={"TOKEN": "secret"})
    yield process.pid
    process.kill()
    process.communicate()


def start(server: ForkServer, level: str) -> Process:
    return server.start("tests.envs.sandbox.test_sandbox:hostile", sandbox=level)


def attempt(server: ForkServer, level: str, text: str, **names: object) -> list[str]:
    process = start(server, level)
    try:
        return process.call("attempt", timeout_s=30, text=text, names=names)[0]
    finally:
        process.kill()


def refused(server: ForkServer, text: str, **names: object) -> None:
    """`text` gets a PermissionError in a full sandbox, and what it wants without one."""
    assert attempt(server, "full", text, **names)[0] == "PermissionError"
    kind, why = attempt(server, "off", text, **names)
    if kind != "done":
        pytest.skip(f"refused in a full sandbox, but this machine forbids it to all: {kind}: {why}")


# -- what a layer stops


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


# -- what it may use


def test_memory_is_limited_to_a_share_of_the_machine(server, needs):
    needs("limits")
    size = memory_bytes() + (1 << 30)
    assert attempt(server, "full", f"import mmap; mmap.mmap(-1, {size}, flags=mmap.MAP_PRIVATE)")[0] == "OSError"
    assert attempt(server, "full", f"bytearray({size})")[0] == "MemoryError"
    assert attempt(server, "full", "bytearray(1 << 28)")[0] == "done"


def test_files_are_limited(server, needs):
    needs("limits")
    kind, text = attempt(server, "full", "f = open('big', 'wb'); os.ftruncate(f.fileno(), 1 << 36)")
    assert kind == "OSError" and "too large" in text


def group_of(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.getpgid(int(entry.name)) == pid:
                found.append(int(entry.name))
        except ProcessLookupError:
            continue
    return found


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while group_of(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not group_of(pid)


def test_a_crowd_of_processes_is_killed(server, needs):
    needs("seccomp")
    process = start(server, "full")
    pid = int(process.call("attempt", timeout_s=30, text="found = os.getpid()", names={})[0][1])
    text = f"""
for _ in range({PROCESSES + 50}):
    if os.fork() == 0:
        time.sleep(60); os._exit(0)
time.sleep(60)
"""
    with pytest.raises(WorkerFailed) as failed:
        process.call("attempt", timeout_s=30, text=text, names={})
    assert failed.value.kind == "crash" and "SIGKILL" in str(failed.value)
    assert gone(pid)
    assert attempt(server, "full", "found = 1") == ["done", "1"]


def test_no_child_leaves_the_group_and_none_outlives_it(server, needs):
    needs("seccomp")
    process = start(server, "full")
    text = """
r, w = os.pipe()
if os.fork() == 0:
    for leave in (os.setsid, lambda: os.setpgid(0, 0)):
        try:
            leave()
        except PermissionError:
            os.write(w, b'x')
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
    os._exit(0)
os.wait()
found = os.getpid(), os.read(r, 9)
"""
    pid, answer = eval(process.call("attempt", timeout_s=30, text=text, names={})[0][1])
    assert answer == b"xx" and len(group_of(pid)) == 2
    process.kill()
    assert gone(pid)


# -- what goes on inside


def test_an_evaluator_takes_open_files_from_a_process(server):
    """What PyTorch's expandable segments need: the judge copies a descriptor out of the worker."""
    process = start(server, "full")
    try:
        text = "f = os.memfd_create('m'); os.write(f, b'segment'); found = os.getpid(), os.dup2(f, 77)"
        pid, fd = eval(process.call("attempt", timeout_s=30, text=text, names={})[0][1])
        pidfd = os.pidfd_open(pid)
        got = ctypes.CDLL(None, use_errno=True).syscall(NUMBERS[os.uname().machine]["pidfd_getfd"], pidfd, fd, 0)
        assert got >= 0, os.strerror(ctypes.get_errno())
        assert os.pread(got, 9, 0) == b"segment"
        os.close(got)
        os.close(pidfd)
    finally:
        process.kill()


def test_a_user_without_rights_enters_as_many_layers(server, layers, needs):
    needs("network")
    if os.getuid() != 0:
        pytest.skip("only root can become another user to try it")
    text = """
from qimeng.envs.sandbox import Sandbox
os.chown('.', 65534, 65534); os.chmod('..', 0o755)
os.setgroups([]); os.setgid(65534); os.setuid(65534)
found = sorted(Sandbox('full').enter(os.getcwd(), files=range(99)).entered), os.getuid(), open('x', 'w').fileno()
"""
    kind, found = attempt(server, "off", text)
    if kind != "done" and "not permitted" in found:
        pytest.skip(f"this machine's users may not make namespaces: {found}")
    assert kind == "done", found
    assert set(eval(found)[0]) == layers and eval(found)[1] == 65534


def test_compilers_threads_and_children_work_inside(server):
    if subprocess.run(["which", "gcc"], capture_output=True).returncode:
        pytest.skip("there is no gcc")
    text = """
import threading
open('a.c', 'w').write('int f(void) { return 42; }')
subprocess.run(['gcc', '-shared', '-o', 'a.so', 'a.c'], check=True)
t = threading.Thread(target=lambda: None); t.start(); t.join()
a, b = socket.socketpair(); a.send(b'x')
child = subprocess.Popen(['sleep', '60']); child.kill(); child.wait()
found = ctypes.CDLL(os.getcwd() + '/a.so').f(), b.recv(1), os.nice(1)
"""
    process = start(server, "full")
    try:
        assert process.call("attempt", timeout_s=60, text=text, names={})[0][0] == "done", process.log()
    finally:
        process.kill()


def test_a_process_says_which_layers_it_is_in(server, layers):
    for level, expected in (("full", layers), ("basic", {"no_new_privs"}), ("off", set())):
        process = start(server, level)
        assert set(process.call("layers", timeout_s=30)[0]) == expected
        process.kill()
    with pytest.raises(ValueError, match="there are full, tool, host, basic, off"):
        server.start("tests.envs.sandbox.test_sandbox:hostile", sandbox="none")


def test_a_host_starts_processes_in_sandboxes_of_their_own(server, layers, needs):
    needs("landlock")
    needs("seccomp")
    text = """
from qimeng.envs.sandbox import Sandbox
os.mkdir('inner'); open('secret', 'w').write('of the host')
read, write = os.pipe()
pid = os.fork()
if pid == 0:
    try:
        os.setsid()
        entered = set(Sandbox('full').enter(os.getcwd() + '/inner', files=[write]).entered)
        open('here', 'w').close()
        try:
            open('../secret'); said = 'read'
        except PermissionError:
            said = 'refused'
        try:
            os.setsid(); said += ', led a group'
        except PermissionError:
            said += ', refused'
        os.write(write, repr((said, {'landlock', 'seccomp'} <= entered)).encode())
    except BaseException as error:
        os.write(write, repr(error).encode())
    os._exit(0)
os.waitpid(pid, 0)
found = os.read(read, 999).decode()
"""
    kind, found = attempt(server, "host", text)
    assert (kind, found) == ("done", "('refused, refused', True)")
    assert attempt(server, "host", "open('/etc/shadow')")[0] == "PermissionError"


def test_what_a_host_starts_may_name_its_threads_and_write_nothing_of_the_kernels(server, needs, victim):
    needs("landlock", "shared_memory")
    text = """
        pid = os.fork()
        if pid == 0:
            with open(f'/proc/self/task/{os.getpid()}/comm', 'w') as file:
                file.write('named')
            os._exit(open('/proc/self/comm').read() != 'named\\n')
        assert os.waitpid(pid, 0)[1] == 0
        found = []
        for path in ('sys/kernel/hostname', 'sys/kernel/core_pattern', f'{victim}/oom_score_adj'):
            try:
                os.close(os.open('/proc/' + path, os.O_WRONLY))
                found.append(path)
            except OSError as error:
                found.append(type(error).__name__)
    """
    kind, found = attempt(server, "host", textwrap.dedent(text), victim=victim)
    others = "PermissionError" if os.geteuid() == 0 else f"{victim}/oom_score_adj"  # hidden by root alone
    assert (kind, found) == ("done", str(["OSError", "OSError", others]))


def test_devices_are_found_where_their_folder_cannot_be_listed(server, needs):
    needs("landlock")
    text = """
        from glob import glob
        from qimeng.envs.sandbox import places
        assert not glob("/dev/nul*")
        places._GPUS, places._GPU_NODES = ("/dev/nul*",), ("", "/../null", "ctl")
        places.os.path.exists = lambda path: os.path.lexists(path.replace("/dev/nvidia/../", "/dev/"))
        found = places.devices()[5:-1]
    """
    assert attempt(server, "host", textwrap.dedent(text)) == ["done", "['/dev/nvidia/../null']"]


def test_a_folder_of_packages_is_readable_whatever_its_name(tmp_path, monkeypatch):
    packages, own = tmp_path / "packages", tmp_path / "own"
    (packages / "some-1.0.dist-info").mkdir(parents=True)
    (packages / "some-1.0.dist-info" / "RECORD").touch()
    own.mkdir()
    monkeypatch.setattr(sys, "path", [str(packages), str(own)])
    assert str(packages) in places.readable()
    assert str(own) not in places.readable()


def test_sockets_that_cuda_needs_are_closed_before_foreign_code_runs():
    """In every thread, those that run already as well."""
    text = (
        "import socket, threading\n"
        "import qimeng.envs.sandbox.seccomp as s\n"
        "def tried():\n"
        "    try:\n"
        "        socket.socket(socket.AF_UNIX).close(); return 'made'\n"
        "    except PermissionError: return 'refused'\n"
        "s.enter('local'); first = tried()\n"
        "go, seen = threading.Event(), []\n"
        "other = threading.Thread(target=lambda: (go.wait(), seen.append(tried()))); other.start()\n"
        "s.close_sockets(); go.set(); other.join()\n"
        "socket.socketpair(); print(first, tried(), *seen)"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    if "Unavailable" in done.stderr:
        pytest.skip(f"no seccomp here: {done.stderr.strip().splitlines()[-1]}")
    assert done.stdout.split() == ["made", "refused", "refused"], done.stderr


def test_a_layer_that_is_missing_is_skipped_and_said(tmp_path):
    """Nested in a sandbox, a process may make no namespace: that layer is missing there, the others are entered."""
    text = (
        "import json; from dataclasses import asdict; from qimeng.envs.sandbox import Sandbox\n"
        "import qimeng.envs.sandbox.seccomp as s\n"
        f"s.enter(); print(json.dumps(asdict(Sandbox('full').enter({str(tmp_path)!r}))))"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no seccomp here: {done.stderr.strip().splitlines()[-1]}")
    report = json.loads(done.stdout)
    assert "Operation not permitted" in report["skipped"]["network"]
    assert set(report["entered"]) | set(report["skipped"]) == set(LAYERS)


def test_the_numbers_of_system_calls_are_those_of_libseccomp():
    path = ctypes.util.find_library("seccomp")
    if path is None:
        pytest.skip("libseccomp is not here")
    resolve = ctypes.CDLL(path).seccomp_syscall_resolve_name_arch
    for architecture, numbers in NUMBERS.items():
        known = {name: resolve(AUDIT[architecture], name.encode()) for name in numbers}
        newer = {name for name, number in known.items() if number == -1}  # than this libseccomp
        assert len(newer) < 9
        assert {n: number for n, number in known.items() if n not in newer} == {
            n: number for n, number in numbers.items() if n not in newer
        }


@pytest.mark.parametrize("architecture", NUMBERS)
def test_every_path_through_the_filter_ends_in_a_return(architecture):
    instructions = program(architecture)
    for at, instruction in enumerate(instructions):
        if instruction.code not in (0x20, 0x06):
            assert at + 1 + max(instruction.if_true, instruction.if_false) < len(instructions)
    assert instructions[-1].code == 0x06 and len(instructions) < 4096


def test_signals_reach_a_process_from_its_judge(server):
    process = start(server, "full")
    pid = int(process.call("attempt", timeout_s=30, text="found = os.getpid()", names={})[0][1])
    os.kill(pid, signal.SIGTERM)
    with pytest.raises(WorkerFailed, match="SIGTERM"):
        process.call("attempt", timeout_s=30, text="", names={})


def test_without_mounts_of_its_own_a_process_changes_none() -> None:
    before = Path("/proc/mounts").read_text()
    with pytest.raises(Unavailable, match="no mounts of its own"):
        processes.enter(own_mounts=False)
    assert Path("/proc/mounts").read_text() == before
