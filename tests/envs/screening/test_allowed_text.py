# ruff: noqa: E501  a text a line
"""What a kernel's text may do, and what it may not, with the line and what to do instead."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from qimeng.coder.template.coder import TemplateCoder
from qimeng.device import DEVICES
from qimeng.envs.screening.allowed_names import may_use
from qimeng.envs.screening.allowed_text import violations
from qimeng.envs.screening.origin import foreign, known
from qimeng.envs.screening.static_pass import forbidden, judged_text
from qimeng.exploits import EXPLOITS, HONEST_CASES
from qimeng.graph.capture import capture
from qimeng.interfaces import Action, Request
from qimeng.program.program import Implementation, Program
from qimeng.testing import sample_graph

GOLDEN = Path(__file__).parents[2] / "coder" / "llm" / "golden"

KERNEL = """
@triton.jit
def add(x, o, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(o + i, tl.load(x + i, i < n, other=0.0).to(tl.float32) + 1, i < n)
"""

FINE = [
    KERNEL + "def entry(x):\n    o = torch.empty_like(x)\n    add[(triton.cdiv(x.numel(), 64),)](x, o, x.numel(), B=64)\n    return (o,)",
    "import triton\nCONFIGS = [triton.Config({'B': b}, num_warps=w) for b in (64, 128) for w in (4, 8)]\n"
    "@triton.autotune(configs=CONFIGS, key=['n'])\n@triton.jit\ndef k(x, n, B: tl.constexpr):\n    tl.store(x, n)\n",
    "def sizes(n):\n    return [triton.Config({'B': n}, num_stages=2)]\n@triton.autotune(configs=sizes(64), key=['n'])\n"
    "@triton.heuristics({'EVEN': lambda args: args['n'] % 64 == 0})\n@triton.jit\ndef k(x, n, EVEN: tl.constexpr):\n    pass",
    "import torch.nn.functional as F\nfrom torch import nn\ndef entry(x):\n    return (F.gelu(x, approximate='tanh'),)",
    "@triton.jit\ndef k(x):\n    'Doc.'\n    tl.extra.cuda.gdc_wait()\n    tl.store(x, 1)\ndef f(x):\n    k[(1,)](x, launch_pdl=True)\n    return (x,)",
    "from triton.language.extra import libdevice\n@triton.jit\ndef k(x):\n    tl.store(x, libdevice.tanh(tl.load(x)))",
    "import math\nLOG2E = 1.0 / math.log(2)\nBLOCK = tl.constexpr(128)\nTABLE = {(1, 2): 64, 'a': (1, 2)}\n"
    "def entry(x):\n    n = TABLE.get(tuple(x.shape), 32) if x.dim() in TABLE else TABLE['a'][0]\n    return (x * n * LOG2E,)",
    "def entry(x):\n    parts, seen = [], {}\n    for i, p in enumerate(x.split(2)):\n        seen[i] = p\n        parts.append(p)\n"
    "    y = torch.empty_like(x)\n    y[0], y[1:] = seen[0], x[1:]\n    return (torch.cat(parts),)",
    "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Plan:\n    rows: int\n    def run(self, x):\n"
    "        return x[: self.rows]\nPLAN = Plan(4)\ndef entry(x):\n    return (PLAN.run(x),)",
    "def entry(x):\n    props = torch.cuda.get_device_properties(x.device)\n    return (x * props.multi_processor_count,)",
    "def prepare(w):\n    return (w.t().contiguous(),)\ndef entry(x, w, p):\n    return (torch.mm(x, p),)",
    "def entry(input, id=3):\n    hash = input * id\n    return (torch.ops.aten.relu.default(hash),)",
    "from typing import Optional\ndef entry(x: Optional[torch.Tensor] = None, *, scale: float = 1.0) -> tuple:\n"
    "    if x is None:\n        raise ValueError(f'no tensor, scale {scale}')\n    return (x.to(torch.float32),)",
    "@triton.jit\ndef k(x):\n    y = tl.inline_asm_elementwise('tanh.approx.f32 $0, $1;', '=f,f', [tl.load(x)], tl.float32, True, 1)\n"
    "    tl.store(x, y)",
    "def entry(x):\n    with torch.cuda.device(x.device), torch.no_grad():\n        return (getattr(x, 'relu')(),)",
    "def entry(x):\n    count = 0\n    def step(y):\n        nonlocal count\n        count += 1\n        return y + count\n    return (step(step(x)),)",
    "def aligned(x):\n    return x if x.data_ptr() % 16 == 0 else x.clone()\ndef entry(x):\n    return (aligned(x),)",
    "def entry(x):\n    try:\n        y = x.view(-1)\n    except RuntimeError as error:\n        y = x.reshape(-1)\n    return (y,)",
]  # fmt: skip

FORBIDDEN = {
    "import os": "import of os",
    "import torch, sys": "import of sys",
    "from torch.utils import cpp_extension": "torch.utils.cpp_extension",
    "from math import *": "math.*",
    "from . import x": "import of",
    "def f():\n    import time\n    return time.time()": "import of time",
    "import torch.utils.data": "torch.utils.data",
    "from importlib import import_module": "importlib",
    "def f(x):\n    return open('/etc/passwd').read()": "open",
    "def f(x):\n    return eval('1')": "eval",
    "def f(x):\n    return __import__('os')": "__import__",
    "def f(x):\n    return globals()": "globals",
    "def f(x):\n    return vars(torch)": "vars",
    "def f(x):\n    return id(x)": "id",
    "def f(x):\n    return hash(x)": "hash",
    "def g(open):\n    return open\ndef f(x):\n    return open(x)": "line 4: open",
    "def f(x):\n    return [open for open in ()], open('x')": "open",
    "N = 0\ndef f(x):\n    global N\n    N += 1\n    return x * (N < 5)": "global N",
    "N = [0]\ndef f(x):\n    N[0] += 1\n    return x * (N[0] < 5)": "N[0] =",
    "N = []\ndef f(x):\n    N.append(1)\n    return x": "N.append()",
    "N = []\ndef f(x):\n    n = N\n    n.append(1)\n    return x": "line 3: N",
    "N = [] if torch else []\ndef f(x):\n    n = N\n    n.append(1)": "line 3: N",
    "N = ([],)\ndef f(x):\n    n = N[0]\n    n.append(1)": "line 1: []",
    "A = []\nB = {1: A}\ndef f(x):\n    b = B[1]\n    b.append(1)": "line 2: A",
    "N = {}\ndef f(x):\n    return N.setdefault(x.data_ptr(), x * 2)": ".data_ptr",
    "def f(x):\n    return x * (x.data_ptr() % 4096)": ".data_ptr",
    "def f(x, n):\n    return x * (x.data_ptr() % n)": ".data_ptr",
    "def f(x):\n    return x * (x.data_ptr() // 16)": ".data_ptr",
    "def f(x):\n    return torch.zeros(1).storage().data_ptr() % 16": ".storage",
    "def f(x, kept={}):\n    kept[1] = x\n    return x": "changeable default",
    "def make():\n    return []\ndef f(x, kept=make()):\n    kept.append(x)": "line 3: make",
    "def f(x):\n    f.count = 1": "f.count =",
    "def f(x):\n    torch.relu = None": "torch.relu =",
    "torch.relu = None": "torch.relu",
    "torch.backends.cuda.matmul.allow_tf32 = True": "may set names of its own only",
    "def f(x):\n    setattr(torch, 'relu', None)": "setattr",
    "def f(x):\n    del torch.relu": "torch.relu =",
    "G = (i for i in range(9))\ndef f(x):\n    return x * (3 in G)": "line 1",
    "import itertools\nC = itertools.count()\ndef f(x):\n    return next(C)": "itertools.count",
    "import functools\n@functools.lru_cache\ndef f(x):\n    return x": "lru_cache",
    "def keep(f):\n    return f\n@keep\ndef g(x):\n    return x": "@keep",
    "class A:\n    n = 0\n    def f(self):\n        self.n += 1\nX = A()": "self.n =",
    "class A:\n    n = []\n": "line 2: []",
    "class A:\n    def __del__(self):\n        pass": "__del__",
    "class A(torch.Tensor):\n    pass": "class of torch.Tensor",
    "class A:\n    def __init__(self):\n        self.kept = []\nX = A()": "line 4: A",
    "X = torch.zeros(1)\ndef f(x):\n    return X.add_(1)": "line 1: torch.zeros",
    "if True:\n    X = 1": "a file is imports",
    "for i in range(3):\n    pass": "a file is imports",
    "print('loaded')": "a file is imports",
    "def f(x):\n    return x._version": "._version",
    "def f(x):\n    return x.__class__.__mro__": ".__mro__",
    "def f(x):\n    return getattr(x, '_base')": "._base",
    "def f(x):\n    return getattr(x, 'data' + '_ptr')()": "getattr of a made name",
    "def f(x):\n    g = getattr\n    return g(x, 'a')": "getattr",
    "import operator\ndef f(x):\n    return operator.attrgetter('_version')(x)": "operator.attrgetter",
    "def f(x):\n    try:\n        x.y\n    except Exception as e:\n        return e.__traceback__": ".__traceback__",
    "def f(x):\n    return (i for i in x).gi_frame": ".gi_frame",
    "def f(x):\n    return torch.load('x')": "torch.load",
    "def f(x):\n    return torch.from_file('x')": "torch.from_file",
    "def f(x):\n    return torch.utils.cpp_extension.load('a', [])": "torch.utils.cpp_extension.load",
    "def f(x):\n    t = torch\n    return t.load('x')": "a module is no value",
    "def f(x):\n    return torch.nn.functional.torch.load('x')": "torch.nn.functional.torch",
    "def f(x):\n    return tl.core.os.environ": "triton.language.core",
    "def f(x):\n    return tl.standard": "triton.language.standard",
    "def f(x):\n    return torch.rand(3)": "torch.rand",
    "def f(x):\n    return x.uniform_()": ".uniform_",
    "import torch.nn.functional as F\ndef f(x):\n    return F.dropout(x)": "dropout",
    "def f(x):\n    return torch.cuda.Event(enable_timing=True)": "torch.cuda.Event",
    "def f(x):\n    return torch.is_grad_enabled()": "torch.is_grad_enabled",
    "def f(x):\n    return torch.compile(f)": "torch.compile",
    "def f(x):\n    return x.storage_offset()": ".storage_offset",
    "def f(x):\n    return torch.cuda.current_stream().cuda_stream": ".cuda_stream",
    "def f(x):\n    return torch.ops.load_library('x')": "torch.ops.load_library",
    "@torch.library.custom_op('aten::relu', mutates_args=())\ndef f(x: torch.Tensor) -> torch.Tensor:\n    return x": "namespace",
    "@triton.jit\ndef k(x):\n    tl.inline_asm_elementwise('mov.u64 $0, %globaltimer;', '=l', [], tl.int64, False, 1)": "inline assembly",
    "def f(x):\n    torch = x\n    return torch": "is the name of a module",
    "tl = 1": "is the name of a module",
    "def f(:": "no Python",
    "def f(x):\n    # \x1b[2J\n    return x": "line 2: a control character",
    "async def f(x):\n    return x": "a file is imports",
    "def f(x):\n    def g():\n        global q\n        q = 1": "global q",
    "def f(x):\n    print(x, file=3)": "print to a file",
    "def f(x):\n    return type('A', (), {})": "type of three",
    "def f(x):\n    return unknown(x)": "is defined nowhere",
    "@triton.jit\ndef k(x):\n    tl.store(x, 1)\n    tl.extra.cuda.gdc_wait()\ndef f(x):\n    k[(1,)](x, launch_pdl=True)": "line 6: launch_pdl",
    "@triton.jit\ndef k(x):\n    pass\ndef f(x):\n    k[(1,)](x, **{'launch_pdl': True})": "line 5: launch_pdl",
    "@triton.autotune(configs=[], key=[])\n@triton.jit\ndef k(x):\n    pass\ndef f(x):\n    c = k.configs\n    c.append(1)": ".configs",
}  # fmt: skip


@pytest.mark.parametrize("text", FINE, ids=range(len(FINE)))
def test_what_kernels_do_is_allowed(text):
    assert [str(v) for v in violations(text)] == []


@pytest.mark.parametrize("text", FORBIDDEN)
def test_what_no_kernel_needs_is_refused_with_its_line(text):
    found = "\n".join(map(str, violations(text)))
    assert FORBIDDEN[text] in found, found
    assert found.startswith("line ")


@pytest.mark.parametrize("case", HONEST_CASES, ids=lambda c: c.name)
def test_honest_candidates_keep_to_the_rule_or_say_why_they_do_not(case):
    found = [str(v) for v in violations(case.source, case.language)]
    assert bool(found) == bool(case.beyond), found


def test_every_attack_on_the_judge_is_refused_for_its_text():
    attacks = [c for c in EXPLOITS if c.kind in ("grader attack", "timing")]
    passed = [c.name for c in attacks if not violations(c.source, c.language)]
    assert not passed


def test_answers_of_models_in_the_prompts_keep_to_the_rule():
    count = 0
    for path in sorted(GOLDEN.glob("*.txt")):
        for block in path.read_text().split("```python\n")[1:]:
            text = block.split("```")[0]
            try:
                ast.parse(text)
            except SyntaxError:
                continue
            if "@triton.jit" in text:
                assert [str(v) for v in violations(text)] == [], path
                count += 1
    assert count >= 3


def test_names_of_torch_are_operators_and_no_doors():
    for name in ("torch.matmul", "torch.nn.functional.scaled_dot_product_attention", "torch.float8_e4m3fn.itemsize",
                 "triton.language.dot", "triton.language.PropagateNan.ALL", "torch.Tensor.add", "torch._scaled_mm", "torch.ops.aten.mm.default",
                 "triton.runtime.driver.active.utils.get_device_properties"):  # fmt: skip
        assert may_use(name), name
    for name in ("torch.save", "torch.hub.load", "torch._C", "torch.manual_seed", "torch.set_num_threads",
                 "torch.nn.functional.importlib", "torch.special.torch", "triton.knobs.cache", "triton.testing.do_bench",
                 "torch.cuda.CUDAGraph", "torch.Tensor.data_ptr", "torch.__builtins__", "collections.abc.sys",
                 "triton.runtime.driver.active.launcher_cls"):  # fmt: skip
        assert not may_use(name), name


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.linear(x), -1)


def lowered() -> tuple[Program, Program]:
    """A program on PyTorch, and the same with the first kernel of a template."""
    program = Program.start(capture(Layer, lambda: (torch.empty(256, 256),)))
    region = program.regions[-1]
    patch = TemplateCoder().write(Request(program, Action("lowering", (region.id,)), DEVICES["h200"]))
    return program, patch.apply(program)


def test_printed_kernels_keep_to_the_rule_so_that_a_model_can_edit_them():
    program, _ = lowered()
    for region in program.regions:
        patch = TemplateCoder().write(Request(program, Action("lowering", (region.id,)), DEVICES["h200"]))
        for implementation in patch.alternatives:
            assert [str(v) for v in violations(implementation.source)] == []


def test_who_printed_a_text_is_seen_and_not_said():
    start, program = lowered()
    region = next(r for r in program.regions if program.implementation(r).generated)
    made = program.implementation(region)
    assert not foreign(program) and forbidden(program) is None and not foreign(start)
    assert known(region, made)
    claimed = Implementation("triton", "import os\n" + made.source, made.entry, schedule=made.schedule)
    assert not known(region, claimed)
    lies = program.with_implementation(region.id, claimed)
    assert foreign(lies) == (claimed,) and "line 1: import of os" in (forbidden(lies) or "")
    assert judged_text(lies, "off") == ("forbidden", forbidden(lies)) and judged_text(lies, "off", True) is None


def test_a_text_that_was_read_again_is_printed_again_to_be_known(monkeypatch):
    _, program = lowered()
    region = next(r for r in program.regions if program.implementation(r).generated)
    monkeypatch.setattr("qimeng.program.origin._noted", set())
    assert known(region, program.implementation(region))


def test_without_landlock_a_text_of_others_is_not_run(monkeypatch):
    monkeypatch.setattr("qimeng.envs.screening.static_pass.needs_landlock", lambda: "landlock is missing")
    program = Program.start(sample_graph())
    mine = program.with_implementation(
        program.regions[0].id, Implementation("torch", "def entry(x):\n    pass", "entry")
    )
    assert judged_text(mine, "full") == ("unsupported", "landlock is missing")
    assert judged_text(mine, "basic") is None and judged_text(program, "full") is None
