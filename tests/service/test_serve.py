"""`qimeng serve`: tokens, addresses, and one whole trip."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qimeng.cli import main
from qimeng.service.client import EvaluationClient, ServiceFailed
from qimeng.service.errors import ServiceError
from qimeng.service.server import check_address
from qimeng.service.tokens import TokenError, Tokens, make_token, read_tokens
from tests.service.test_hosting import FUNCTION, REFERENCE

ROOT = Path(__file__).resolve().parents[2]


def test_a_new_token_is_its_owners(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "tokens"
    token = make_token(path)
    assert path.stat().st_mode & 0o777 == 0o600
    tokens = read_tokens(path)
    assert (tokens.client_of(token), tokens.client_of(token + "x"), tokens.client_of("")) == ("client", None, None)
    with pytest.raises(FileExistsError):
        make_token(path)


def test_a_file_names_each_client(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"# who may ask\nanna {'a' * 16}  # a remark\n\n{'b' * 16}\n")
    path.chmod(0o600)
    tokens = read_tokens(path)
    assert [tokens.client_of(letter * 16) for letter in "abc"] == ["anna", "client 4", None]
    path.chmod(0o640)
    with pytest.raises(TokenError, match="chmod 600"):
        read_tokens(path)
    path.chmod(0o600)
    for text, says in (("", "no token"), ("anna short", "at least 16"), (f"a {'b' * 16} c", "line 1")):
        path.write_text(text)
        with pytest.raises(TokenError, match=says):
            read_tokens(path)


def test_without_a_token_only_this_machine_may_ask() -> None:
    for address in ("127.0.0.1", "::1", "localhost"):
        check_address(address, None)
    for address in ("0.0.0.0", "::", "192.168.0.7", "example.org"):
        with pytest.raises(ServiceError, match="without a token"):
            check_address(address, None)
        check_address(address, Tokens({"anna": "a" * 16}))


def test_the_command_refuses_what_is_open_to_all(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("QIMENG_SERVICE_TOKEN", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--host", "0.0.0.0"])
    assert ended.value.code == 2
    assert "use --token-file [service]" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--device", "zz"])
    assert ended.value.code == 2 and "unknown device 'zz'; known: " in capsys.readouterr().err


@pytest.mark.slow
def test_a_whole_trip(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    tokens = tmp_path / "tokens"
    command = [sys.executable, "-m", "qimeng.cli", "serve", "--port", str(port), "--token-file", str(tokens)]
    command += ["--device", "h100", "--seconds", "300"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as server:
        try:
            client = _client_of(f"http://127.0.0.1:{port}", tokens, server)
            assert client.evaluate(REFERENCE, FUNCTION).correct is True
            wrong = client.evaluate(REFERENCE, FUNCTION.replace("tl.maximum(total, 0.0)", "total"))
            assert wrong.fault is not None and wrong.fault.failure == "wrong"
            held = client.submit("while True: pass\n", FUNCTION)
            while client.metrics()["running"] == 0:
                time.sleep(0.1)
            client.cancel(held)
            metrics = client.metrics()
            assert metrics["faults"] == {"kernel": 1}
            assert (metrics["judge"]["device"], metrics["judge"]["measured"]) == ("h100", False)
            assert wrong.versions["evaluator"].startswith("EstimatingEvaluator")
        finally:
            server.send_signal(signal.SIGINT)
            said, _ = server.communicate(timeout=60)
    token = tokens.read_text().split()[1]
    assert said.count(token) == 1, "a new token is shown once"


def _client_of(address: str, tokens: Path, server: subprocess.Popen[str]) -> EvaluationClient:
    """A client, once the server answers."""
    until = time.monotonic() + 120
    while True:
        try:
            client = EvaluationClient(address, tokens.read_text().split()[1])
            client.metrics()
            return client
        except (ServiceFailed, FileNotFoundError):
            assert time.monotonic() < until and server.poll() is None
            time.sleep(0.3)
