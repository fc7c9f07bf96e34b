"""What the service takes from a client, and what it says where it takes no more.

Deals in sizes, counts and seconds. Knows nothing about HTTP beyond the numbers of its answers.
"""

from __future__ import annotations

from dataclasses import dataclass

from qimeng.envs.judge.torch_compile import MODES as COMPILE_MODES
from qimeng.interfaces import Asked
from qimeng.service.errors import ServiceError
from qimeng.service.messages import Submission
from qimeng.spec import DTYPES, MODES


class Refused(ServiceError):
    """A request that the service does not take; the message says why.

    Attributes:
        status: number of the HTTP answer.
        reason: one word for programs.
    """

    def __init__(self, status: int, reason: str, message: str):
        super().__init__(message)
        self.status, self.reason = status, reason


@dataclass(frozen=True)
class Limits:
    """What is taken.

    Attributes:
        body_bytes: of one HTTP request.
        head_s: seconds in which the head of a request must have arrived.
        body_s: seconds in which its body must have arrived.
        source_chars: of a reference, and of a candidate.
        batch: submissions in one request.
        per_client: submissions of one client that wait or are judged.
        in_all: submissions that wait or are judged.
        seconds: that one evaluation may take, its reference included.
        compile_modes: modes of torch.compile in one submission.
        kept: answers that are known, and jobs that can be asked for, after they ended.
    """

    body_bytes: int = 1 << 20
    head_s: float = 20.0
    body_s: float = 30.0
    source_chars: int = 200_000
    batch: int = 64
    per_client: int = 64
    in_all: int = 1024
    seconds: float = 600.0
    compile_modes: int = 3
    kept: int = 4096

    def check(self, submission: Submission) -> None:
        """Refuse what is too large, or cannot be asked.

        Raises:
            Refused: with status 413 or 422.
        """
        for what, text in (("reference", submission.reference.source), ("candidate", submission.candidate.source)):
            if len(text) > self.source_chars:
                raise Refused(413, "too-large", f"the {what} has {len(text)} characters, at most {self.source_chars}")
            if not text.strip():
                raise Refused(422, "invalid", f"the {what} is empty")
        options, reference = submission.options, submission.reference
        if reference.dtype not in DTYPES:
            raise Refused(422, "invalid", f"unknown dtype; known: {', '.join(DTYPES)}")
        if reference.mode not in MODES:
            raise Refused(422, "invalid", f"unknown precision mode; known: {', '.join(MODES)}")
        if options.asked is Asked.REGION:
            raise Refused(422, "invalid", "options.asked: a candidate computes the whole of its reference")
        unknown = [mode for mode in options.compile_modes if mode not in COMPILE_MODES]
        if unknown or len(options.compile_modes) > self.compile_modes:
            raise Refused(422, "invalid", f"compile_modes: at most {self.compile_modes} of {', '.join(COMPILE_MODES)}")
        if options.seconds is not None and not 0 < options.seconds <= self.seconds:
            raise Refused(422, "invalid", f"seconds: more than 0, at most {self.seconds:g}")


__all__ = ["Limits", "Refused"]
