"""The action `language`: where it is offered, which schedules it leads to, and what tunes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from qimeng.actions import Context, kind_named, legal_actions
from qimeng.backend import backend_named
from qimeng.coder.template.coder import TemplateCoder
from qimeng.device import DEVICES
from qimeng.envs.estimate.estimator import EstimatingEvaluator
from qimeng.envs.screening.origin import printed
from qimeng.envs.steps.setup import make_coder
from qimeng.errors import IllegalAction
from qimeng.graph.capture import capture
from qimeng.interfaces import Action, Patch, Request
from qimeng.program.program import Implementation, Program
from qimeng.spec import KernelSpec

MISSING = backend_named("cuda").missing()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=MISSING or "")
H200 = DEVICES["h200"]
BOTH = Context(H200, TemplateCoder(("triton", "cuda")))


class Softmax(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.softmax(x, 1)


class Sums(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(1)


def lowered(module: type[torch.nn.Module] = Softmax, shape: tuple[int, ...] = (4096, 8192)) -> Program:
    return step(Program.start(capture(module, lambda: (torch.empty(shape, device="meta"),))), "lowering")


def step(program: Program, kind: str, param: str = "", chosen: int = 0) -> Program:
    action = Action(kind, (program.regions[0].id,), param)
    kind_named(kind).check(program, action, BOTH)
    return BOTH.coder.write(Request(program, action, H200)).apply(program, chosen)


def texts(program: Program, context: Context = BOTH) -> set[str]:
    return {f"{a.kind} {a.param}".strip() for a in legal_actions(program, context)}


def test_it_is_offered_where_the_coder_writes_both() -> None:
    program = lowered()
    assert "language cuda" in texts(program) and "language triton" not in texts(program)
    assert not [t for t in texts(program, Context(H200, TemplateCoder())) if t.startswith("language")]
    assert "language cuda" not in texts(program, Context(DEVICES["mi300x"], BOTH.coder))
    with pytest.raises(IllegalAction, match="the coder writes triton"):
        kind_named("language").check(
            program, Action("language", (program.regions[0].id,), "cuda"), Context(H200, TemplateCoder())
        )
    assert make_coder("template+cuda").languages == ("triton", "cuda")
    with pytest.raises(ValueError, match="does not print 'fortran'; known: triton, cuda"):
        TemplateCoder(("triton", "fortran"))


def test_there_and_back() -> None:
    program = lowered()
    cuda = step(program, "language", "cuda")
    made = cuda.implementation(cuda.regions[0])
    assert made.language == "cuda" and made.schedule is not None and "language=cuda" in str(made.schedule)
    assert printed(cuda), "a template printed it, so it shares workers"
    assert "import triton" not in cuda.source and "__global__" in cuda.source
    back = step(cuda, "language", "triton")
    assert back.implementation(back.regions[0]) == program.implementation(program.regions[0])


def test_what_tunes_it() -> None:
    cuda = step(lowered(), "language", "cuda")
    found = texts(cuda)
    assert {"language triton", "pipeline warps", "split loop"} <= found
    assert (
        not {"pipeline stages", "special fast", "vectorization more", "split wave", "language cuda", "tiling smaller"}
        & found
    )
    loop = step(cuda, "split", "loop")
    region = loop.regions[0]
    assert loop.schedule(region).form == "loop" and loop.implementation(region).language == "cuda"  # type: ignore[union-attr]
    short = step(lowered(shape=(4096, 200)), "language", "cuda")
    assert short.schedule(short.regions[0]).block_p == 4, "short rows are several a block"  # type: ignore[union-attr]
    assert "tiling smaller" in texts(short)


@pytest.mark.parametrize(
    ("module", "shape", "form"),
    [(Softmax, (16, 1 << 20), "split"), (Sums, (8, 100_000, 64), "split"), (Sums, (128, 512, 4096), "loop")],
)
def test_rows_that_are_few_are_shared_among_blocks(module: type, shape: tuple[int, ...], form: str) -> None:
    cuda = step(lowered(module, shape), "language", "cuda")
    assert cuda.schedule(cuda.regions[0]).form == form  # type: ignore[union-attr]


def test_without_a_gpu_it_is_compiled_estimated_and_said_to_be_unchecked(tmp_path: Path) -> None:
    spec = KernelSpec.of(Softmax(), (torch.rand(64, 512),))
    start = Program.start(capture(Softmax, lambda: (torch.empty(64, 512),)))
    program = step(start, "lowering")
    action = Action("language", (program.regions[0].id,), "cuda")
    patch = BOTH.coder.write(Request(program, action, H200))
    judge = EstimatingEvaluator(spec, H200, BOTH.coder, str(tmp_path))
    found = judge.evaluate(program, patch.only(0))
    assert found.ok, found.error
    assert found.unchecked == "1 of 1 kernels are CUDA C++, which runs on a GPU only: they were not checked"
    assert found.timing is not None and found.timing.estimated
    assert found.resources is not None and found.resources.kernels == 1 and found.resources.spills == 0


def test_free_text_that_no_interpreter_runs_is_not_taken_on_trust(tmp_path: Path) -> None:
    """A model's CUDA C++ passes nowhere without a GPU, also beside kernels that were checked."""

    class Two(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.softmax(functional.softmax(x, 1), 0)

    spec = KernelSpec.of(Two(), (torch.rand(64, 512),))
    start = Program.start(capture(Two, lambda: (torch.empty(64, 512),)))
    program = step(start, "lowering")
    text = (
        'TEXT = r"""\nextern "C" __global__ void wrong(const float* x, float* y) { y[0] = x[0]; }\n"""\n'
        'wrong = cuda_kernel(TEXT, "wrong")\n\n\ndef entry(x):\n    y = torch.empty_like(x)\n    wrong[1, 32](x, y)\n'
        "    return (y,)\n"
    )
    patch = Patch(target=program.regions[1].id, alternatives=(Implementation("cuda", text, "entry"),))
    found = EstimatingEvaluator(spec, H200, BOTH.coder, str(tmp_path)).evaluate(program, patch)
    assert (found.ok, found.failure) == (False, "unsupported")
    assert "no template printed it" in found.error and "CUDA C++, which runs on a GPU only" in found.error  # type: ignore[operator]


def test_a_model_is_asked_for_cuda_by_the_same_action() -> None:
    from qimeng.coder.hybrid import HybridCoder
    from qimeng.coder.llm.coder import LLMCoder
    from tests.coder.llm.scripted import ScriptedChat

    answer = (
        '```cuda\nextern "C" __global__ void softmax(const float* x, float* y, int n) { y[0] = x[0]; }\n```\n'
        "```python\n"
        'softmax = cuda_kernel(CUDA, "softmax")\n\n\ndef region(x0):\n    y = torch.empty_like(x0)\n'
        "    softmax[x0.shape[0], 256](x0, y, x0.shape[1])\n    return (y,)\n```\n"
    )
    model = LLMCoder(ScriptedChat(answer), languages=("triton", "cuda"))
    program = lowered()
    action = Action("language", (program.regions[0].id,), "cuda")
    assert "language cuda" in texts(program, Context(H200, model))
    assert "language cuda" not in texts(program, Context(H200, LLMCoder(ScriptedChat(answer))))
    assert HybridCoder(model).languages == ("triton", "cuda")
    written = model.write(Request(program, action, H200)).apply(program)
    made = written.implementation(written.regions[0])
    assert made.language == "cuda" and made.schedule is None
    assert "language triton" in texts(written, Context(H200, model)), "and may be asked back"
