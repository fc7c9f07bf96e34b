"""A spec from a description in words: a language model writes it, a sandboxed process runs it, the user reads it.

Deals in asking, checking and asking again. The text runs in a process of its own, never in this one: the spec that
comes back has not been executed here. Knows nothing about kernels.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree

from qimeng.coder.llm.chat import Chat, ChatError, HasChat, Message
from qimeng.coder.llm.fence import clipped, fenced
from qimeng.coder.llm.reply import read_file
from qimeng.coder.llm.words import Words
from qimeng.envs.errors.degenerate import degenerate
from qimeng.envs.sandbox import needs_landlock
from qimeng.envs.screening.static_pass import look as look_at
from qimeng.envs.steps.spec_wording import disagreement, read_words
from qimeng.envs.workers.channel import Channel
from qimeng.envs.workers.forkserver import ForkServer, WorkerFailed
from qimeng.envs.workers.plain_data import record_of
from qimeng.envs.workers.service import Refused, serve
from qimeng.envs.workers.shared_server import shared_server
from qimeng.errors import SpecError
from qimeng.spec import KernelSpec
from qimeng.spec.fake import fake_tensors
from qimeng.spec.origin import SourceOrigin

IMPORTS = frozenset({"torch", "math", "typing", "collections", "dataclasses", "functools", "itertools", "__future__"})
"""What a reference may import."""

FORBIDDEN = frozenset("open exec eval compile __import__ input breakpoint globals vars setattr delattr".split())
"""Builtins that no reference needs."""

SECONDS = 120.0
"""After this a reference counts as hung."""


Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Seen:
    """What a run of the reference showed.

    Attributes:
        inputs: shape of each input tensor.
        parameters: shape of each parameter and buffer.
        outputs: shape of each output tensor.
        problem: what is wrong with it; empty where nothing is.
    """

    inputs: Shapes = ()
    parameters: Shapes = ()
    outputs: Shapes = ()
    problem: str = ""

    @classmethod
    def from_data(cls, data: Any) -> Seen:
        """The object that `asdict` and JSON made plain data of; a TypeError for anything else."""
        return record_of(cls, data)

    @property
    def shapes(self) -> Shapes:
        """All of them."""
        return (*self.inputs, *self.parameters, *self.outputs)

    def text(self) -> str:
        """For people."""

        def listed(shapes: Sequence[Sequence[int]]) -> str:
            return ", ".join("x".join(map(str, s)) or "scalar" for s in shapes) or "none"

        return f"inputs {listed(self.inputs)}; parameters {listed(self.parameters)}; outputs {listed(self.outputs)}"


def spec_from_text(
    words: str,
    *,
    coder: Any,
    out: str | Path | None = None,
    dtype: str | None = None,
    mode: str | None = None,
    repairs: int = 2,
    show: Callable[[str], None] = print,
    prompts: str | Path | None = None,
) -> KernelSpec:
    """The computation that `words` describe, as a file that is read before it is used.

    A language model writes `Model`, `get_inputs` and `get_init_inputs`. The text is parsed, screened, run in a
    sandboxed process, and held against the sizes that the words state; what is wrong goes back to the model. The file
    is written and shown; edit it and use `KernelSpec.from_file` where it is not what you meant.

    Args:
        words: what is to be computed, with shapes and dtype: ``"batched matrix product of A and B, batch 32, fp16,
            512 x 512"``.
        coder: who writes: a `Chat`, a coder that has one, or its name (``"openai:MODEL"``).
        out: the file; ``runs/NAME.py`` by default, NAME from the first words. It must not exist.
        dtype: floating dtype; by default what the words say, else float32.
        mode: precision mode of the spec.
        repairs: times that the model may correct its file.
        show: called with what was written and seen.
        prompts: folder of the user's own prompts (see `qimeng.coder.llm.words.Words`).

    Raises:
        SpecError: there is something wrong with what the model wrote last, or the file exists; the message says what,
            and where the text is.
        ChatError: the model gave no answer.
        ValueError: the coder has no language model.
    """
    if missing := needs_landlock():
        raise SpecError(missing)
    chat, stated = chat_of(coder), read_words(words)
    path = Path(out) if out is not None else Path("runs") / f"{slug(words)}.py"
    if path.exists():
        raise SpecError(f"{path} exists; name another file, or use it as it is: KernelSpec.from_file({str(path)!r})")
    asked = Words(prompts)
    messages = [Message("system", asked.fill("describe")), Message("user", words)]
    text, seen, problem = "", Seen(), "the model wrote nothing"
    server = shared_server()  # it gets ready while the model writes
    for left in range(repairs, -1, -1):
        reply = next(iter(chat.ask(messages)))
        try:
            text = read_file(reply)
            seen = try_text(text, server)
            problem = seen.problem or disagreement(stated, seen.shapes, text) or ""
        except ChatError as error:
            problem = str(error)
        if not problem or not left:
            break
        question = asked.fill("describe-repair", problem=fenced(clipped(problem, 2000), "what is wrong", "text"))
        messages = [*messages[:2], Message("assistant", clipped(reply.text, 20_000)), Message("user", question)]
    if not text:
        raise SpecError(f"no file came of it: {problem}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_headed(text, words, chat.name))
    show(path.read_text())
    if problem:
        raise SpecError(f"{problem}. The text is in {path}: mend it and use KernelSpec.from_file")
    precision = dtype or stated.dtype or "float32"
    show(f"{seen.text()}; to be computed in {precision}. Written to {path}: read it before you use it.")
    return KernelSpec(path.stem, SourceOrigin(path.read_text(), path.stem), precision, mode or "default")


def chat_of(coder: Any) -> Chat:
    """The language model of `coder`.

    Raises:
        ValueError: it has none, or an unknown name.
    """
    from qimeng.envs.steps.setup import make_coder

    made = make_coder(coder) if isinstance(coder, str) else coder
    chat = made.chat if isinstance(made, HasChat) else made
    if not isinstance(chat, Chat):
        name = coder if isinstance(coder, str) else type(coder).__name__
        raise ValueError(f"{name} has no language model to write a spec from words; name one, as in openai:MODEL")
    return chat


def slug(words: str) -> str:
    """A file's name from the first words.

    >>> slug("Batched matrix product of A and B, batch 32")
    'batched_matrix_product_of_a'
    """
    return "_".join(re.findall(r"[a-z0-9]+", words.lower())[:5]) or "described"


def try_text(text: str, server: ForkServer) -> Seen:
    """What is seen of the reference in `text`.

    It runs in a fresh process in a sandbox, at reduced size where it is large; its shapes are those of the full size.

    Args:
        text: of the file.
        server: starts the process.
    """
    problem = screen(text)
    if problem is not None:
        return Seen(problem=problem)
    process = server.start("qimeng.envs.steps.describe:main", sandbox="full")
    try:
        data, _ = process.call("look", SECONDS, text=text)
        return Seen.from_data(data)
    except WorkerFailed as failed:
        return Seen(problem=f"it does not run: {failed}")
    except TypeError as error:
        return Seen(problem=f"its process sent no result: {error}")
    finally:
        process.kill()


def screen(text: str) -> str | None:
    """Why `text` is refused without a run: not Python, or a forbidden import or call; None if it is fine."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        return f"it is no Python: {error}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            foreign = [n for n in names if n.partition(".")[0] not in IMPORTS]
            if foreign:
                return f"line {node.lineno}: it imports {foreign[0]}; a reference needs torch and no more"
        if isinstance(node, ast.Name) and node.id in FORBIDDEN:
            return f"line {node.lineno}: it uses {node.id}, which no reference needs"
    grave = next((f for f in look_at(text) if f.grave), None)
    return None if grave is None else str(grave)


def _headed(text: str, words: str, writer: str) -> str:
    said = " ".join(words.split())
    return f"# From the words: {said}\n# Written by {writer}; read it before it is optimized.\n\n{text.strip()}\n"


# -- in the process


def main(channel: Channel) -> None:
    """Answer one command, `look`."""
    serve(channel, {"look": look})


def look(text: str) -> dict[str, Any]:
    """`Seen` of the reference in `text`, as plain data.

    Raises:
        Refused: it does not load, or fails on its own inputs.
    """
    try:
        spec = KernelSpec.from_source(text, "reference")
        spec.check()
    except SpecError as error:
        raise Refused("error", str(error)) from None
    with fake_tensors(), torch.no_grad():
        module, inputs = spec.module(), spec.inputs(0)
        held = [*module.parameters(), *module.buffers()]
        tensors = _tensors(inputs)
        try:
            outputs = _tensors(module(*inputs))
        except Exception:  # noqa: BLE001  some operators need values; `check` has run it on those
            outputs = None
    if outputs is None:
        outputs = _results(spec, 0) if spec.is_small else []
    return asdict(Seen(_shapes(tensors), _shapes(held), _shapes(outputs), _problem(spec.reduced())))


def _problem(spec: KernelSpec) -> str:
    """What is wrong with the results; empty where nothing is, or where it is too large to run here."""
    if not spec.is_small:
        return ""

    found = _results(spec, 1)
    if not all(bool(y.isfinite().all()) for y in found):
        return "its results are not finite (NaN or infinite) on its own inputs"
    same = [a.shape == b.shape for a, b in zip(found, _results(spec, 2), strict=False)]
    others = (lambda: _results(spec, 2)) if spec.inputs(0) and all(same) else None
    guessed = degenerate([y for y in found if y.is_floating_point()] or found, others)
    return f"its result says nothing: {guessed}" if guessed else ""


def _results(spec: KernelSpec, seed: int) -> list[torch.Tensor]:
    with torch.no_grad():
        return _tensors(spec.module()(*spec.inputs(seed)))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in _pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def _shapes(tensors: Sequence[torch.Tensor]) -> Shapes:
    return tuple(tuple(map(int, t.shape)) for t in tensors)


__all__ = ["Seen", "chat_of", "look", "main", "screen", "slug", "spec_from_text", "try_text"]
