"""Static analysis of a candidate's text, before anything runs.

Deals in syntax trees. Names are followed through imports, aliases and `getattr` with a constant. Names built at run
time are not seen, so a clean text proves nothing. This is a cheap first filter: it sorts suspicious alternatives of a
patch last, and its advice appears with an evaluation's error or in its notes. Refusals are separate: `forbidden` checks
that untrusted text uses only allowed constructs (`qimeng.envs.screening.allowed_text`), because no test run shows what
happens after many calls or elsewhere. Knows nothing about processes, values or times.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from qimeng.envs.sandbox import needs_landlock
from qimeng.envs.screening.allowed_text import violations
from qimeng.envs.screening.origin import foreign
from qimeng.envs.workers.plain_text import plain_text
from qimeng.interfaces import Evaluation
from qimeng.program.program import Program


@dataclass(frozen=True, order=True)
class Finding:
    """One thing that the text does.

    Attributes:
        line: where, from 1.
        rule: key in `RULES`.
        text: what stands there.
        grave: whether no honest kernel needs it; else it is only suspicious.
    """

    line: int
    rule: str
    text: str
    grave: bool

    def __str__(self) -> str:
        return f"line {self.line}: {self.text}: {RULES[self.rule]}"


RULES = {
    "syntax": "this is no Python",
    "patch": "changes a name that belongs to another module; a kernel needs its own names only",
    "caller": "looks into its callers or into all objects of the process",
    "callback": "asks the interpreter or PyTorch to be called back",
    "process": "starts, ends or signals processes",
    "message": "writes to descriptors or sockets, which are not its own",
    "lookup": "reads files that tell about other processes",
    "modules": "looks into the table of loaded modules",
    "subclass": "makes a tensor of another class, which may compute later than it says",
    "thread": "starts threads; the call has to wait for them",
    "seed": "makes random numbers from a fixed seed when it is loaded; inputs and weights have others",
    "pointer": "remembers addresses or identities; memory is used again for other content",
    "half": "computes in a lower precision than its inputs have",
    "no-kernel": "is said to be generated and launches no kernel of its own",
    "unused-kernel": "defines a kernel that is never launched",
}
"""Rule to the advice that it stands for."""

_CALLS: dict[str, tuple[str, bool]] = {
    "sys._getframe": ("caller", True),
    "sys._current_frames": ("caller", True),
    "inspect.stack": ("caller", True),
    "inspect.currentframe": ("caller", True),
    "gc.get_objects": ("caller", True),
    "gc.get_referrers": ("caller", True),
    "ctypes.pythonapi": ("caller", True),
    "sys.settrace": ("callback", True),
    "sys.setprofile": ("callback", True),
    "sys.addaudithook": ("callback", True),
    "gc.callbacks": ("callback", True),
    "atexit.register": ("callback", True),
    "signal.signal": ("callback", True),
    "signal.setitimer": ("callback", True),
    "torch.nn.modules.module.register_module_forward_pre_hook": ("callback", True),
    "torch.nn.modules.module.register_module_forward_hook": ("callback", True),
    "torch.overrides.TorchFunctionMode": ("callback", True),
    "torch.utils._python_dispatch.TorchDispatchMode": ("callback", True),
    "sys.exit": ("process", True),
    "SystemExit": ("process", True),
    "os.write": ("message", True),
    "sys.modules": ("modules", True),
    "threading.Thread": ("thread", False),
    "concurrent.futures.ThreadPoolExecutor": ("thread", False),
    "torch.manual_seed": ("seed", False),
    "torch.Tensor._make_subclass": ("subclass", True),
    "torch.library.Library": ("patch", True),
    "id": ("pointer", False),
}
_PREFIXES: dict[str, tuple[str, bool]] = {
    "os.fork": ("process", True),
    "os.kill": ("process", True),
    "os.exec": ("process", True),
    "os.spawn": ("process", True),
    "os.system": ("process", True),
    "os._exit": ("process", True),
    "os.abort": ("process", True),
    "subprocess.": ("process", True),
    "multiprocessing.": ("process", True),
    "socket.": ("message", True),
}
_HEADER = {"torch": "torch", "triton": "triton", "tl": "triton.language"}
"""What every implementation finds imported."""
_BASES = ("torch.Tensor", "torch.nn.Parameter", "torch.overrides.TorchFunctionMode")
_METHODS = {
    "data_ptr": ("pointer", False),
    "as_subclass": ("subclass", True),
    "half": ("half", False),
    "bfloat16": ("half", False),
}


MOST = 8
"""Findings that an evaluation tells of."""


@lru_cache(512)
def look(source: str, language: str = "torch") -> tuple[Finding, ...]:
    """Findings in `source`, in the order of its lines.

    Args:
        source: Python text of an implementation.
        language: what it claims to be written in; see `qimeng.program.program.Implementation`.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        return (Finding(getattr(error, "lineno", None) or 1, "syntax", str(error)[:200], True),)
    names = _imported(tree)
    found = set(_kernels(tree, names, language))
    for node in ast.walk(tree):
        found.update(_of_node(node, names))
    return tuple(sorted(found))


def findings(program: Program) -> tuple[Finding, ...]:
    """Findings in the untrusted implementations of `program`."""
    written = dict.fromkeys((m.source, m.language) for m in foreign(program))
    return tuple(f for source, language in written for f in look(source, language))


def forbidden(program: Program) -> str | None:
    """Forbidden constructs in the untrusted implementations of `program`, in words; None if there are none."""
    found = [str(v) for m in foreign(program) for v in violations(m.source, m.language)]
    if not found:
        return None
    more = [f"and {len(found) - MOST} more"] if len(found) > MOST else []
    return "\n".join(["the text does what a kernel may not do:", *found[:MOST], *more])


def judged_text(program: Program, sandbox: str, any_text: bool = False) -> tuple[str, str] | None:
    """Class of the failure and why, if the text of a program forbids running it; else None.

    Args:
        program: what is to be judged.
        sandbox: level of the sandbox that it would run in.
        any_text: whether a text may do anything.
    """
    if not foreign(program):
        return None
    if sandbox == "full" and (missing := needs_landlock()):
        return "unsupported", missing
    reason = None if any_text else forbidden(program)
    return ("forbidden", reason) if reason else None


def gravity(program: Program) -> int:
    """Number of grave findings."""
    return sum(f.grave for f in findings(program))


def advised(evaluation: Evaluation, program: Program) -> Evaluation:
    """`evaluation` of `program` with the findings in its text: in the error if it was refused, else in the notes."""
    found = [str(f) for f in findings(program)[:MOST]]
    if not found:
        return evaluation
    if evaluation.ok:
        return replace(evaluation, notes=(*evaluation.notes, *(f"the text, {f}" for f in found)))
    return replace(evaluation, error="\n".join((evaluation.error or "", "What stands out in the text:", *found)))


def _imported(tree: ast.AST) -> dict[str, str]:
    """Local name to what it stands for: imports, and plain assignments of what was imported."""
    names = dict(_HEADER)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                names[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            what = _name(node.value, names)
            if what is not None and node.targets[0].id not in names:
                names[node.targets[0].id] = what
    return names


def _name(node: ast.AST, names: dict[str, str]) -> str | None:
    """The dotted name that an expression stands for, where it begins with an import or is a built-in's."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        base = _name(node.value, names)
        return None if base is None else f"{base}.{node.attr}"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        first = _text(node.args[0]) if node.args else None
        if node.func.id == "__import__" and first is not None:
            return first
        if node.func.id == "getattr" and len(node.args) >= 2:
            base, last = _name(node.args[0], names), _text(node.args[1])
            return None if base is None else f"{base}.{last or '?'}"
    return None


def _text(node: ast.AST) -> str | None:
    """The string that an expression of constants makes."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _text(node.left), _text(node.right)
        return None if left is None or right is None else left + right
    return None


def _of_node(node: ast.AST, names: dict[str, str]) -> Iterator[Finding]:
    yield from _patches(node, names)
    if isinstance(node, ast.ClassDef):
        for base in node.bases:
            name = _name(base, names)
            if name in _BASES:
                yield Finding(node.lineno, "subclass" if "Mode" not in name else "callback", f"class of {name}", True)
    if isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Load):
        name = _name(node, names) or (node.id if isinstance(node, ast.Name) and node.id in _CALLS else None)
        rule = _rule_of(name) if name is not None else None
        if rule is not None:
            yield Finding(node.lineno, rule[0], str(name), rule[1])
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS:
        rule = _METHODS[node.func.attr]
        yield Finding(node.lineno, rule[0], f".{node.func.attr}()", rule[1])
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("/proc"):
        yield Finding(node.lineno, "lookup", plain_text(node.value[:40]), True)


def _rule_of(name: str) -> tuple[str, bool] | None:
    if name in _CALLS:
        return _CALLS[name]
    return next((rule for prefix, rule in _PREFIXES.items() if name.startswith(prefix)), None)


def _patches(node: ast.AST, names: dict[str, str]) -> Iterator[Finding]:
    """Assignments to what was imported, in each way that Python has."""
    targets: list[ast.expr] = []
    line = getattr(node, "lineno", 1)
    if isinstance(node, ast.Assign):
        targets = [x for t in node.targets for x in (t.elts if isinstance(t, ast.Tuple) else [t])]
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        targets = [node.target]
    elif isinstance(node, ast.Delete):
        targets = node.targets
    for target in targets:
        if isinstance(target, ast.Attribute):
            base = _name(target.value, names)
            if base is not None:
                yield Finding(line, "patch", f"{base}.{target.attr} =", True)
            elif target.attr in ("__code__", "__class__", "__defaults__"):
                yield Finding(line, "patch", f".{target.attr} =", True)
        if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Call):
            inner = target.value
            if isinstance(inner.func, ast.Name) and inner.func.id in ("vars", "globals") and inner.args:
                yield Finding(line, "patch", f"{inner.func.id}(…)[…] =", True)
        if isinstance(target, ast.Subscript) and _name(target.value, names) is not None:
            yield Finding(line, "patch", f"{_name(target.value, names)}[…] =", True)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
        base = _name(node.args[0], names) if node.args else None
        yield Finding(line, "patch", f"{node.func.id}({base or '…'})", True)


def _kernels(tree: ast.Module, names: dict[str, str], language: str) -> Iterator[Finding]:
    """Kernels that are defined, and whether something launches them."""
    if language == "cuda":
        yield from _cuda_kernels(tree)
    if language != "triton":
        return
    kernels = {
        node.name: node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and any(_is_jit(d, names) for d in node.decorator_list)
    }
    launched = {
        node.func.value.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) and isinstance(node.func.value, ast.Name)
    }
    inside = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    if not kernels.keys() & inside:
        yield Finding(1, "no-kernel", "entry", True)
    for name, line in kernels.items():
        if name not in launched and name not in inside:
            yield Finding(line, "unused-kernel", name, False)


def _cuda_kernels(tree: ast.Module) -> Iterator[Finding]:
    """Kernels of CUDA C++ that are made, and whether a function launches them."""
    made = {
        node.targets[0].id: node.lineno
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id == "cuda_kernel"
    }
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    used = {n.id for f in functions for n in ast.walk(f) if isinstance(n, ast.Name)}
    if not made.keys() & used:
        yield Finding(1, "no-kernel", "entry", True)
    for name, line in made.items():
        if name not in used:
            yield Finding(line, "unused-kernel", name, False)


def _is_jit(node: ast.AST, names: dict[str, str]) -> bool:
    target = node.func if isinstance(node, ast.Call) else node
    return _name(target, names) == "triton.jit"


__all__ = ["Finding", "RULES", "advised", "findings", "forbidden", "gravity", "judged_text", "look"]
