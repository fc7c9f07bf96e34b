"""The real thing: `transformers serve` with a small random model, offline, through the openai client.

Needs the extra `serving`: pip install 'qimeng[serving]'.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from qimeng import plan_and_code
from qimeng.coder.hybrid import HybridCoder
from qimeng.coder.llm.account import Account, Allowance
from qimeng.coder.llm.chat import Message
from qimeng.coder.llm.coder import LLMCoder
from qimeng.coder.llm.openai_chat import OpenAIChat
from qimeng.spec import KernelSpec
from qimeng.store import Store
from tests.coder.llm.models import make_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not all(map(find_spec, ("openai", "fastapi", "uvicorn"))), reason="needs the extra serving"),
]

COMMAND = """
from importlib.metadata import entry_points
(command,) = entry_points(group="console_scripts", name="transformers")
command.load()()
"""
UP_S = 120.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Base URL and name of the model."""
    folder = make_model(tmp_path_factory.mktemp("model"), context=32_768)
    cache = tmp_path_factory.mktemp("hub")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    where = ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    command = [sys.executable, "-c", COMMAND, "serve", str(folder), *where]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    log = (folder / "log").open("wb")
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        until = time.monotonic() + UP_S
        while not _is_up(f"http://127.0.0.1:{port}/health"):
            assert process.poll() is None, (folder / "log").read_text()[-2000:]
            assert time.monotonic() < until, "the server does not come up"
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1", str(folder)
    finally:
        process.terminate()
        process.wait(30)
        log.close()


def _is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def test_it_answers(server: tuple[str, str]) -> None:
    url, model = server
    with closing(OpenAIChat(model, url, max_tokens=16)) as chat:
        replies = list(chat.ask([Message("system", "you write"), Message("user", "write")], 3))
    assert len(replies) == 3 and len({r.text for r in replies}) > 1
    assert all(r.prompt_tokens == 19 and 0 < r.reply_tokens <= 16 for r in replies)


@pytest.mark.parametrize("hybrid", [False, True], ids=["alone", "hybrid"])
def test_a_whole_run_ends_with_a_right_program(hybrid: bool, server: tuple[str, str], tmp_path: Path) -> None:
    """Whatever the model says."""
    url, model = server
    account = Account(Allowance(calls=4))
    chat = OpenAIChat(model, url, max_tokens=16)
    writer = LLMCoder(chat, account, candidates=2)
    coder = HybridCoder(writer, patience=0) if hybrid else writer
    x = torch.randn(8, 64)
    spec = KernelSpec.from_function(lambda x: torch.kthvalue(torch.relu(x) * 3, 60)[0], (x,))
    store = Store(tmp_path / "s.sqlite")
    result = plan_and_code(
        spec, seconds=300, evaluations=8, coder=coder, device="h200", store=store, planner="heuristic", search="greedy"
    )
    chat.close()
    assert result.evaluation.ok, result.evaluation
    assert result.evaluation.accuracy is not None  # checked; where it is Triton's, in the interpreter
    if not hybrid:
        torch.testing.assert_close(result.module(x), torch.kthvalue(torch.relu(x) * 3, 60)[0])
    counts, told = store.counts(), f"{account}; {[(s.action.kind, s.evaluation) for s in result.steps]}"
    assert (account.calls, counts["replies"], counts["attempts"]) == (4, 4, 4), told
    failures = {s.evaluation.failure for s in result.steps if s.evaluation is not None and not s.accepted}
    assert failures and all((failure or "").startswith("model-") for failure in failures), told
    assert any(note.startswith(f"openai:{model}: 4 answers") for note in result.notes), result.notes
