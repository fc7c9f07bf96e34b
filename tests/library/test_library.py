"""Implementations by a library: what they are offered for, what they compute, and who they come from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from qimeng.actions import Context, check_action, legal_actions
from qimeng.actions.library import subject_group
from qimeng.coder.template.coder import TemplateCoder
from qimeng.device import DEVICES
from qimeng.envs.screening.origin import known, printed
from qimeng.errors import IllegalAction
from qimeng.graph.capture import capture
from qimeng.interfaces import Action, Patch, Request
from qimeng.interfaces.records import program_from_json, program_to_json
from qimeng.library import CALLS, LANGUAGE, compiles, is_library, largest_group, written
from qimeng.program.program import Implementation, Program, torch_implementation
from qimeng.testing import FakeEvaluator, sample_graph

CODER, H200 = TemplateCoder(), DEVICES["h200"]
CONTEXT = Context(H200, CODER)


class Convs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.ConvTranspose2d(8, 6, 2, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.b(nn.functional.max_pool2d(torch.relu(self.a(x)), 2))) + 1


class Dense(nn.Module):
    def __init__(self, act: str = "relu", bias: bool = True) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(16, 24, bias=bias), act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self.act == "relu":
            return torch.relu(y)
        return nn.functional.gelu(y, approximate=self.act)


def start(make: Callable[[], nn.Module], *shape: int) -> Program:
    return Program.start(capture(make, lambda: (torch.empty(shape),)))


def by(program: Program, action: Action) -> Program:
    return CODER.write(Request(program, action, H200)).apply(program)


def compare(program: Program, module: nn.Module, x: torch.Tensor) -> float:
    """Largest difference of three calls, the parameters changed after the first and replaced after the second."""
    model: Any = program.load().Model()
    model.load_state_dict(module.state_dict())
    worst = 0.0
    with torch.no_grad():
        for change in (lambda p: p.mul_(-2), lambda p: setattr(p, "data", p.data + 1), lambda p: None):
            want, got = module(x), model(x)
            assert want.stride() == got.stride()
            worst = max(worst, float((want - got).abs().max()))
            for p in (*module.parameters(), *model.parameters()):
                change(p)
    return worst


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """torch.compile without a compiler; how often it was asked, and with what."""
    asked: list[dict[str, Any]] = []
    compile_ = torch.compile

    def fake(function: Any, **options: Any) -> Any:
        asked.append(options)
        return compile_(function, backend="eager", fullgraph=options["fullgraph"], dynamic=options["dynamic"])

    monkeypatch.setattr(torch, "compile", fake)
    return asked


def test_inductor_computes_the_whole_graph_as_one_region(eager: list[dict[str, Any]]) -> None:
    program = by(start(Dense, 5, 16), Action("library", (), "inductor"))
    (region,) = program.regions
    written_ = program.implementation(region)
    assert written_.language == LANGUAGE and not written_.generated and compiles(written_)
    assert compare(program, Dense(), torch.randn(5, 16)) < 1e-5
    assert eager == [{"fullgraph": True, "dynamic": False}]  # at the first call, once


def test_a_note_names_the_first_of_many_operators() -> None:
    class Deep(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(100):
                x = torch.sin(x)
            return x

    patch = CODER.write(Request(start(Deep, 5, 16), Action("library", (), "inductor"), H200))
    assert patch.note.startswith("sin+sin") and patch.note.endswith("... by inductor") and len(patch.note) < 150


def test_a_mode_is_passed_on(eager: list[dict[str, Any]]) -> None:
    program = start(Dense, 5, 16)
    linear = next(r for r in program.regions if r.label() == "linear")
    program = by(program, Action("library", (linear.id,), "inductor-tuned"))
    assert compare(program, Dense(), torch.randn(5, 16)) < 1e-5
    assert eager[0]["mode"] == "max-autotune-no-cudagraphs"


@pytest.mark.parametrize("shape", [(5, 16), (2, 3, 16)])
def test_cublaslt_takes_the_activation(shape: tuple[int, ...]) -> None:
    program = start(Dense, *shape)
    a, b = (r.id for r in program.regions)
    program = fused(program, a, b)
    assert "_addmm_activation" in program.source
    assert compare(program, Dense(), torch.randn(shape)) < 1e-5


def test_gelu_is_the_librarys_in_its_tanh_form_and_on_cuda() -> None:
    program = start(lambda: Dense("tanh"), 5, 16)
    program = fused(program, *(r.id for r in program.regions))
    assert "use_gelu=True" in program.source
    other = replace(H200, kind="cpu", name="a cpu")
    with pytest.raises(IllegalAction, match="on CUDA only, a cpu is cpu"):
        check_action(program, Action("library", (program.regions[0].id,), "fused"), Context(other, CODER))
    exact = start(lambda: Dense("none"), 5, 16)
    with pytest.raises(IllegalAction, match="not aten.gelu"):
        fused(exact, *(r.id for r in exact.regions))


def fused(program: Program, a: str, b: str) -> Program:
    one = CODER.write(Request(program, Action("fusion", (a, b)), H200))
    program = replace(one, alternatives=(), target=None).apply(program)
    return by(program, Action("library", (program.regions[0].id,), "fused"))


def test_convolutions_in_channels_last_memory() -> None:
    program = by(start(Convs, 2, 3, 6, 6), Action("library", (), "channels-last"))
    (region,) = program.regions
    assert program.implementation(region).prepare_inputs and "channels_last" in program.source
    assert compare(program, Convs(), torch.randn(2, 3, 6, 6)) < 1e-5


def test_cudnn_chooses_its_algorithm_without_a_setting() -> None:
    program = start(Convs, 2, 3, 6, 6)
    texts = []
    for label in ("convolution", "convolution"):
        for region in program.regions:
            if region.label() == label:
                texts.append(written(region, "cudnn").source)
    assert "cudnn_convolution(x0, x1, (1, 1), (1, 1), (1, 1), 1, True, False" in texts[0]
    assert any("cudnn_convolution_transpose(x0, x1, (0, 0), (0, 0), (2, 2)" in t for t in texts)
    with pytest.raises(IllegalAction, match="cuDNN runs on CUDA"):
        cpu = replace(H200, kind="cpu", name="a cpu")
        check_action(program, Action("library", (program.regions[0].id,), "cudnn"), Context(cpu, CODER))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cudnn", "channels-last", "inductor"])
def test_a_library_on_the_gpu(name: str) -> None:
    program = start(Convs, 2, 3, 6, 6)
    if name == "cudnn":
        for region in program.regions:
            if region.label() == "convolution":
                program = by(program, Action("library", (region.id,), name))
    else:
        program = by(program, Action("library", (), name))
    module, x = Convs().cuda(), torch.randn(2, 3, 6, 6, device="cuda")
    model = program.load().Model().cuda()
    model.load_state_dict(module.state_dict())
    with torch.no_grad():
        assert torch.allclose(model(x), module(x), atol=1e-3)


REFUSED = {
    "one pointwise operator": ("relu", "inductor", "one operator, which PyTorch's own call computes"),
    "nothing to tune": ("relu", "inductor-tuned", "the region has none"),
    "no convolution": ("relu", "channels-last", "has no convolution"),
    "another epilogue": ("linear", "fused", "no product with one activation"),
    "no such option": ("relu", "cublas", "no option 'cublas'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_why(name: str) -> None:
    label, option, reason = REFUSED[name]
    program = Program.start(sample_graph())
    region = next(r for r in program.regions if r.label() == label)
    with pytest.raises(IllegalAction, match=reason):
        check_action(program, Action("library", (region.id,), option), CONTEXT)


def test_random_operators_stay_on_pytorch() -> None:
    program = start(lambda: nn.Sequential(nn.ReLU(), nn.Dropout()), 8)
    with pytest.raises(IllegalAction, match="is left to PyTorch"):
        check_action(program, Action("library", (), "inductor"), CONTEXT)


def test_the_framework_knows_its_own_texts_again() -> None:
    program = by(Program.start(sample_graph()), Action("library", (), "inductor"))
    (region,) = program.regions
    mine = program.implementation(region)
    assert is_library(region, mine) and known(region, mine) and printed(program)
    for other in (replace(mine, source=mine.source + "#"), replace(mine, language="torch"), replace(mine, entry="f")):
        assert not is_library(region, other) and not known(region, other)
    again = program_from_json(program_to_json(program), program.graph)
    assert printed(again) and again.digest == program.digest


@pytest.mark.parametrize("name", CALLS)
def test_a_made_up_claim_is_an_untrusted_text(name: str) -> None:
    program = Program.start(sample_graph())
    for region in program.regions:
        claimed = Implementation(
            "library", "def f(*x):\n    return x\n", f"{name.replace('-', '_')}_{region.signature}"
        )
        assert not is_library(region, claimed) and not known(region, claimed)


def test_a_text_that_calls_itself_equal_is_untrusted() -> None:
    class Equal(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            return True

    program = by(Program.start(sample_graph()), Action("library", (), "inductor"))
    (region,) = program.regions
    for mine in (program.implementation(region), torch_implementation(region)):
        assert known(region, mine) and not known(region, replace(mine, source=Equal("def f(): pass")))


def test_the_largest_group_leaves_kernels_out() -> None:
    program = Program.start(sample_graph())
    assert largest_group(program) == program.regions
    relu = next(r for r in program.regions if r.label() == "relu")
    lowered = by(program, Action("lowering", (relu.id,)))
    assert [r.label() for r in largest_group(lowered)] == ["mul", "add", "_softmax"]
    after = by(lowered, Action("library", (), "inductor"))
    assert [r.label() for r in after.regions] == ["linear", "relu", "mul+add+_softmax"]
    assert [r.label() for r in by(after, Action("library", (), "inductor")).regions] == ["linear+relu+mul+add+_softmax"]
    assert Action("library", (), "inductor") not in legal_actions(start(lambda: nn.ReLU(), 8), CONTEXT)
    assert set(CALLS) == {"inductor", "inductor-tuned", "channels-last", "cudnn", "fused"}


def test_the_library_has_a_share_of_its_own() -> None:
    program = by(Program.start(sample_graph()), Action("library", (), "inductor"))
    found = FakeEvaluator().evaluate(program, Patch())
    assert found.library_share == 1 and found.generated_share == 0


def test_a_single_normalization_in_training_is_one_group_for_a_library() -> None:
    program = Program.start(capture(lambda: nn.BatchNorm1d(4).train(), lambda: (torch.rand(8, 4),)))
    assert len(program.called) == 2 and subject_group(program) == program.called
