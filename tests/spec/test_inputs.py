"""Values of inputs and parameters: domains, distributions, redrawing, perturbing."""

from __future__ import annotations

import copy

import pytest
import torch

from qimeng.errors import SpecError
from qimeng.spec import DISTRIBUTIONS, KernelSpec, applies, infer_domain, perturb_parameters
from qimeng.spec.distributions import WIDEST, redistribute
from qimeng.spec.leaf import Leaf, sample, unexpanded
from qimeng.spec.perturb import SHARES, seed_of
from qimeng.spec.reduce import cut
from qimeng.spec.source import Source
from qimeng.spec.together import TOGETHER

torch.manual_seed(0)  # whatever was imported before
EXAMPLES = {
    "uniform": (torch.rand(64, 64), "real"),
    "normal": (torch.randn(64, 64), "real"),
    "shifted": (torch.rand(64, 64) + 0.5, "positive"),
    "rows": (torch.rand(64, 64).softmax(-1), "probability"),
    "signs": (torch.randint(0, 2, (64, 64)) * 2.0 - 1, "sign"),
    "mask": (torch.rand(64, 64) < 0.25, "mask"),
    "float_mask": (torch.where(torch.rand(64, 64) < 0.25, 0.0, -torch.inf), "mask"),
    "index": (torch.randint(5, 9, (64,)), "index"),
    "ones": (torch.ones(8), "real"),
    "number": (2.5, "scalar"),
    "empty": (torch.rand(0, 4), "real"),
    "complex": (torch.randn(4, dtype=torch.complex64), "real"),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_inferred_domain_holds_after_redrawing(name: str) -> None:
    example, domain = EXAMPLES[name]
    assert infer_domain(example) == domain
    drawn = Leaf.of(example).draw(Source(3, "cpu"))
    assert infer_domain(drawn) == domain
    if isinstance(example, torch.Tensor):
        assert (drawn.shape, drawn.stride(), drawn.dtype) == (example.shape, example.stride(), example.dtype)
        if drawn.numel() and not drawn.is_complex():
            assert float(drawn.max()) <= max(float(example.max()), 6.0) and not drawn.isnan().any()
        assert name in ("ones", "empty") or not torch.equal(drawn, example)


def test_values_drawn_are_like_the_example() -> None:
    source = Source(0, "cpu")
    index = Leaf.of(torch.tensor([3, 7, 3, 4])).draw(source)
    assert int(index.min()) >= 3 and int(index.max()) <= 7
    most = torch.iinfo(torch.int64).max
    assert Leaf.of(torch.tensor([most, most - 1, most])).draw(source).min() >= most - 1
    mask = Leaf.of(torch.rand(100, 100) < 0.1).draw(source)
    assert 0.05 < float(mask.float().mean()) < 0.15
    normal = Leaf.of(torch.randn(100, 100) * 5 + 2).draw(source)
    assert abs(float(normal.mean()) - 2) < 0.5 and abs(float(normal.std()) - 5) < 0.5
    assert torch.equal(Leaf.of(torch.full((3,), 1e-5)).draw(source), torch.full((3,), 1e-5))


@pytest.mark.parametrize(
    "example",
    [
        torch.randn(6, 4).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(1, 5).expand(3, 5),
        torch.randn(4, 8)[:, ::2],
        torch.randn(3, 1, 2).transpose(0, 1),
        torch.tensor(1.5),
    ],
    ids=lambda x: str(x.stride()),
)
def test_strides_stay(example: torch.Tensor) -> None:
    leaf = Leaf.of(example)
    assert leaf.draw(Source(0, "cpu")).stride() == example.stride()
    assert torch.equal(leaf.example("cpu"), example) and leaf.example("cpu").stride() == example.stride()
    for distribution in DISTRIBUTIONS:
        assert redistribute(example, "real", distribution, 0).stride() == example.stride()
    halved = cut(leaf, [-(-s // 2) for s in example.shape], {}).draw(Source(0, "cpu"))
    order = [sorted(range(x.dim()), key=lambda d: (x.stride(d), -d)) for x in (example, halved)]
    assert order[0] == order[1] or 1 in halved.shape or 0 in example.stride()


def test_distributions_stay_in_the_domain() -> None:
    allowed = {
        "real": set(DISTRIBUTIONS),
        "positive": set(DISTRIBUTIONS) - {"normal", "negated", "rounded", "huge"},
        "sign": {"given", "negated"},
        "sorted": {"given", "x3", "x0.01"},
        "orthogonal": {"given", "negated"},
        **{d: {"given"} for d in ("probability", "index", "mask", "scalar", "offsets", "permutation", "fixed")},
    }
    for domain, names in allowed.items():
        assert {n for n in DISTRIBUTIONS if applies(n, domain)} | {"given"} == names
    x = torch.rand(200, 200)
    found = {d: redistribute(x, "real", d, 1) for d in DISTRIBUTIONS}
    assert found["given"] is x
    assert (
        torch.allclose(found["x3"], 3 * x)
        and torch.allclose(found["x30"], 30 * x)
        and torch.allclose(found["x0.01"], 0.01 * x)
    )
    assert torch.equal(found["negated"], -x)
    normal = [redistribute(x, "real", "normal", seed) for seed in range(8)]
    assert all(abs(float(n.mean() / n.std())) < 0.05 and 0.24 < n.std() < 4.1 for n in normal)
    assert max(n.std() for n in normal) > 2 * min(n.std() for n in normal), "no deviation that tells them"
    wide = redistribute(15 * torch.randn(64, 64), "real", "x30", 1)
    assert 20 < wide.std() < WIDEST, "what is wide as given is made less so"
    rounded = [redistribute(x, "real", "rounded", seed) for seed in range(8)]
    assert all(len(r.unique()) < 60 and (r == 0).any() for r in rounded), "zeros and equal values"
    assert len({r.abs().max().log2().round().item() for r in rounded}) > 2, "of more than one size"
    for distribution, most in (("slices", 0.15), ("spots", 0.01)):
        uneven = [redistribute(x, "real", distribution, seed) for seed in range(8)]
        assert all(0 < float((u != x).double().mean()) < most for u in uneven), "most are as given"
        assert max(u.amax() for u in uneven) > 90 and min(u.amin() for u in uneven) < -90, "where exponentials overflow"
        assert all((redistribute(x + 1, "positive", distribution, seed) > 0).all() for seed in range(8))
    slices = [redistribute(x, "real", "slices", seed) for seed in range(8)]
    assert all((s == 0).all(d).any() for s in slices for d in (0, 1)), "a row and a column of zeros"
    shifted = [redistribute(x, "real", "shifted", seed) - x for seed in range(8)]
    assert (
        all(s.std() < 1e-5 and 0.5 < abs(s.mean()) < 5 for s in shifted)
        and len({float(s.mean()) for s in shifted}) == 8
    )
    assert min(s.mean() for s in shifted) < 0 < redistribute(x, "positive", "shifted", 1).min(), (
        "either way, but no sign"
    )
    index = torch.arange(4)
    assert redistribute(index, "real", "x3", 1) is index, "only floating inputs change"
    with pytest.raises(SpecError, match="unknown distribution 'cauchy'; known: given"):
        applies("cauchy", "real")


def test_spec_inputs_in_every_distribution() -> None:
    examples = (torch.randn(8, 8), torch.rand(8, 80) + 0.5, torch.tensor([1, 2]), torch.rand(8, 8).softmax(-1), 1.5)
    spec = KernelSpec.of(
        lambda *a: a[0], examples, dtype="bf16", domains=("real", "positive", "index", "probability", "scalar")
    )
    given, again = spec.inputs(5), spec.inputs(5)
    for a, b in zip(given[:4], again[:4], strict=True):
        assert torch.equal(a, b)
    changed = {
        d: [not torch.equal(a, b) for a, b in zip(spec.inputs(5, "cpu", d)[:4], given, strict=False)]
        for d in DISTRIBUTIONS
        if d not in TOGETHER
    }
    assert changed == {
        "given": [False] * 4,
        "normal": [True, False, False, False],
        "x3": [True, True, False, False],
        "x30": [True, True, False, False],
        "x0.01": [True, True, False, False],
        "negated": [True, False, False, False],
        "rounded": [True, False, False, False],
        "shifted": [True, True, False, False],
        "slices": [True, True, False, False],
        "spots": [True, True, False, False],
    }
    assert all(x.dtype is torch.bfloat16 for i, x in enumerate(spec.inputs(5, "cpu", "normal")[:4]) if i != 2)


def test_declared_domains_win_over_inferred_ones() -> None:
    spec = KernelSpec.of(torch.log, (torch.rand(8),), domains=("positive",))
    assert spec.domains == ("positive",) and torch.equal(spec.inputs(0, "cpu", "negated")[0], spec.inputs(0)[0])


def test_samples_are_small_and_whole_rows() -> None:
    x = torch.zeros(1).expand(1 << 20, 1 << 12)
    assert unexpanded(x).numel() == 1 and sample(x).numel() == 1
    y = torch.empty(4096, 2048)
    assert sample(y).shape[-1] == 2048 and sample(y).numel() <= 1 << 20
    assert sample(torch.empty(1 << 22)).numel() <= 1 << 20


def test_perturbed_parameters() -> None:
    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64))
        module.register_buffer("mask", torch.ones(64))
        return module

    module, before = make(), make().state_dict()
    perturb_parameters(module, 1)
    after = module.state_dict()
    same = {k for k in before if torch.equal(before[k], after[k])}
    assert same == {"mask", "1.num_batches_tracked"}
    assert bool((after["1.running_var"] > 0).all())
    assert 0 < float((after["0.weight"] - before["0.weight"]).abs().mean()) < 0.2
    other, again = make(), make()
    perturb_parameters(other, 2)
    perturb_parameters(again, 1)
    assert torch.equal(again.state_dict()["0.weight"], after["0.weight"])
    shares, signs = set(), []
    for seed in range(2, 20):
        module = make()
        perturb_parameters(module, seed)
        changed = (module.state_dict()["0.weight"] != before["0.weight"]).any(1).double().mean()
        shares.add(float(changed))
        signs.append(float((module.state_dict()["1.weight"] < 0).double().mean()))
    assert len(shares) > 2 and min(shares) == 1 / 64 and max(shares) == 1, "all rows, some or one"
    assert max(signs[0::2]) == 0 and 0.3 < max(signs[1::2]) < 0.7, "ones get both signs, by odd seeds"
    table = torch.nn.Module()
    table.register_buffer("table", torch.randn(64, 8))
    table.register_buffer("idle", torch.randn(64, 8), persistent=False)
    old = table.table.clone(), table.idle.clone()
    perturb_parameters(table, 1)
    assert not torch.equal(table.table, old[0]) and torch.equal(table.idle, old[1])
    assert not torch.equal(other.state_dict()["0.weight"], after["0.weight"])


@pytest.mark.parametrize("share", range(len(SHARES)))
@pytest.mark.parametrize("signs", [False, True])
def test_many_small_parameters_change_each_by_itself(share: int, signs: bool):
    """Together, as a network has hundreds of them: each in its own rows, and signs where all of it has one."""
    parts: list[torch.nn.Module] = [torch.nn.BatchNorm1d(n) for n in (1, 8, 32, 64, 64)]
    parts += [torch.nn.Linear(32, 16), torch.nn.Linear(1, 5).double(), torch.nn.Linear(300, 100)]
    module = torch.nn.ModuleList(parts)
    module.register_parameter("one", torch.nn.Parameter(torch.tensor(-2.0)))
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    again = copy.deepcopy(module)
    perturb_parameters(module, seed_of(5, share, signs))
    perturb_parameters(again, seed_of(5, share, signs))
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), again.parameters(), strict=True))
    changed, turned = [], []
    for name, p in module.named_parameters():
        was = before[name].reshape(-1, before[name].shape[-1] if before[name].dim() > 1 else 1)
        now = p.detach().reshape(was.shape)
        rows = (was != now).any(-1)
        assert rows.any() and (was != now)[rows].all()
        assert int(rows.sum()) == (1 if SHARES[share] == 0 else len(rows)) or SHARES[share] not in (0, 1)
        changed.append(int(rows.sum()))
        if was.abs().min() > 0.5:
            turned.append(int((was * now < 0).sum()))
    assert any(turned) == signs and len(set(changed)) > 1 or SHARES[share] == 0
    means = torch.cat([b.running_mean for b in parts[:5]])
    assert means.unique().numel() == means.numel()


def test_parameters_in_one_memory_change_one_after_another():
    module = torch.nn.ModuleList([torch.nn.BatchNorm1d(8) for _ in range(2)])
    module[1].weight.data = module[0].weight.data
    perturb_parameters(module, seed_of(5, SHARES.index(1.0)))
    assert torch.equal(module[0].weight, module[1].weight)
    alone = torch.nn.ModuleList([torch.nn.BatchNorm1d(8) for _ in range(2)])
    perturb_parameters(alone, seed_of(5, SHARES.index(1.0)))
    assert (alone[0].weight != alone[1].weight).all()


def test_many_small_parameters_take_a_few_operators_and_no_wait():
    module = torch.nn.ModuleList([torch.nn.BatchNorm1d(8) for _ in range(50)])
    with torch.profiler.profile() as profile:
        perturb_parameters(module, seed_of(5, 1, signs=True))
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["aten::normal_"] < 10 and counts["aten::mul"] < 30 and counts.get("aten::item", 0) < 5
