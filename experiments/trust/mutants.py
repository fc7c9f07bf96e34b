"""Mutation testing of the judge: of the mutants that an oracle finds wrong, the share that the judge lets pass.

Deals in drawn specs, programs of our own coder, mutants of these, and three opinions on each: the oracle's, the
judge's, and KernelBench's own check. Knows nothing about files of rows or tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from experiments.trust.journal import Data
from experiments.trust.mutation import Mutation, choose, mutations
from experiments.trust.oracle import Finding, Question
from experiments.trust.oracle_process import OracleProcess
from experiments.trust.programs import Subject, make_subject
from experiments.trust.verdicts import Judged, Verdicts
from qimeng.device import Device
from qimeng.envs.judge.verdicts import Verdict
from qimeng.errors import QimengError
from qimeng.planner.data.generate import Bytes
from qimeng.program.program import Program

LACKING = {"bfloat16": "Triton's interpreter computes bf16 wrongly", "high": "there is no TF32 eager on the CPU"}
"""Dtypes and modes of specs that say nothing without a GPU."""


@dataclass(frozen=True)
class Plan:
    """What is tried.

    Attributes:
        device: ``"cpu"`` (Triton's interpreter) or ``"cuda"``.
        target: the device that kernels are printed for.
        seed: of the specs, programs and mutants.
        each: mutants of a program.
        inputs: that the oracle tries.
        oracle_s: seconds that it may take over a mutant.
        sizes: bytes of a spec's inputs and parameters.
    """

    device: str
    target: Device
    seed: int = 0
    each: int = 12
    inputs: int = 200
    oracle_s: float = 60.0
    sizes: Bytes = Bytes(1 << 12, 1 << 14)


def subject_key(plan: Plan, number: int) -> str:
    """Key of the row that says what became of subject `number`; there once its mutants are."""
    return f"{plan.seed}-{number}"


def try_subject(plan: Plan, number: int) -> list[Data]:
    """The rows of one subject: a row for each mutant, then its own, which says why there are none."""
    key = subject_key(plan, number)
    own: Data = {"key": key, "what": "subject", "mutants": 0, "device": plan.device}
    try:
        subject = make_subject(plan.seed, number, plan.sizes, plan.target)
    except QimengError as error:
        return [{**own, "left_out": f"not captured: {error}"[:300]}]
    spec = subject.spec
    own |= {"spec": spec.name, "family": subject.family, "dtype": spec.dtype, "mode": spec.mode, "steps": subject.steps}
    if plan.device == "cpu" and (reason := LACKING.get(spec.dtype) or LACKING.get(spec.mode)):
        return [{**own, "left_out": reason}]
    if not _kernels(subject.program):
        return [{**own, "left_out": "no kernel"}]
    question = Question(spec.source, spec.dtype, spec.mode, plan.device, plan.inputs)
    verdicts = Verdicts(spec, subject.graph, plan.device)
    try:
        with OracleProcess(question) as oracle:
            rows = list(_mutants(plan, subject, key, oracle, verdicts, own))
    finally:
        verdicts.close()
    return [*rows, own]


def _mutants(
    plan: Plan, subject: Subject, key: str, oracle: OracleProcess, verdicts: Verdicts, own: Data
) -> Iterator[Data]:
    """The rows of the mutants; `own` says so where the program itself is not right by both."""
    finding = oracle.ask(subject.program.source, plan.oracle_s)
    judged = verdicts.judge(subject.program)
    own |= {"witness": asdict(finding), **_as_row(judged)}
    if finding.found != "right" or not judged.ok or finding.inputs < plan.inputs:
        own["left_out"] = "the program itself is not right to both" + (f": {finding.words}" if finding.words else "")
        return
    for place, (signature, mutation) in enumerate(_chosen(plan, subject, key)):
        program = _mutated(subject.program, signature, mutation)
        finding, judged = oracle.ask(program.source, plan.oracle_s), verdicts.judge(program)
        own["mutants"] += 1
        yield {
            "key": f"{key}-{place}",
            "what": "mutant",
            "device": plan.device,
            "subject": key,
            "family": subject.family,
            "dtype": subject.spec.dtype,
            "mode": subject.spec.mode,
            "kind": mutation.kind,
            "operator": mutation.operator,
            "diff": mutation.diff(subject.program.implementations[signature].source),
            "witness": asdict(finding),
            **_as_row(judged),
        }


def _kernels(program: Program) -> list[str]:
    """Signatures of the regions that have a kernel of ours, in order, each once."""
    signatures = dict.fromkeys(r.signature for r in program.regions if program.implementation(r).generated)
    return list(signatures)


def _chosen(plan: Plan, subject: Subject, key: str) -> list[tuple[str, Mutation]]:
    """Mutants of the program, spread over its kernels."""
    table = subject.program.implementations
    signatures = _kernels(subject.program)
    shares = [plan.each // len(signatures) + (i < plan.each % len(signatures)) for i in range(len(signatures))]
    return [
        (signature, mutation)
        for signature, share in zip(signatures, shares, strict=True)
        for mutation in choose(mutations(table[signature].source), share, f"{key}/{signature}")
    ]


def _mutated(program: Program, signature: str, mutation: Mutation) -> Program:
    old = program.implementations[signature]
    new = replace(old, source=mutation.apply(old.source), schedule=None)
    return replace(program, implementations={**program.implementations, signature: new})


def _as_row(judged: Judged) -> Data:
    return {"search": _verdict(judged.search), "final": judged.final and _verdict(judged.final)}


def _verdict(verdict: Verdict) -> Data:
    a = verdict.accuracy
    return {
        "failure": verdict.failure,
        "error": (verdict.error or "")[:400],
        "max_error": a and a.max_error,
        "max_budget": a and a.max_budget,
        "rms_error": a and a.rms_error,
        "rms_budget": a and a.rms_budget,
        "trials": a and a.trials,
    }


__all__ = ["Plan", "Finding", "subject_key", "try_subject"]
