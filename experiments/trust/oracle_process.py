"""Asks an oracle in a process of its own, which is started again where it has died.

Deals in a child process and lines of JSON. Knows nothing about what the oracle does.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from experiments.trust.oracle import Finding, Question
from qimeng.errors import QimengError

ROOT = Path(__file__).parents[2]
"""From where the oracle's process finds its module."""

START_S = 300.0
"""Seconds in which the oracle must have made its float64 results."""
ANSWER_S = 30.0
"""Seconds that an answer may take beyond the limit that the oracle was given."""


class OracleDied(QimengError):
    """The oracle's own process cannot be started, or has died."""


class OracleProcess:
    """An oracle for one problem; close it when done.

    Args:
        question: the problem.
    """

    def __init__(self, question: Question):
        self.question = question
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> OracleProcess:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def ask(self, source: str, limit_s: float) -> Finding:
        """What is seen of a program within `limit_s` seconds.

        Raises:
            OracleDied: the oracle cannot be started, or died twice over this program.
        """
        for _ in range(2):
            try:
                text = self._exchange({"source": source, "limit_s": limit_s}, limit_s + ANSWER_S)
                return Finding(**json.loads(text))
            except (OracleDied, OSError) as error:
                gone = error
                self.close()
        raise OracleDied(f"the oracle died twice over one program: {gone}")

    def close(self) -> None:
        """End the oracle."""
        if self._process is not None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, 9)
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
            self._process = None

    def _exchange(self, message: dict[str, object], limit_s: float) -> str:
        if self._process is None:
            self._process = self._start()
            self._send(asdict(self.question))
            if self._line(START_S).strip() != "ready":
                raise OracleDied("the oracle did not get ready; its words are on standard error")
        self._send(message)
        return self._line(limit_s)

    def _start(self) -> subprocess.Popen[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment.pop("TRITON_INTERPRET", None)
        if self.question.device == "cpu":
            environment["TRITON_INTERPRET"] = "1"
        return subprocess.Popen(
            [sys.executable, "-m", "experiments.trust.oracle"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            cwd=ROOT,
            text=True,
            start_new_session=True,
        )

    def _send(self, message: dict[str, object]) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def _line(self, limit_s: float) -> str:
        assert self._process is not None and self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], limit_s)[0]:
            raise OracleDied(f"no answer in {limit_s:g} s")
        text = self._process.stdout.readline()
        if not text:
            raise OracleDied(f"it ended with status {self._process.wait()}")
        return text


__all__ = ["OracleProcess", "OracleDied"]
