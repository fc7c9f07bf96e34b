"""What a writer learns from, and what is held out: requests with the answer that was accepted.

Deals in stored trees and drawn specs, in which steps are worth learning, and in how they are parted. As in
Kernel-Smith, only steps that are right are learnt, and later ones only where the program got faster. Knows nothing
about models.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from itertools import chain
from multiprocessing import get_context
from pathlib import Path

from experiments.writer.edits import reply_of
from experiments.writer.further import further
from experiments.writer.resized import resized
from qimeng.actions import Context, kinds
from qimeng.coder.llm.chat import ChatError, Message, Reply
from qimeng.coder.llm.prompt import Limits, write_messages
from qimeng.coder.llm.reply import read_reply
from qimeng.coder.llm.shown import base_source, shown_source, target_region
from qimeng.coder.llm.similar import Traits, traits_of
from qimeng.coder.llm.words import Words
from qimeng.coder.template.coder import TemplateCoder, with_cuda
from qimeng.device import device_named
from qimeng.envs.judge.ranking import beats
from qimeng.envs.sandbox.layer import end_with_parent
from qimeng.envs.screening.allowed_text import violations
from qimeng.errors import CoderError, IllegalAction, ReplayError
from qimeng.graph.capture import CaptureError
from qimeng.graph.opgraph import OpGraph
from qimeng.interfaces import Action, Evaluation, Request
from qimeng.interfaces.records import action_from_data, program_from_json, program_to_json
from qimeng.planner.data.generate import Bytes, draw
from qimeng.planner.data.overlap import reserved
from qimeng.planner.data.signature import structure
from qimeng.planner.data.tree import Tree, TreeError
from qimeng.planner.data.tree_file import read_trees
from qimeng.planner.data.tree_store import trees_of
from qimeng.program.program import Implementation, Program
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec
from qimeng.store import Store, evaluation_key

WORDS = Path(__file__).parent / "words"
"""Prompts with nothing but the region, its present code and the action."""

LIMITS = Limits(tokens=10_000)

HELD_OUT_CHAINS, HELD_OUT_SHAPES = 0.2, 0.15
"""Shares of operator chains, and of shapes of the other chains, that are not learnt from."""


@dataclass(frozen=True)
class Example:
    """A request that can be made again, and the answer that was accepted.

    Attributes:
        source: text of the spec.
        dtype: of the spec.
        mode: of the spec.
        program: the program before the step (`qimeng.interfaces.records.program_to_json`).
        action: the step.
        device: name of the device.
        traits: operators, outputs and action.
        shapes: of the region's inputs and outputs, and its dtype.
        prompt: text of each message: system, user.
        answer: the code, as the template coder prints it, or with expressions in the place of numbers.
        verified: whether a judge accepted it; else the template coder wrote it and nobody looked.
        failed: a broken answer that came first and what the gates said to it; None where the answer is the first.
        base: the code that edits apply to, as the conversation shows it; None where only a whole answer will do.
    """

    source: str
    dtype: str
    mode: str
    program: str
    action: Action
    device: str
    traits: Traits
    shapes: str
    prompt: tuple[str, str]
    answer: str
    verified: bool
    failed: tuple[str, str] | None = None
    base: str | None = None

    @property
    def chain(self) -> str:
        """The operators of the region."""
        return "+".join(self.traits.ops)

    @property
    def extents(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the region's inputs and outputs."""
        found = re.findall(r"shape=\(([^)]*)\)", self.shapes)
        return tuple(tuple(int(n) for n in re.findall(r"\d+", text)) for text in found)

    @property
    def key(self) -> str:
        """Hash of the question."""
        return hashlib.blake2b(
            "\n".join((*self.prompt, *(self.failed or ()), self.device)).encode(), digest_size=8
        ).hexdigest()

    @property
    def reply(self) -> str:
        """The answer as a model gives it: edits of the present code where they are shorter than the whole."""
        return reply_of(self.answer, self.base)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation that asks for it."""
        first = Message("system", self.prompt[0]), Message("user", self.prompt[1])
        if self.failed is None:
            return first
        return (*first, Message("assistant", self.failed[0]), Message("user", self.failed[1]))

    def request(self) -> Request:
        """The request, captured anew."""
        program = program_from_json(self.program, captured(self.source, self.dtype, self.mode))
        return Request(program, self.action, device_named(self.device), self.mode)

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Example:
        """The example that `to_json` wrote."""
        data = json.loads(text)
        t = data["traits"]
        outputs = tuple((tuple(shape), dtype) for shape, dtype in t["outputs"])
        traits = Traits(tuple(t["ops"]), outputs, t["kind"], t["param"])
        action = action_from_data(data["action"])
        failed = data.get("failed")
        given = {"prompt": tuple(data["prompt"]), "failed": None if failed is None else tuple(failed)}
        return cls(**{**data, "traits": traits, "action": action, **given})


@lru_cache(64)
def captured(source: str, dtype: str, mode: str) -> OpGraph:
    """The graph of a spec. The steps of one spec follow one another, and a capture takes a quarter of a second."""
    return capture_spec(KernelSpec.from_source(source, "example", dtype=dtype, mode=mode), verify=False)


def read_source(path: Path) -> Iterator[Tree]:
    """The trees of a store (``*.sqlite``) or of a file of trees."""
    if path.suffix == ".sqlite":
        with Store(path) as store:
            yield from trees_of(store)
    else:
        yield from read_trees(path)


def from_tree(tree: Tree, others: int = 0) -> Iterator[Example]:
    """The examples of what was explored of one spec, and the same steps at `others` other sizes of it.

    None of a spec that has the structure of a benchmark's problem (`qimeng.planner.data.overlap.reserved`).

    Raises:
        CaptureError: this version does not capture the spec.
        TreeError: it captures another program than was explored.
        ReplayError: a patch cannot be applied any more.
    """
    spec, start = tree.spec(), tree.start()
    if structure(start.graph) in reserved():
        return
    tree = tree.today(start)
    judged = {(purpose, subject): e for purpose, subject, e in tree.evaluations}
    device = device_named(tree.conditions.device.removesuffix("(here)"))
    known: dict[str, tuple[Program, Evaluation | None]] = {start.digest: (start, judged.get(("step", start.digest)))}
    evaluations = {evaluation_key(tree.conditions, subject, purpose): e for (purpose, subject), e in judged.items()}
    ways: dict[str, tuple[Action, ...]] = {start.digest: ()}
    learnt: dict[tuple[Action, ...], None] = {}
    waiting = deque([start.digest])
    while waiting:
        program, before = known[parent := waiting.popleft()]
        for edge in tree.edges:
            if edge.parent != parent or not edge.accepted or edge.child is None or edge.patch is None:
                continue
            evaluation = evaluations.get(edge.evaluation or "")
            patch = tree.patches[edge.patch].patch(program.graph)
            child = patch.apply(program, evaluation.chosen if evaluation else 0)
            if child.digest not in known:
                known[child.digest] = child, evaluation or before
                ways[child.digest] = (*ways[parent], edge.action)
                waiting.append(child.digest)
            if evaluation is None or not evaluation.ok or not patch.alternatives or child.digest == parent:
                continue
            implementation = patch.alternatives[evaluation.chosen]
            first = all(not program.implementation(program.region(r)).generated for r in edge.action.regions)
            if first or beats(evaluation, before):
                learnt[(*ways[parent], edge.action)] = None
                yield from example_of(spec, Request(program, edge.action, device, tree.mode), implementation, True)
    for other, request, patch in resized(spec, learnt, device, others):
        yield from example_of(other, request, patch.alternatives[0], False)


def from_spec(
    spec: KernelSpec, device: str = "h200", steps: int = 12, walks: int = 1, seed: int = 0, cuda: bool = False
) -> Iterator[Example]:
    """What the template coder writes on random walks over `spec`; nobody judged it.

    Args:
        spec: with a text.
        device: what it is written for.
        steps: of each walk.
        walks: which fuse other regions each, so that one spec gives many operator chains.
        seed: of the walks.
        cuda: whether walks lead to kernels in CUDA C++ too.

    Raises:
        CaptureError: this version does not capture the spec.
    """
    start = Program.start(capture_spec(spec, verify=False))
    if structure(start.graph) in reserved():
        return
    for number in range(walks):
        yield from _walk(spec, start, device, steps, random.Random(f"{seed + number}/{spec.digest}"), cuda)


def _walk(
    spec: KernelSpec, start: Program, device: str, steps: int, rng: random.Random, cuda: bool
) -> Iterator[Example]:
    coder, program = with_cuda() if cuda else TemplateCoder(), start
    context = Context(device_named(device), coder, spec.mode)
    for _ in range(steps):
        action = _by_chance(program, context, rng)
        if action is None:
            return
        request = Request(program, action, context.device, spec.mode)
        try:
            patch = coder.write(request)
        except (CoderError, IllegalAction):
            continue
        if patch.alternatives:
            yield from example_of(spec, request, patch.alternatives[0], False)
        program = patch.apply(program)


def _by_chance(program: Program, context: Context, rng: random.Random) -> Action | None:
    """An action that applies: each kind of those that do is as likely, and so is each of its actions; None without."""
    some = [kind for name, kind in sorted(kinds().items()) if name not in ("stop", "unfuse", "library")]
    for kind in rng.sample(some, len(some)):
        proposals = list(dict.fromkeys(kind.proposals(program, context)))
        for action in rng.sample(proposals, len(proposals)):
            try:
                kind.check(program, action, context)
            except IllegalAction:
                continue
            return action
    return None


def example_of(spec: KernelSpec, request: Request, implementation: Implementation, verified: bool) -> Iterator[Example]:
    """The example of one accepted implementation; none where a model could not answer it, or might not.

    The form of replies has no room for it, or the judge forbids strangers what templates do, such as asking where
    memory is.
    """
    region = target_region(request)
    if not implementation.generated or not spec.source:
        return
    metas = [region.graph.meta(v) for v in (*region.inputs, *region.outputs)]
    try:
        messages = write_messages(request, limits=LIMITS, words=Words(WORDS))
        answer, base = shown_source(implementation), base_source(request)
        read = read_reply(Reply(reply_of(answer, base)), region, base)
    except ChatError:  # too long, or a form of code that replies do not have
        return
    if read.prepare_inputs != implementation.prepare_inputs or violations(read.source, read.language):
        return
    yield Example(
        spec.source,
        spec.dtype,
        spec.mode,
        program_to_json(request.program),
        request.action,
        request.device.name.removesuffix("(here)"),
        traits_of(request),
        ", ".join(str(m) for m in metas),
        (messages[0].text, messages[1].text),
        answer,
        verified,
        base=base,
    )


@dataclass(frozen=True)
class Draw:
    """A drawn spec to walk over.

    Attributes:
        seed: of the sequence.
        index: number in it.
        sizes: of its inputs; None for number `index` of the other sequence (`experiments.writer.further`).
        walks: how many.
        cuda: whether they lead to CUDA C++ too.
    """

    seed: int
    index: int
    sizes: Bytes | None
    walks: int = 1
    cuda: bool = False

    def spec(self) -> KernelSpec:
        """The spec."""
        if self.sizes is None:
            return further(self.seed, self.index)[1]
        return draw(self.seed, self.index, self.sizes).spec


def units(
    sources: Iterable[Path],
    seed: int = 0,
    count: int = 0,
    sizes: Sequence[Bytes] = (),
    at: int | None = None,
    walks: int = 1,
    others: int = 0,
    cuda: bool = False,
) -> Iterator[Tree | Draw]:
    """What examples are made of: the trees of stores or files, then the first `count` drawn specs.

    Args:
        sources: files.
        seed: of the sequence of drawn specs.
        count: of those.
        sizes: that one may have; the same number at another size has the same operators on other shapes.
        at: how many of `sizes` each one has, in turn; all by default.
        walks: over each, at each size.
        others: further specs, of the families that are not drawn otherwise (`experiments.writer.further`).
        cuda: whether walks lead to CUDA C++ too.
    """
    for path in sources:
        yield from read_source(path)
    for index in range(count):
        for turn in range(len(sizes) if at is None else at):
            yield Draw(seed, index, sizes[(index + turn) % len(sizes)], walks, cuda)
    for index in range(others):
        yield Draw(seed, index, None, walks, cuda)


def examples_of(unit: Tree | Draw, others: int = 0) -> list[Example]:
    """The examples of one unit; none where this version captures it as another program than was explored."""
    try:
        if isinstance(unit, Tree):
            return list(from_tree(unit, others))
        return list(from_spec(unit.spec(), walks=unit.walks, cuda=unit.cuda))
    except (CaptureError, ReplayError, TreeError):
        return []


def collect(some: Iterable[Tree | Draw], processes: int = 1, others: int = 0) -> Iterator[Example]:
    """The examples of all units, no question twice, made by several processes.

    Args:
        some: trees and draws.
        processes: how many.
        others: at how many other sizes the steps of each tree are written once more.
    """
    seen: set[str] = set()
    work = partial(examples_of, others=others)
    several = ProcessPoolExecutor(processes, get_context("spawn"), end_with_parent) if processes > 1 else nullcontext()
    with several as pool:
        made = pool.map(work, some, chunksize=2) if pool is not None else map(work, some)
        for example in chain.from_iterable(made):
            if example.key not in seen:
                seen.add(example.key)
                yield example


@dataclass(frozen=True)
class Split:
    """Examples by what they are for.

    Attributes:
        learnt: what is learnt from.
        shapes: operator chains that are learnt, on shapes that are not.
        chains: operator chains that are not learnt, of two operators or more.
    """

    learnt: tuple[Example, ...]
    shapes: tuple[Example, ...]
    chains: tuple[Example, ...]


def split(examples: Sequence[Example]) -> Split:
    """Part `examples` by hashes of their chains and shapes, so that the same example always goes to the same part."""
    kept = [e for e in examples if not _held_out_chain(e)]
    learnt = tuple(e for e in kept if _share(f"{e.chain} {e.shapes}") >= HELD_OUT_SHAPES)
    known = {e.chain for e in learnt}
    shapes = tuple(e for e in kept if _share(f"{e.chain} {e.shapes}") < HELD_OUT_SHAPES and e.chain in known)
    return Split(learnt, shapes, tuple(e for e in examples if _held_out_chain(e)))


def _held_out_chain(example: Example) -> bool:
    return len(example.traits.ops) > 1 and _share(example.chain) < HELD_OUT_CHAINS


def _share(text: str) -> float:
    """A number from 0 to 1 that depends on `text` alone."""
    return int(hashlib.blake2b(text.encode(), digest_size=4).hexdigest(), 16) / 0xFFFFFFFF


__all__ = ["Draw", "Example", "Split", "collect", "examples_of", "from_spec", "from_tree", "split", "units"]
