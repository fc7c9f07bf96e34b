"""Who printed an implementation is what this process has seen, not what the implementation or a file says of itself."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from qimeng.coder.llm.coder import LLMCoder
from qimeng.coder.template.coder import TemplateCoder
from qimeng.coder.template.families.gemm.schedule import GemmSchedule
from qimeng.coder.template.families.tile.schedule import TileSchedule
from qimeng.device import DEVICES
from qimeng.envs.estimate.interpret import Interpreter
from qimeng.envs.judge.gates.gpu_run import GpuRun
from qimeng.envs.judge.gates.own_kernels import is_asked
from qimeng.envs.judge.gates.pipeline import Candidate
from qimeng.envs.screening.origin import foreign, is_sweep, known, printed
from qimeng.envs.screening.static_pass import findings, forbidden, judged_text
from qimeng.errors import CoderError
from qimeng.graph.opgraph import OpGraph
from qimeng.graph.region import Region
from qimeng.interfaces import Action, Patch, Request
from qimeng.interfaces.records import implementation_from_data, program_from_json, program_to_json
from qimeng.program import origin
from qimeng.program.opaque import opaque_program
from qimeng.program.program import Implementation, Program, torch_implementation
from qimeng.program.schedule import Schedule
from qimeng.recipe import Recipe, RecipeStep
from qimeng.spec import KernelSpec
from qimeng.store import Store
from qimeng.testing import sample_graph
from tests.coder.llm.scripted import ScriptedChat

H200 = DEVICES["h200"]


@cache
def start() -> Program:
    return Program.start(sample_graph())


def relu(program: Program) -> Region:
    return next(r for r in program.regions if r.label() == "relu")


@pytest.fixture
def template() -> Implementation:
    """What the template prints for relu."""
    region = relu(start())
    patch = TemplateCoder().write(Request(start(), Action("lowering", (region.id,)), H200))
    return patch.alternatives[0]


def with_relu(implementation: Any) -> Program:
    return start().with_implementation(relu(start()).id, implementation)


def gets_everything(program: Program) -> None:
    """The program is judged as someone else's: no shared worker, its text looked at, no shortened check."""
    assert not printed(program) and foreign(program)
    run: Any = SimpleNamespace(thorough=False, candidates=[Candidate(0, program)])
    assert GpuRun.may_share.func(run) is False
    patch = Patch(None, relu(start()).id, (program.implementation(relu(start())),))
    assert not is_sweep(start(), patch)
    for region in program.regions:
        if program.implementation(region) in foreign(program):
            asked = is_asked(SimpleNamespace(thorough=False), program, region)  # type: ignore[arg-type]
            assert asked == program.implementation(region).generated


def test_what_a_template_printed_is_known(template: Implementation) -> None:
    program = with_relu(template)
    assert printed(program) and printed(start()) and not foreign(program) and not findings(program)
    assert is_sweep(start(), Patch(None, relu(start()).id, (template, torch_implementation(relu(start())))))


EVIL = "import os\n"

LIES: dict[str, Callable[[Implementation], Any]] = {
    "another text": lambda i: replace(i, source=EVIL + i.source),
    "another text by __dict__": lambda i: with_dict(i, source=EVIL + i.source),
    "a comment more": lambda i: replace(i, source=i.source + "# mine\n"),
    "another entry": lambda i: replace(i, entry="mine", source=i.source.replace(i.entry, "mine")),
    "another entry alone": lambda i: replace(i, entry="mine"),
    "a preparation": lambda i: replace(i, prepare=i.entry),
    "inputs of a preparation": lambda i: replace(i, prepare_inputs=(0,)),
    "another language": lambda i: replace(i, language="cuda"),
    "PyTorch's name": lambda i: replace(i, language="torch", source=EVIL + i.source),
    "a library's name": lambda i: replace(i, language="library", schedule=None),
    "another schedule": lambda i: replace(i, schedule=replace(i.schedule, warps=2 * i.schedule.warps)),
    "no schedule, as a model's": lambda i: replace(i, schedule=None),
    "a schedule that is none": lambda i: replace(i, source=EVIL + i.source, schedule="tile()"),
    "a schedule that no template prints": lambda i: replace(
        i, source=EVIL + i.source, schedule=replace(i.schedule, block_p=-1, block_r=0)
    ),
    "the digest of another": lambda i: with_dict(replace(i, source=EVIL + i.source), digest=i.digest),
    "a class of its own": lambda i: Chameleon(i.language, i.source, i.entry, schedule=i.schedule),
    "what was pickled": lambda i: pickle.loads(pickle.dumps(replace(i, source=EVIL + i.source))),
    "what was copied": lambda i: with_dict(copy.copy(i), source=EVIL + i.source),
    "what was read": lambda i: implementation_from_data(
        json.loads(json.dumps({**as_data(i), "source": EVIL + i.source}))
    ),
}


def with_dict(implementation: Implementation, **changes: Any) -> Implementation:
    """Changed behind the frozen dataclass's back, all that was worked out kept."""
    assert implementation.digest
    made = copy.copy(implementation)
    vars(made).update(changes)
    return made


def as_data(i: Implementation) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(i)


@dataclass(frozen=True)
class Chameleon(Implementation):
    """Shows what was printed, until it is run."""


class Text(str):
    """Compares equal to everything."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = str.__hash__


@pytest.mark.parametrize("name", LIES)
def test_who_claims_to_be_printed_and_is_not_gets_everything(name: str, template: Implementation) -> None:
    made = LIES[name](template)
    assert not known(relu(start()), made)
    gets_everything(with_relu(made))
    if isinstance(made.source, str) and made.source.startswith(EVIL):
        told = judged_text(with_relu(made), "off")
        assert told is not None and told[0] == "forbidden" and "import of os" in told[1]


def test_texts_are_plain(template: Implementation) -> None:
    """One that compares equal to everything would pass for what was printed, here and in every cache."""
    lie = replace(template, source=Text(EVIL + template.source))
    assert type(lie.source) is str and lie != template and not known(relu(start()), lie)
    assert not known(relu(start()), with_dict(template, source=Text(EVIL + template.source)))
    with pytest.raises(TypeError, match="source of an implementation is text, got bytes"):
        replace(template, source=b"")  # type: ignore[arg-type]


def test_a_text_for_another_region_is_no_print_of_this_one(template: Implementation) -> None:
    other = next(r for r in start().regions if r.label() == "mul")
    assert known(relu(start()), template) and not known(other, template)
    assert foreign(start().with_implementation(other.id, template)) == (template,)
    torch_relu = torch_implementation(relu(start()))
    assert foreign(start().with_implementation(other.id, torch_relu)) == (torch_relu,)


def test_one_that_is_foreign_is_not_hidden_by_an_equal_digest(template: Implementation) -> None:
    """The same text for two regions, rightly for one of them alone, in both orders."""
    other = next(r for r in start().regions if r.label() == "mul")
    program = with_relu(template).with_implementation(other.id, template)
    assert foreign(program) == (template,) and not printed(program)
    assert not printed(replace(program, regions=tuple(reversed(program.regions))))


@pytest.mark.parametrize("name", ["another text", "no schedule, as a model's", "what was read"])
def test_one_of_others_among_a_sweep_makes_it_none(name: str, template: Implementation) -> None:
    region = relu(start())
    patch = Patch(None, region.id, (template, LIES[name](template)))
    assert not is_sweep(start(), patch) and is_sweep(start(), patch.only(0))
    run: Any = SimpleNamespace(thorough=False, candidates=[Candidate(i, patch.apply(start(), i)) for i in (0, 1)])
    assert GpuRun.may_share.func(run) is False


def test_a_model_that_answers_a_templates_text_is_a_model(template: Implementation) -> None:
    reply = f"```python\n{template.source}\n```".replace(template.entry, "run")
    coder = LLMCoder(ScriptedChat(reply))
    try:
        patch = coder.write(Request(start(), Action("lowering", (relu(start()).id,)), H200))
    except CoderError as error:  # the protocol asks for other names; then it has no answer
        pytest.fail(str(error))
    assert not is_sweep(start(), patch)
    gets_everything(patch.apply(start()))


# ---- what comes from a file


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has printed nothing."""
    monkeypatch.setattr(origin, "_noted", set())


def test_a_program_that_was_read_is_printed_again(template: Implementation, monkeypatch: pytest.MonkeyPatch) -> None:
    text = program_to_json(with_relu(template))
    forget(monkeypatch)
    again = program_from_json(text, start().graph)
    assert printed(again)
    data = json.loads(text)
    (held,) = data["implementations"].values()
    held["source"] = EVIL + held["source"]
    forget(monkeypatch)
    gets_everything(program_from_json(json.dumps(data), start().graph))


def test_a_recipe_that_was_read_is_printed_again(template: Implementation, monkeypatch: pytest.MonkeyPatch) -> None:
    action = Action("lowering", (relu(start()).id,))
    for made, honest in ((template, True), (replace(template, source=EVIL + template.source), False)):
        recipe = Recipe((RecipeStep.of(action, Patch(None, relu(start()).id, (made,))),), with_relu(made).digest)
        text = recipe.to_json()
        forget(monkeypatch)
        program = Recipe.from_json(text).replay(start().graph)
        assert printed(program) == honest
        if not honest:
            gets_everything(program)


def test_a_patch_of_a_store_is_printed_again(template: Implementation, monkeypatch: pytest.MonkeyPatch) -> None:
    from qimeng.interfaces.records import PatchRecord

    store, region = Store(), relu(start())
    lie = replace(template, source=EVIL + template.source)
    digests = [store.put_patch(PatchRecord.of(Patch(None, region.id, (i,)))) for i in (template, lie)]
    forget(monkeypatch)
    for digest, honest in zip(digests, (True, False), strict=True):
        record = store.patch(digest)
        assert record is not None
        patch = record.patch(start().graph)
        assert is_sweep(start(), patch) == honest == printed(patch.apply(start()))


# ---- references


def test_only_the_framework_makes_a_reference_a_program() -> None:
    text = "import torch\n\nclass Model(torch.nn.Module):\n    def forward(self, x):\n        return x + 1\n"
    spec = KernelSpec.from_source(
        f"{text}\n\ndef get_inputs():\n    return [torch.ones(2)]\n\n\ndef get_init_inputs():\n    return []\n", "plus"
    )
    own = opaque_program(spec)
    assert printed(own) and judged_text(own, "off") is None
    claimed = replace(own, fallback=own.fallback + EVIL)
    assert not printed(claimed) and forbidden(claimed) is not None
    run: Any = SimpleNamespace(thorough=False, candidates=[Candidate(0, claimed)])
    assert GpuRun.may_share.func(run) is False
    assert not printed(Program(OpGraph({}, ()), (), {}, EVIL))


# ---- the estimating judge


def test_the_text_itself_is_checked_not_what_its_schedule_would_print(template: Implementation) -> None:
    """A claimed schedule must not have the template's own, right kernel checked in the place of the candidate's."""
    interpreter: Any = SimpleNamespace(_coder=TemplateCoder(), _reduced=SimpleNamespace(graph=start().graph))
    assert printed(Interpreter._reprinted(interpreter, with_relu(template)))
    lie = replace(template, source=template.source.replace("return (", "return 0 * ("))
    with pytest.raises(CoderError, match="was not printed"):
        Interpreter._reprinted(interpreter, with_relu(lie))


def test_a_made_up_schedule_is_no_error() -> None:
    region = relu(start())
    for schedule in (GemmSchedule(), Schedule(), TileSchedule(block_p=0), TileSchedule(form="?"), object()):
        made: Any = Implementation("triton", "def f(x): ...\n", "f", schedule=schedule)  # type: ignore[arg-type]
        assert not known(region, made)
