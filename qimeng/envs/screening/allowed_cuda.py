"""Checks that a kernel's CUDA C++ uses only allowed constructs; if not, gives the line and what to do instead.

The rules are those for the Python around it (`qimeng.envs.screening.allowed_text`): a kernel computes from its
arguments and keeps nothing between launches. A text includes only device headers. It has no variables outside of
functions, assembly, clocks, heap or launches of its own, and builds no words with the preprocessor. Deals in text:
lines are joined, and comments and strings removed, as in C++. Runs nothing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

HEADERS = frozenset(
    "cuda_fp16.h cuda_bf16.h cuda_fp8.h cuda_fp6.h cuda_fp4.h mma.h cooperative_groups.h cooperative_groups/reduce.h "
    "cooperative_groups/scan.h cooperative_groups/memcpy_async.h cuda_pipeline.h vector_types.h math_constants.h "
    "cuda_runtime.h".split()
)
"""What may be included: types, conversions, tensor cores and groups of threads."""

_WORDS: dict[str, str] = {
    **dict.fromkeys(("asm", "__asm", "__asm__"), "inline assembly is not allowed; write C++ and CUDA's intrinsics"),
    **dict.fromkeys(
        "clock clock64 __nanosleep globaltimer __globaltimer".split(), "a kernel does not ask for the time"
    ),
    **dict.fromkeys("__trap __brkpt __assertfail assert abort exit __prof_trigger".split(), "a kernel runs to its end"),
    **dict.fromkeys("printf puts vprintf".split(), "a kernel writes tensors only"),
    **dict.fromkeys(
        "malloc free calloc alloca new delete".split(), "the heap outlives a launch; use registers or shared memory"
    ),
    **dict.fromkeys(
        ("thread_local", "__managed__", "texture", "surface"), "nothing is kept from one launch to the next"
    ),
    "goto": "write a loop",
}
_PRAGMAS = ("unroll", "nounroll")
_DIRECTIVES = frozenset("define undef if ifdef ifndef elif else endif include pragma".split())
_API = re.compile(r"\b(cuda|cu|nvrtc|curand|cublas)[A-Z]\w*")
_STATE = re.compile(r"\b(const|constexpr|__constant__)\b")


def cuda_violations(text: str) -> tuple[tuple[int, str, str], ...]:
    """What a CUDA C++ text does that no kernel may do: (line from 1, what stands there, what to do instead)."""
    return tuple(sorted(set(_look(text))))


def embedded_violations(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """What the CUDA C++ in a Python text does that no kernel may do, by line of the Python text.

    Every compiled text is a constant of the file, so it can be checked here.
    """
    texts: dict[str, ast.Constant] = {}
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
        value = node.value if isinstance(node, ast.Assign) else None
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant) and isinstance(value.value, str):
            texts[target.id] = value
    at_top = {id(n.value) for n in tree.body if isinstance(n, ast.Assign)}
    seen: set[int] = set()
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    for call in (c for c in calls if isinstance(c.func, ast.Name) and c.func.id == "cuda_kernel"):
        if id(call) not in at_top:
            yield call.lineno, "cuda_kernel", 'write `kernel = cuda_kernel(TEXT, "name")` at the top of the file'
        first = call.args[0] if call.args else None
        text = texts.get(first.id) if isinstance(first, ast.Name) else first
        if not (isinstance(text, ast.Constant) and isinstance(text.value, str)) or len(call.args) != 2 or call.keywords:
            yield call.lineno, "cuda_kernel", "give it a text that stands in the file as a constant, and a name"
        elif id(text) not in seen:
            seen.add(id(text))
            for line, what, advice in cuda_violations(text.value):
                yield text.lineno + line - 1, what, advice


def _look(text: str) -> Iterator[tuple[int, str, str]]:
    for found in re.finditer(r"\?\?[=/'()!<>-]|%:|\\u|\\U", text):
        yield _line(text, found.start()), found[0], "write the characters that are meant"
    joined = re.sub(r"\\[ \t]*\n", "", text)
    if joined != text:
        yield _line(text, re.search(r"\\[ \t]*\n", text).start()), "\\", "do not go on in the next line"  # type: ignore[union-attr]
    code, strings = _without_comments(joined)
    for at, string in strings:
        if string != '"C"' or not re.search(r"\bextern\s*$", code[max(0, at - 12) : at]):
            yield _line(joined, at), string[:40], "a kernel needs no strings"
    yield from _directives(code)
    bare = re.sub(r"^[ \t]*#[^\n]*", "", code, flags=re.MULTILINE)
    for found in re.finditer(r"\b[A-Za-z_]\w*", code):
        if found[0] in _WORDS:
            yield _line(code, found.start()), found[0], _WORDS[found[0]]
    for found in _API.finditer(code):
        yield _line(code, found.start()), found[0], "a kernel calls functions of the device, no library's"
    for found in re.finditer(r"##|<<<", code):
        advice = "names are written as they are" if found[0] == "##" else "a kernel launches no others"
        yield _line(code, found.start()), found[0], advice
    for found in re.finditer(r"\bstatic\b([^;{=]*)([;{=])", bare):
        is_function = found[2] == "{" and "(" in found[1]
        if not is_function and not re.search(r"\b(const|constexpr)\b", found[1]):
            yield _line(bare, found.start()), "static", "a static variable would be kept from one launch to the next"
    yield from _variables(bare)


def _without_comments(text: str) -> tuple[str, list[tuple[int, str]]]:
    """`text` with blanks in place of comments and of what strings hold, and the strings with their places."""
    pattern = re.compile(r"//[^\n]*|/\*.*?(?:\*/|\Z)|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'", re.DOTALL)
    strings: list[tuple[int, str]] = []

    def blank(found: re.Match[str]) -> str:
        if found[0][0] == '"':
            strings.append((found.start(), found[0]))
        return re.sub(r"[^\n]", " ", found[0])

    includes = {m.start() for m in re.finditer(r"^[ \t]*#[ \t]*include[^\n]*", text, re.MULTILINE)}
    lines, out = text.split("\n"), []
    offset = 0
    for line in lines:  # the name of a header stands in what looks like a string
        kept = offset in includes
        out.append(line.replace('"', "\0") if kept else line)
        offset += len(line) + 1
    return pattern.sub(blank, "\n".join(out)).replace("\0", '"'), strings


def _directives(code: str) -> Iterator[tuple[int, str, str]]:
    """Lines for the preprocessor."""
    for found in re.finditer(r"^[ \t]*#[ \t]*(\w*)([^\n]*)", code, re.MULTILINE):
        name, rest, line = found[1], found[2].strip(), _line(code, found.start())
        if name not in _DIRECTIVES:
            yield line, f"#{name}", "use #include, #define, #if and #pragma unroll alone"
        elif name == "include" and rest.strip('<>"') not in HEADERS:
            yield line, f"#include {rest[:40]}", f"include headers of the device alone: {', '.join(sorted(HEADERS))}"
        elif name == "pragma" and rest.split("(")[0].split(" ")[0] not in _PRAGMAS:
            yield line, f"#pragma {rest[:40]}", "use #pragma unroll alone"
        elif name == "define" and "#" in rest:
            yield line, "#", "names are written as they are"
    for found in re.finditer(r"\b_Pragma\b|\b__pragma\b", code):
        yield _line(code, found.start()), found[0], "use #pragma unroll alone"


def _variables(code: str) -> Iterator[tuple[int, str, str]]:
    """Variables outside of functions that a launch could change and a later one could read."""
    depth, start = 0, 0
    opened: list[bool] = []  # whether each open brace only groups declarations
    for at, character in enumerate(code):
        head = code[start:at]
        if character == "{":
            groups = bool(re.search(r"\bnamespace\b[^()]*$|\bextern\s*$", head.strip() or " ")) and depth == 0
            opened.append(groups)
            if depth == 0 and not groups and not re.search(r"\)|\b(struct|class|union|enum)\b", head):
                yield from _variable(code, start, head)
            depth += not groups
            start = at + 1 if depth == 0 else start
        elif character == "}" and opened:
            depth -= not opened.pop()
            if depth == 0:
                start = at + 1
        elif character == ";" and depth == 0:
            yield from _variable(code, start, head)
            start = at + 1


def _variable(code: str, start: int, head: str) -> Iterator[tuple[int, str, str]]:
    head_text = head.strip()
    constant = _STATE.search(head_text) and not re.search(r"\*(?!\s*const\b)", head_text.split("=")[0])
    if not head_text or "__shared__" in head_text or head_text.startswith(("using ", "typedef ")):
        return
    if constant and not re.search(r"\b__device__\b", head_text):
        return
    if re.match(r"(template\s*<[^;{}]*>\s*)?(struct|class|union|enum)\s+\w+$", head_text):
        return
    line = _line(code, start + len(head) - len(head.lstrip()))
    text = "only functions, types and constants stand outside of functions; define functions before they are used"
    yield line, head_text.split("\n")[-1][:60], text


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


__all__ = ["HEADERS", "cuda_violations", "embedded_violations"]
