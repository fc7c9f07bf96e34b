"""The rules by which an answer is read."""

from __future__ import annotations

import ast

import pytest
import torch

from qimeng.coder.llm.chat import ChatError, Reply
from qimeng.coder.llm.reply import LONGEST, read_reply
from qimeng.coder.llm.shown import shown_source
from qimeng.coder.template.coder import TemplateCoder
from qimeng.device import DEVICES
from qimeng.graph.capture import capture
from qimeng.graph.region import Region
from qimeng.interfaces import Action, Request
from qimeng.program.program import Implementation, Program
from tests.coder.llm.endpoint import fence

KERNEL = """@triton.jit
def kernel(x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i))
"""
REGION = """def region(x0):
    y = torch.empty_like(x0)
    kernel[(1,)](x0, y, BLOCK=8)
    return (y,)
"""
WHOLE = f"{KERNEL}\n\n{REGION}"


@pytest.fixture(scope="module")
def program() -> Program:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.linear(x))

    return Program.start(capture(Two, lambda: (torch.empty(64, 64),)))


@pytest.fixture(scope="module")
def relu(program: Program) -> Region:
    return program.regions[1]


@pytest.fixture(scope="module")
def linear(program: Program) -> Region:
    return program.regions[0]


def read(text: str, region: Region, **parts: object) -> Implementation:
    return read_reply(Reply(text), region, **parts)  # type: ignore[arg-type]


def names(found: Implementation) -> list[str]:
    """Top-level names without the prefix, in order."""
    prefix = found.entry.removesuffix("region")
    defined = [n.name for n in ast.parse(found.source).body if isinstance(n, ast.FunctionDef)]
    assert all(name.startswith(prefix) for name in defined)
    return [name.removeprefix(prefix) for name in defined]


@pytest.mark.parametrize(
    "text",
    [
        fence(WHOLE),
        fence(WHOLE, ""),
        fence(WHOLE, "triton"),
        fence(WHOLE, "cpp"),
        fence(WHOLE).replace("```", "~~~~"),
        fence(WHOLE).replace("\n", "\r\n"),
        f"1. The code:\n   ```python\n{WHOLE}".replace("\n", "\n   ") + "\n   ```",
        f"```python\n{WHOLE}",
        f"```python\n{KERNEL}```python\n{REGION}```",
        f"{fence(KERNEL)}It is called so:\n{fence(REGION)}",
        f"{fence(REGION)}with\n{fence(KERNEL)}",
        f"Some prose first.\n{WHOLE}\nAnd some more (of it).",
        f"from what you say:\n{WHOLE}",
        f"<think>{fence('def region(x0): wrong')}\n</think>\n{fence(WHOLE)}",
        f"wrong so far</think>\n{fence(WHOLE)}",
        f"{fence('pip install triton', 'bash')}{fence(WHOLE)}",
        fence(
            f"import torch\nimport triton\nimport triton.language as tl\nfrom __future__ import annotations\n{WHOLE}"
        ),
        fence(f"{WHOLE}\nprint(region(torch.ones(3)))\n\nif __name__ == '__main__':\n    y = region(torch.ones(3))\n"),
        fence(f"torch.backends.cuda.matmul.allow_tf32 = True\n{WHOLE}"),
        fence(WHOLE.replace("region", "fast_relu")),
        fence(f"def region(x0):\n    return (x0,)\n\n\n{WHOLE}"),
        fence(f"class Model(torch.nn.Module):\n    pass\n\n\n{WHOLE}"),
    ],
)
def test_an_answer_that_can_be_read(text: str, relu: Region) -> None:
    found = read(text, relu)
    assert sorted(names(found)) == ["kernel", "region"]
    assert (found.language, found.schedule, found.prepare) == ("triton", None, "")
    assert shown_source(found).split() in (WHOLE.split(), f"{REGION}\n\n{KERNEL}".split())
    assert found.entry == f"m{relu.signature[:8]}_region"


CUDA = """#include <cuda_fp16.h>
extern "C" __global__ void relu(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = fmaxf(x[i], 0.0f);
}
"""
LAUNCHER = """relu = cuda_kernel(CUDA, "relu")


def region(x0):
    y = torch.empty_like(x0)
    relu[triton.cdiv(x0.numel(), 256), 256](x0, y, x0.numel())
    return (y,)
"""


@pytest.mark.parametrize(
    "text",
    [
        f"{fence(CUDA, 'cuda')}\n{fence(LAUNCHER)}",
        f"{fence(LAUNCHER)}and the kernel:\n{fence(CUDA, 'cpp')}",
        f"{fence(CUDA, '')}\n{fence(LAUNCHER, '')}",
        fence(f"CUDA = r'''{CUDA}'''\n{LAUNCHER}"),
    ],
)
def test_an_answer_in_cuda(text: str, relu: Region) -> None:
    from qimeng.envs.screening.allowed_text import violations

    found = read(text, relu)
    assert found.language == "cuda" and names(found) == ["region"]
    assert violations(found.source, "cuda") == ()
    assert 'extern "C" __global__ void relu(const float* x' in found.source and "import triton" in found.source
    shown = shown_source(found)
    assert 'relu_kernel = cuda_kernel(CUDA, "relu")' in shown and "def region(x0):" in shown
    again = read("<<<<<<< SEARCH\n    if (i < n) y[i] = fmaxf(x[i], 0.0f);\n=======\n    if (i < n) y[i] = x[i];\n"
        ">>>>>>> REPLACE", relu, base=shown, present=found)  # fmt: skip
    assert again.language == "cuda" and "y[i] = x[i];" in again.source and "fmaxf" not in again.source


@pytest.mark.parametrize(
    "text, told",
    [
        (fence(CUDA, "cuda") + fence(WHOLE), "nothing uses the CUDA C++ of the answer"),
        (fence(CUDA + "\\", "cuda") + fence(LAUNCHER), "ends in a backslash"),
        (fence(CUDA, "cuda") + fence(KERNEL + LAUNCHER + "    kernel[(1,)](x0, y)\n"), "in Triton and in CUDA C++"),
        ("Use a larger tile.", "no code"),
        (fence("kernel = 3"), "no function `region`"),
        (fence(KERNEL), "no function `region`"),
        (fence("def region():\n    pass"), "takes 0 arguments; the region has 1"),
        (fence("def region(x0, buffer):\n    pass"), "takes 2 arguments"),
        (fence("def one(x):\n    pass\n\n\ndef two(x):\n    pass"), "only one, two"),
        (fence("def region(x0):\n    return helper(x0)"), "uses `helper`, which it does not define"),
        (fence("def region(x0):\n    global n\n    n = 3"), "global"),
        (fence("import os\n\n\ndef region(x0):\n    os.abort()"), "`import os` is not allowed"),
        (fence("def region(x0):\n    import ctypes"), "`import ctypes` is not allowed"),
        (fence("from torch import *\n\n\ndef region(x0):\n    return ones(3)"), "does not define"),
        (fence("def region(x0):\n    return (x0"), "no Python: line 2: '(' was never closed"),
        (fence("__global__ void k() {}", "cuda"), "has CUDA C++ and no function `region`"),
        ("<think>I will", "within the model's thoughts"),
        (fence("def region(x0):\n    return '\ud800' + helper"), "uses `helper`"),
        (fence(f"def region(x0):\n    return {'(' * 500}x0{')' * 500}"), "no Python"),
        (fence(f"def region(x0):\n    return x0{'.T' * 50_000}"), "nested too deeply"),
        ("x" * (LONGEST + 1), "at most"),
    ],
)
def test_an_answer_that_cannot_be_read(text: str, told: str, relu: Region) -> None:
    with pytest.raises(ChatError) as caught:
        read(text, relu)
    assert told in str(caught.value) and caught.value.kind == "format"


@pytest.mark.parametrize(
    "reply, kind",
    [
        (Reply(""), "empty"),
        (Reply(" \n\t"), "empty"),
        (Reply(fence(WHOLE), finish="length"), "cut-off"),
        (Reply(fence(WHOLE), finish="refusal"), "refusal"),
        (Reply("I'm sorry, but I can't help with that."), "refusal"),
        (Reply("I cannot write this kernel."), "refusal"),
    ],
)
def test_what_an_answer_lacks(reply: Reply, kind: str, relu: Region) -> None:
    with pytest.raises(ChatError) as caught:
        read_reply(reply, relu)
    assert caught.value.kind == kind and not caught.value.passing


def test_names_and_imports(relu: Region) -> None:
    text = """
import torch.nn.functional as F, operator as F2
from torch import empty_like as make
from triton.language.extra import libdevice
BLOCK = 8  # a comment
unused = torch.ones(3)


# above
@triton.jit
def _k(x, n, BLOCK: tl.constexpr):
    tl.store(x, libdevice.exp(n) * math.pi)


def region(x0, kernel=None):
    BLOCK_ = F2.add(BLOCK, 1)
    _k[(1,)](x0, n=F.relu, BLOCK=BLOCK)
    return (make(x0), f"{BLOCK}", BLOCK_, kernel, [make for make in x0], lambda BLOCK: BLOCK)
"""
    found = read(fence(text), relu)
    p = found.entry.removesuffix("region")
    assert (
        found.source
        == f"""import math
import torch.nn.functional as F
import operator as {p}F2
from torch import empty_like as {p}make
from triton.language.extra import libdevice


{p}BLOCK = 8  # a comment


# above
@triton.jit
def {p}k(x, n, BLOCK: tl.constexpr):
    tl.store(x, libdevice.exp(n) * math.pi)


def {p}region(x0, kernel=None):
    BLOCK_ = {p}F2.add({p}BLOCK, 1)
    {p}k[(1,)](x0, n=F.relu, BLOCK={p}BLOCK)
    return ({p}make(x0), f'{{{p}BLOCK}}', BLOCK_, kernel, [make for make in x0], lambda BLOCK: BLOCK)
"""
    )
    again = read(fence(shown_source(found)), relu)
    assert shown_source(again) == shown_source(found)


PREPARED = """
def prepare({names}):
    return (x1.t().contiguous(),)


def region(x0, x1, x2, packed):
    return (x0,)
"""


def test_buffers_made_from_parameters(linear: Region) -> None:
    found = read(fence(PREPARED.format(names="x1")), linear)
    assert found.prepare == f"m{linear.signature[:8]}_prepare" and found.prepare_inputs == (1,)
    assert read(fence(PREPARED.format(names="x2, x1")), linear).prepare_inputs == (2, 1)
    with pytest.raises(ChatError, match="x0`, which is no parameter"):
        read(fence(PREPARED.format(names="x0")), linear)
    with pytest.raises(ChatError, match="under the same names"):
        read(fence(PREPARED.format(names="weight")), linear)
    present = Implementation("triton", "", "e", "p", (1,))
    edit = "<<<<<<< SEARCH\n    return (x0,)\n=======\n    return (packed,)\n>>>>>>> REPLACE"
    base = PREPARED.format(names="weight").replace("x1.t()", "weight.t()").strip() + "\n"
    assert read(edit, linear, base=base, present=present).prepare_inputs == (1,)


def test_a_templates_kernel_reads_back(program: Program) -> None:
    """What a model is shown is what it could have written, buffers included."""
    coder = TemplateCoder()
    for region in program.regions:
        request = Request(program, Action("lowering", (region.id,)), DEVICES["h200"])
        for printed in coder.write(request).alternatives:
            found = read(fence(shown_source(printed)), region, present=printed)
            assert (found.prepare_inputs, bool(found.prepare)) == (printed.prepare_inputs, bool(printed.prepare))
            assert shown_source(found).split() == shown_source(printed).split()


EDIT = "<<<<<<< SEARCH\n{}\n=======\n{}\n>>>>>>> REPLACE\n"


def test_edits(relu: Region) -> None:
    text = f"I change two things.\n```python\n{EDIT.format('    i = tl.arange(0, BLOCK)  ', '    i = 3')}```\n"
    text += EDIT.format("    y = torch.empty_like(x0)", "    y = x0\n    y = torch.empty_like(y)")
    found = shown_source(read(text, relu, base=WHOLE))
    assert "i = 3" in found and "y = torch.empty_like(y)" in found and "tl.arange" not in found
    both = read(
        EDIT.format("    return (y,)", "    return (x0,)") + fence("def region(x0):\n    return 3"), relu, base=WHOLE
    )
    assert "return (x0,)" in both.source


@pytest.mark.parametrize(
    "text, told",
    [
        (EDIT.format("    nothing of this", "x"), "stands there 0 times"),
        (EDIT.format("tl.arange(0, BLOCK)", "x"), "stands there 0 times"),
        (EDIT.format("", "x"), "no text to search for"),
        (EDIT.format("    return (y,)", "    return (y,)"), "change nothing"),
        (EDIT.format("    return (y,)", "    return (y"), "with the edits it is no Python"),
        ("<<<<<<< SEARCH\n    return (y,)\n=======\nx\n", "`>>>>>>> REPLACE` is missing"),
        ("<<<<<<< SEARCH\n    return (y,)\n", "`=======` is missing"),
    ],
)
def test_edits_that_do_not_apply(text: str, told: str, relu: Region) -> None:
    with pytest.raises(ChatError) as caught:
        read(text, relu, base=WHOLE)
    assert told in str(caught.value) and caught.value.kind == "format"


def test_edits_need_something_to_edit(relu: Region) -> None:
    twice = EDIT.format("    return (y,)", "x")
    with pytest.raises(ChatError, match="no text to edit"):
        read(twice, relu)
    with pytest.raises(ChatError, match="stands there 2 times"):
        read(twice, relu, base=WHOLE + REGION.replace("region", "other"))


def test_reading_takes_no_time() -> None:
    """Texts on which a careless pattern would take for ever."""
    region = None
    for text in ("<think>" * 50_000, "```" * 100_000, "`" * 390_000, "<<<<<<<\n" * 40_000, "import \n" * 40_000):
        with pytest.raises(ChatError):
            read_reply(Reply(text), region)  # type: ignore[arg-type]
