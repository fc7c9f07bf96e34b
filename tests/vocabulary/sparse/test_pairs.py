"""Weights of which two of each four neighbours are kept: the form, the action, and the library's product."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from qimeng import IllegalAction, SpecError
from qimeng.actions import check_action, legal_actions
from qimeng.interfaces import Action
from qimeng.library import is_library
from qimeng.spec.declared import weight_form
from qimeng.vocabulary.sparse import detected
from tests.vocabulary.sparse.samples import CONTEXT, action_of, after, layer, spec_of, start_of

BF16 = torch.bfloat16


def test_the_two_largest_of_each_four_are_kept() -> None:
    weight = torch.tensor([[1.0, -3, 2, 0.5, 1, 1, 1, 1, -4, 0, 0]])
    assert weight_form("2:4").declared(weight).tolist() == [[0, -3, 2, 0, 1, 1, 0, 0, -4, 0, 0]]
    random = torch.randn(40, 128).to(BF16)
    found = weight_form("2:4").declared(random)
    assert ((found.view(-1, 4) != 0).sum(1) == 2).all() and torch.equal(found[found != 0], random[found != 0])
    assert torch.equal(weight_form("2:4").declared(found), found)
    exact = weight_form("2:4").declared(random.double())
    assert exact.dtype is torch.float64 and torch.equal(exact, found.double())
    with pytest.raises(SpecError, match="tensor cores skip two of each four, declare '2:4'"):
        weight_form("2:8")


def test_two_of_four_are_detected_where_no_other_form_is_smaller() -> None:
    layers = [nn.Linear(128, 64).to(BF16), nn.Linear(64, 128).to(BF16)]
    for linear in layers:
        with torch.no_grad():
            linear.weight.copy_(weight_form("2:4").declared(linear.weight))
    assert detected(nn.Sequential(*layers)) == "2:4"
    with pytest.raises(SpecError, match="is not worth it"):
        detected(nn.Sequential(*layers).float())
    with torch.no_grad():
        for linear in layers:
            linear.weight[:, 16:] = 0
    assert detected(nn.Sequential(*layers)).startswith("bsr:16:")


def test_the_action_chooses_the_library_whose_weight_is_prepared_once() -> None:
    module, x = layer(8, 128, 64, BF16)
    spec = spec_of(module, x, "2:4")
    start = start_of(spec)
    program = after(start, action_of(start, "sparsify"))
    (region,) = program.called
    made = program.implementation(region)
    assert made.language == "library" and is_library(region, made) and made.prepare and not made.generated
    assert "torch.sparse.to_sparse_semi_structured(w) if fits and w.is_cuda else w" in made.source
    found = program.load().Model()
    found.load_state_dict(module.state_dict())
    for _ in range(2):  # on a CPU the prepared weight is dense; the second time, of a changed weight
        with torch.no_grad():
            eager = spec.module()
            eager.load_state_dict(found.state_dict())
            assert torch.equal(found(x), eager(x))
            found.get_parameter("0.weight").copy_(torch.randn(64, 128))
    with pytest.raises(IllegalAction, match="the library's product of two of each four already"):
        check_action(program, Action("sparsify", (region.id,)), CONTEXT)


@pytest.mark.parametrize(
    ("sizes", "dtype", "words"),
    [((8, 100, 64), BF16, "multiples of 64"), ((8, 128, 64), torch.float32, "fp16 or bf16 here, not float32")],
)
def test_what_the_library_does_not_take_is_refused(sizes: tuple[int, int, int], dtype: torch.dtype, words: str) -> None:
    module, x = layer(*sizes, dtype)
    start = start_of(spec_of(module, x, "2:4"))
    assert "sparsify" not in {a.kind for a in legal_actions(start, CONTEXT)}
    with pytest.raises(IllegalAction, match=words):
        check_action(start, Action("sparsify", (start.called[0].id,)), CONTEXT)


@pytest.mark.gpu
def test_the_compressed_weight_multiplies_as_declared() -> None:
    module, x = layer(16, 512, 256, BF16)
    spec = spec_of(module, x, "2:4")
    start = start_of(spec)
    found = after(start, action_of(start, "sparsify")).load().Model().to("cuda")
    found.load_state_dict(module.state_dict())
    with torch.no_grad():
        y, exact = found(x.cuda()).double().cpu(), spec.module(dtype=torch.float64)(x.double())
    assert (y - exact).abs().max() < 0.02 * exact.abs().max()
