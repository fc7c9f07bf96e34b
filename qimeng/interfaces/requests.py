"""What an evaluator is asked: a program or a patch, for which computation and device, and what is to be found out.

Deals in plain data that travels as one line of JSON. Knows nothing about who answers, or how.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from qimeng.errors import RequestError
from qimeng.interfaces.steps import Patch
from qimeng.program.content import digest_of

if TYPE_CHECKING:
    from qimeng.graph.opgraph import OpGraph
    from qimeng.program.program import Program

FORMAT = 1
"""Of the JSON; another number is another version's."""


class Asked(str, Enum):
    """What is to be found out about a program."""

    CHECK = "check"
    """Is it right? Engines that get a time for nothing may give one."""
    TIMING = "timing"
    """Is it right, and how fast: what a search asks at every step."""
    REGION = "region"
    """Is the patch right on its region, and how fast is that: what a search asks at a step in a network. An engine that
    judges whole programs alone answers as for `TIMING`; `Evaluation.scope` says which it was."""
    FINAL = "final"
    """The same again, as a whole, in a fresh process and on every distribution of inputs."""


@dataclass(frozen=True)
class FinalOptions:
    """What the final verification of a run does beside its checks.

    Every request of a run carries this, so that an engine can make ready early what takes long. Engines that only
    estimate have no use for it.

    Attributes:
        compile_modes: modes of torch.compile whose programs are timed in turns with the candidate.
        compile_seconds: wall seconds that compiling in one mode may take.
        sanitize: tools of compute-sanitizer that are run (`qimeng.envs.screening.sanitizer.TOOLS`).
    """

    compile_modes: tuple[str, ...] = ()
    compile_seconds: float = 0.0
    sanitize: tuple[str, ...] = ()


@dataclass(frozen=True)
class EvaluationRequest:
    """One question to an evaluator.

    Attributes:
        program: the program.
        patch: applied to it; the best of its alternatives counts. None for the program as it is.
        asked: what is to be found out.
        spec: digest of the specification; empty for the only one that the evaluator knows.
        device: name of the device; empty for the evaluator's own.
        mode: precision mode; empty for the specification's own.
        options: of the final verification.
        seconds: wall seconds after which an engine with processes of its own gives up; None for its own limit.
        library_seconds: wall seconds after its submission until which a library may compile what is new in it; what
            takes longer is left aside (`qimeng.interfaces.faults.LEFT_ASIDE`). None for the engine's own limit.
    """

    program: Program
    patch: Patch | None = None
    asked: Asked = Asked.TIMING
    spec: str = ""
    device: str = ""
    mode: str = ""
    options: FinalOptions = field(default_factory=FinalOptions)
    seconds: float | None = None
    library_seconds: float | None = None

    @property
    def candidates(self) -> tuple[Program, ...]:
        """The programs to choose from: one for each alternative of the patch, or the program itself."""
        if self.patch is None:
            return (self.program,)
        return tuple(self.patch.apply(self.program, i) for i in range(max(1, len(self.patch.alternatives))))

    @property
    def region_subject(self) -> str:
        """Content hash of the patch's region, equal ones alike, and of what the patch lets the judge choose from."""
        assert self.patch is not None and self.patch.target is not None
        region = self.candidates[0].region(self.patch.target)
        return digest_of("region", region.signature, [a.digest for a in self.patch.alternatives])

    @property
    def digest(self) -> str:
        """Content hash: requests of equal digests ask the same. Limits of time are no part of it."""
        beside = (self.options.compile_modes, self.options.sanitize) if self.asked is Asked.FINAL else ()
        programs = [program.digest for program in self.candidates]
        return digest_of("request", programs, self.asked.value, self.spec, self.device, self.mode, beside)

    def fits(self, spec: str, device: str, mode: str) -> None:
        """Check that an evaluator for this specification, device and mode is the one to ask.

        Raises:
            RequestError: it is another one's; the message says what differs.
        """
        pairs = {"specification": (self.spec, spec), "device": (self.device, device), "mode": (self.mode, mode)}
        for what, (asked, own) in pairs.items():
            if asked and asked != own:
                raise RequestError(f"the request is for {what} {asked!r}, this evaluator judges for {own!r}")

    def after(self, seconds: float) -> EvaluationRequest:
        """The same request, so many seconds after its submission."""
        if self.library_seconds is None:
            return self
        return replace(self, library_seconds=max(0.0, self.library_seconds - seconds))

    def to_json(self) -> str:
        """One line of JSON: the program's identity and texts, without its graph; `from_json` reads it."""
        from qimeng.interfaces.records import PatchRecord, program_to_json

        data = {
            "format": FORMAT,
            "program": self.program.digest,
            "body": json.loads(program_to_json(self.program)),
            "fallback": self.program.fallback,
            "patch": None if self.patch is None else json.loads(PatchRecord.of(self.patch).to_json()),
            "asked": self.asked.value,
            "spec": self.spec,
            "device": self.device,
            "mode": self.mode,
            "options": asdict(self.options),
            "seconds": self.seconds,
            "library_seconds": self.library_seconds,
        }
        return json.dumps(data, sort_keys=True)

    @classmethod
    def from_json(cls, text: str, graph: OpGraph) -> EvaluationRequest:
        """The request that `to_json` wrote.

        Args:
            text: the JSON.
            graph: of the specification that the request is for, captured where it is read; programs of a computation
                that could not be captured have none, and any graph will do.

        Raises:
            RequestError: it is no request, another version wrote it, its program does not fit the graph, or its patch
                does not fit the program.
        """
        from qimeng.graph.opgraph import OpGraph
        from qimeng.interfaces.records import PatchRecord, program_from_json
        from qimeng.program.program import Program

        try:
            data: dict[str, Any] = json.loads(text)
            if data["format"] != FORMAT:
                raise RequestError(f"the request has format {data['format']}, this version reads {FORMAT}")
            if data["fallback"]:
                graph = OpGraph({}, ())
                program = Program(graph, (), {}, data["fallback"])
            else:
                program = program_from_json(json.dumps(data["body"]), graph)
            if program.digest != data["program"]:
                raise RequestError(f"the request is for program {data['program']}, here it comes out {program.digest}")
            options = data["options"]
            modes, tools = (_texts(options[name]) for name in ("compile_modes", "sanitize"))
            spec, device, mode = _texts([data["spec"], data["device"], data["mode"]])
            request = cls(
                program,
                None if data["patch"] is None else PatchRecord.from_data(data["patch"]).patch(program.graph),
                Asked(data["asked"]),
                spec,
                device,
                mode,
                FinalOptions(modes, _seconds(options["compile_seconds"]), tools),
                *(None if data[name] is None else _seconds(data[name]) for name in ("seconds", "library_seconds")),
            )
            _ = request.digest  # raises where the patch does not fit the program
            return request
        except RequestError:
            raise
        except Exception as error:  # whatever a text from outside holds
            raise RequestError(f"not a request of this version: {type(error).__name__}: {error}") from error


def _texts(found: Any) -> tuple[str, ...]:
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise TypeError(f"{found!r} is no list of texts")
    return tuple(found)


def _seconds(found: Any) -> float:
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not 0 <= found < math.inf:
        raise TypeError(f"{found!r} is no number of seconds")
    return found


__all__ = ["FORMAT", "Asked", "EvaluationRequest", "FinalOptions"]
