"""The forms of weights with zeros, and declaring them: values, refusals, digests."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from qimeng.errors import SpecError
from qimeng.spec.declared import weight_form
from qimeng.vocabulary.sparse import detected
from qimeng.vocabulary.sparse.forms import dense, grid, stored
from tests.vocabulary.lowprecision.samples import layer, spec_of


def blocks_of(weight: torch.Tensor, block: int) -> torch.Tensor:
    """Largest magnitude of each block, row by row of blocks."""
    rows, columns = grid(weight.shape, block)
    high, wide = rows * block - weight.shape[0], columns * block - weight.shape[1]
    filled = torch.nn.functional.pad(weight, (0, wide, 0, high))
    return filled.view(rows, block, columns, block).abs().amax((1, 3))


@pytest.mark.parametrize(("text", "block", "count"), [("bsr:16:30", 16, 10), ("bsr:32:50", 32, 6), ("csr:7", 1, 490)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_blocks_are_kept_as_they_are(text: str, block: int, count: int, dtype: torch.dtype) -> None:
    weight = torch.randn(70, 100, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = weight_form(text).declared(weight)
    assert found.shape == weight.shape and found.dtype is dtype and found.is_contiguous()
    before, kept = blocks_of(weight, block), blocks_of(found, block)
    assert int((kept > 0).sum()) == count and torch.equal(kept[kept > 0], before[kept > 0])
    assert before[kept > 0].min() >= before[kept == 0].max()
    assert torch.equal(found[found != 0], weight[found != 0])


@pytest.mark.parametrize(("text", "block"), [("bsr:16:30", 16), ("csr:7", 1)])
def test_a_weight_with_no_more_blocks_stays_as_it_is(text: str, block: int) -> None:
    weight = torch.zeros(70, 100)
    weight[:16, 32:48] = torch.randn(16, 16)
    weight[69, 99] = -2.0
    assert torch.equal(weight_form(text).declared(weight), weight)
    assert not weight_form(text).declared(torch.zeros(70, 100)).any()


def test_rows_without_blocks_begin_where_they_end() -> None:
    weight = torch.zeros(48, 64)
    weight[40, 20] = 1.0
    kept = stored(weight, 16, 1)
    assert kept.first.tolist() == [0, 0, 0, 1] and kept.at.tolist() == [1]
    assert torch.equal(dense(kept, (48, 64)), weight)


def test_the_reference_in_float64_keeps_the_same_blocks() -> None:
    weight = torch.randn(64, 100).to(torch.bfloat16)
    for text in ("bsr:16:20", "csr:5"):
        exact = weight_form(text).declared(weight.double())
        assert exact.dtype is torch.float64 and torch.equal(exact, weight_form(text).declared(weight).double())


def test_the_declaration_is_written_in_one_way() -> None:
    module, x = layer(4, 96, 24, torch.float32)
    specs = [spec_of(module, x, text) for text in ("bsr:16:10", "bsr:16:10.0", "bsr:32:10", "csr:10", "csr:2.5")]
    assert [s.weights for s in specs] == ["bsr:16:10", "bsr:16:10", "bsr:32:10", "csr:10", "csr:2.5"]
    assert specs[0] == specs[1] and len({s.digest for s in specs}) == 4


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("bsr", "a block's side must be one of 16, 32, 64, 128, as in 'bsr:32:10'"),
        ("bsr:24:10", "a block's side must be one of 16, 32, 64, 128"),
        ("bsr:32", "say how many percent are kept, as in 'bsr:32:5'"),
        ("csr", "say how many percent are kept, as in 'csr:5'"),
        ("bsr:32:0", "must be above 0 and up to 100, not '0'"),
        ("csr:101", "must be above 0 and up to 100, not '101'"),
        ("csr:nan", "must be above 0 and up to 100, not 'nan'"),
        ("csr:few", "must be above 0 and up to 100, not 'few'"),
    ],
)
def test_other_declarations_are_refused(text: str, words: str) -> None:
    module, x = layer(4, 96, 24, torch.float32)
    with pytest.raises(SpecError, match="weights=") as refused:
        spec_of(module, x, text)
    assert words in str(refused.value)


def test_a_declaration_is_found_that_drops_nothing() -> None:
    torch.manual_seed(0)
    blocky, scattered = nn.Linear(256, 128), nn.Linear(256, 128)
    with torch.no_grad():
        blocky.weight.mul_((torch.rand(4, 8) < 0.2).repeat_interleave(32, 0).repeat_interleave(32, 1))
        scattered.weight.mul_(torch.rand(128, 256) < 0.03)
    assert detected(blocky).startswith("bsr:32:") and detected(scattered).startswith("csr:")
    for module in (blocky, scattered, nn.Sequential(blocky, nn.ReLU())):
        form = weight_form(detected(module))
        for weight in (m.weight.detach() for m in module.modules() if isinstance(m, nn.Linear)):
            assert torch.equal(form.declared(weight), weight)


def test_a_declaration_that_is_not_worth_it_is_refused_with_the_numbers() -> None:
    with pytest.raises(
        SpecError, match="too few zeros: .*'bsr:128:100', takes 65548 B, and more than 75% of the 65536 B"
    ):
        detected(nn.Linear(128, 128))
    with pytest.raises(SpecError, match="GELU has no torch.nn.Linear"):
        detected(nn.GELU())
    with pytest.raises(SpecError, match=r"expected a torch.nn.Module, got Tensor"):
        detected(torch.zeros(64, 64))  # type: ignore[arg-type]
