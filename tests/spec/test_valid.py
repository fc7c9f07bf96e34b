"""Inputs drawn in place of the examples are ones that the module takes; where there are none, that is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from qimeng.envs.judge.reference import References
from qimeng.spec import EXAMPLES, KernelSpec
from qimeng.spec.fake import fake_tensors


class Bag(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = torch.nn.EmbeddingBag(20, 8)

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.bag(indices, offsets))


def segment_means(x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    segment = torch.bucketize(torch.arange(len(x)), offsets[1:], right=True)
    sums = torch.zeros(len(offsets) - 1, x.shape[1]).index_add(0, segment, x)
    return sums / offsets.diff()[:, None]


def varlen(x: torch.Tensor, offsets: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    assert torch.equal(offsets.diff(), lengths), "the two belong together"
    return segment_means(x, offsets)


def sparse_product(crow: torch.Tensor, columns: torch.Tensor, values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    matrix = torch.sparse_csr_tensor(crow, columns, values, (len(crow) - 1, len(x)), check_invariants=True)
    return matrix.to_dense() @ x


def masked_mean(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return (x * (torch.arange(x.shape[1]) < lengths[:, None])).sum(1) / lengths


def chunks(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return torch.stack([part.mean(0) for part in x.split(lengths.tolist())])


def ctc(x: torch.Tensor, targets: torch.Tensor, of_inputs: torch.Tensor, of_targets: torch.Tensor) -> torch.Tensor:
    return functional.ctc_loss(x.log_softmax(-1), targets, of_inputs, of_targets)


def definite(size: int) -> torch.Tensor:
    a = torch.randn(size, size)
    return a @ a.t() + size * torch.eye(size)


torch.manual_seed(0)
PACKED = (torch.randn(10, 8), torch.tensor([0, 3, 7, 10]))
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "bag": (Bag().eval(), (torch.randint(0, 20, (12,)), torch.tensor([0, 4, 7]))),
    "packed sequences": (segment_means, PACKED),
    "offsets and lengths": (varlen, (*PACKED, torch.tensor([3, 4, 3]))),
    "chunks": (chunks, (torch.randn(10, 8), torch.tensor([3, 5, 2]))),
    "cholesky": (lambda a, b: torch.cholesky_solve(b, torch.linalg.cholesky(a)), (definite(8), torch.randn(8, 4))),
    "solve": (torch.linalg.solve, (torch.randn(8, 8) + 9 * torch.eye(8), torch.randn(8, 2))),
    "mask": (lambda q, m: (q + m).softmax(-1), (torch.randn(4, 16, 16), torch.full((16, 16), -torch.inf).triu(1))),
    "bool mask": (
        lambda x, m: x.masked_fill(~m, -torch.inf).softmax(-1),
        (torch.randn(4, 16, 16), torch.ones(16, 16).tril().bool()),
    ),
    "probabilities": (lambda p: -(p * p.log()).sum(-1), (torch.randn(16, 32).softmax(-1),)),
    "cross entropy of probabilities": (
        functional.binary_cross_entropy,
        (torch.rand(9, 9), (torch.rand(9, 9) < 0.5).float()),
    ),
    "bins": (lambda x, b: torch.searchsorted(b, x) + x, (torch.randn(16, 32), torch.linspace(-2, 2, 9))),
    "ignored": (functional.cross_entropy, (torch.randn(16, 10), torch.tensor([1, 2, -100, 4] * 4))),
    "permutation": (lambda x, p: torch.zeros_like(x).index_copy(0, p, x), (torch.randn(16, 8), torch.randperm(16))),
    "lengths": (masked_mean, (torch.randn(4, 16), torch.tensor([3, 5, 16, 1]))),
    "ctc": (ctc, (torch.randn(12, 4, 8), torch.randint(1, 8, (4, 5)), torch.full((4,), 12), torch.full((4,), 5))),
    "arc sine": (torch.asin, (torch.rand(16, 16) * 2 - 1,)),
    "divergence": (
        lambda a, b: functional.kl_div(a, b, reduction="none"),
        (torch.randn(9, 9).log_softmax(-1), torch.randn(9, 9).softmax(-1)),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_input_is_redrawn_and_the_module_takes_it(case: str) -> None:
    function, inputs = CASES[case]
    spec = KernelSpec.of(function, inputs)
    spec.check()
    assert spec.never_changed == ()
    module, own = spec.module(), spec.inputs(0, "cpu", EXAMPLES)
    assert all(torch.equal(a, b) for a, b in zip(own, inputs, strict=True))
    for seed in range(20, 26):
        drawn = spec.inputs(seed)
        outputs = module(*drawn)
        assert bool(outputs.isfinite().all()) and outputs.shape == module(*own).shape
    fresh = KernelSpec.of(function, inputs)
    with fake_tensors():
        shapes = [x.shape for x in fresh.inputs(0)]
    assert shapes == [x.shape for x in inputs], "before anything is known of the values"
    constant = [bool((x == x.flatten()[0]).all()) for x in inputs]
    changed = [any(not torch.equal(spec.inputs(s)[i], x) for s in range(6)) for i, x in enumerate(inputs)]
    assert changed == [not c for c in constant]
    there = KernelSpec.from_bytes(spec.to_bytes())
    assert all(torch.equal(a, b) for a, b in zip(there.inputs(7), spec.inputs(7), strict=True)), "drawn alike elsewhere"
    trials = list(References(spec, None, torch.device("cpu")).trials(2))
    assert [t.draw.distribution for t in trials] == [EXAMPLES, "given"]


def test_lengths_that_all_differ_are_only_reordered_too() -> None:
    spec = KernelSpec.of(chunks, (torch.randn(10, 8), torch.tensor([3, 5, 2])))
    assert spec.domains[1] == "permutation" and len(spec.leaves[1].ways) == 1
    assert {tuple(sorted(spec.inputs(seed)[1].tolist())) for seed in range(6)} == {(2, 3, 5)}


def test_columns_of_a_sparse_matrix_stay_with_its_rows_and_that_is_said() -> None:
    inputs = (torch.tensor([0, 2, 3, 5]), torch.tensor([0, 2, 1, 0, 1]), torch.randn(5), torch.randn(3, 4))
    spec = KernelSpec.of(sparse_product, inputs)
    assert spec.never_changed == (0, 1) and spec.domains[:2] == ("fixed", "fixed")
    assert not torch.equal(spec.inputs(1)[2], inputs[2]) and spec.module()(*spec.inputs(1)).shape == (3, 4)
    remarks = References(spec, None, torch.device("cpu")).remarks
    assert [r for r in remarks if r.startswith("input 1 kept its given values in every trial")], remarks


def test_an_input_of_which_nothing_else_is_taken_stays_and_others_do_not() -> None:
    magic = torch.tensor([7, 1, 5, 3])

    def picky(x: torch.Tensor, key: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        assert torch.equal(key, magic), "no other key"
        return x[mask]

    x, mask = torch.randn(4, 8), torch.rand(4, 8) < 0.5
    spec = KernelSpec.of(picky, (x, magic, mask))
    assert spec.never_changed == (1,)
    drawn = spec.inputs(3)
    assert torch.equal(drawn[1], magic) and not torch.equal(drawn[2], mask) and int(drawn[2].sum()) == int(mask.sum())
    assert spec.with_(mode="high").inputs(3)[1].tolist() == magic.tolist()


def test_one_tensor_given_twice_is_one_tensor() -> None:
    x, ids = torch.randn(6, 6), torch.tensor([3, 1, 3, 0])
    spec = KernelSpec.of(lambda a, b, c, i, j: a + b + c.sum() + i.sum() + j.sum(), (x, x, x.clone(), ids, ids.clone()))
    for distribution in ("given", "normal", "spots"):
        a, b, c, i, j = spec.inputs(4, "cpu", distribution)
        assert torch.equal(a, b) and not torch.equal(a, c) and torch.equal(i, j)


def test_declared_domains_win() -> None:
    x, steps = torch.randn(9, 9).softmax(-1), torch.tensor([0, 3, 7, 12])
    spec = KernelSpec.of(lambda a, b: a + b.sum(), (x, steps), domains=("real", "index"))
    a, b = spec.inputs(1)
    assert not torch.allclose(a.sum(-1), torch.ones(9)) and any(spec.inputs(s)[1][0] != 0 for s in range(9))
    fixed = spec.with_(domains=("fixed", "offsets"))
    assert torch.equal(fixed.inputs(1)[0], x) and torch.equal(fixed.inputs(1, "cpu", "x3")[0], x)
    assert fixed.inputs(1)[1][-1] == 12


def test_specs_with_other_values_are_others() -> None:
    x = torch.randn(4, 4)
    assert KernelSpec.of(torch.relu, (x,)) == KernelSpec.of(torch.relu, (x.clone(),))
    assert KernelSpec.of(torch.relu, (x,)) != KernelSpec.of(torch.relu, (x + 1,))


def test_what_holds_is_kept_in_a_smaller_spec_or_it_is_not_made_smaller() -> None:
    rows = KernelSpec.of(lambda p: -(p * p.log()).sum(-1), (torch.randn(2048, 512).softmax(-1),)).reduced()
    small = rows.inputs(0, "cpu", EXAMPLES)[0]
    assert (
        small.numel() < 2**17
        and torch.allclose(small.sum(-1), torch.ones(len(small)))
        and rows.domains == ("probability",)
    )
    a = KernelSpec.of(torch.linalg.cholesky, (definite(512),)).reduced()
    assert len(a.inputs(0)[0]) < 512 and a.domains == ("definite",)
    packed = KernelSpec.of(segment_means, (torch.randn(4096, 64), torch.arange(0, 4097, 512)))
    assert packed.reduced() is packed
