import torch

from qimeng.envs.errors.error_budget import Expected
from qimeng.envs.judge.trials import ALIKE, USES, Trial, TrialPool
from qimeng.envs.workers.worker_setup import Draw


def trial(seed: int, distribution: str = "given") -> Trial:
    return Trial(Draw(seed, distribution), [Expected(torch.zeros(256))], {})


def test_a_pool_that_gets_more_than_it_gives_stays_small() -> None:
    pool = TrialPool(1 << 30)
    for seed in range(100):
        pool.keep(trial(seed, ("given", "normal")[seed % 2]))
    given: list[Draw] = []
    while (found := pool.take(("given", None), given)) is not None:
        given.append(found.draw)
    assert ALIKE - 1 <= len(given) <= ALIKE  # of the last one a coin decides
    assert {d.seed for d in given} <= {92, 94, 96, 98}  # equally used ones go by age


def test_the_most_used_gives_way() -> None:
    pool = TrialPool(1 << 30)
    for seed in range(ALIKE):
        pool.keep(trial(seed))
    worn = pool.take(("given", None), [])
    assert worn is not None
    pool.keep(trial(100))
    seen = {t.draw.seed for t in (pool.take(("given", None), []) for _ in range(40)) if t is not None}
    assert worn.draw.seed not in seen and seen


def test_a_trial_is_used_up_and_one_that_does_not_fit_is_not_kept() -> None:
    pool = TrialPool(trial(0).bytes)
    pool.keep(trial(1))
    pool.keep(trial(2))
    seeds = [t.draw.seed for t in (pool.take(("given", None), []) for _ in range(64)) if t is not None]
    assert seeds == [1] * (USES - 1)
