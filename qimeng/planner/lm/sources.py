"""The data of a training run: its tasks, the held-out trees, and the source of answers.

Deals in trees and tasks. Knows nothing about models.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from qimeng.device import Device, row_name
from qimeng.envs.steps.setup import make_device
from qimeng.envs.steps.task import Task
from qimeng.planner.data.generate import draw_many
from qimeng.planner.data.tree import Tree
from qimeng.planner.data.tree_file import read_trees
from qimeng.planner.data.tree_store import put_drawn
from qimeng.planner.lm.branches import Teacher, pairs_of
from qimeng.planner.lm.bundled import Bundled, bundled
from qimeng.planner.lm.config import TrainConfig, TrainingError, processor_of
from qimeng.planner.lm.disk_cache import cached
from qimeng.planner.lm.imitation import Example
from qimeng.planner.lm.live import Elsewhere, Meter, OpenJudges, live_tasks, mixed_task
from qimeng.planner.lm.networks import NetworkTask, captured_networks, is_network, network_pairs, network_tasks
from qimeng.planner.lm.processes import in_processes
from qimeng.planner.lm.replay import GAIN, worth_replaying
from qimeng.planner.lm.stored import Offer, StoredTask, looked_through, stored_tasks
from qimeng.store import Store

IMITATED = Path("imitated") / "figures.json"
"""File of a run's folder that is there once imitation is done."""

ANSWERED = "answered.txt"
"""File of a run's folder that lists the programs that judges answered."""


@dataclass
class Sources:
    """What is trained on.

    Attributes:
        tasks: of the environments.
        stored: the trees that are trained on; none where all is live.
        validation: trees that training never sees, with something to gain in them: they decide which weights are kept.
        held_out: others, which decide nothing: what is reported comes from them.
        offer: leaves out what the trees have no answer for; None where a judge answers.
        meter: evaluations asked of live judges, and their budget.
        paid: evaluations that the trees trained on hold.
        examples: choices to imitate.
        judges: live judges that are open.
        device: name of the device.
        estimated: whether times are the analytic model's.
        data: what it is, in words, for the model card.
        store: of what was judged live; None where nothing is.
    """

    tasks: tuple[Task, ...]
    stored: tuple[StoredTask, ...]
    validation: tuple[StoredTask, ...]
    held_out: tuple[StoredTask, ...]
    offer: Offer | None
    meter: Meter
    device: str
    estimated: bool
    data: str
    paid: int = 0
    store: Store | None = None
    examples: tuple[Example, ...] = ()
    judges: OpenJudges = field(default_factory=OpenJudges)

    @property
    def evaluations(self) -> int:
        """Evaluations that training has had so far, those of its trees included."""
        return self.paid + self.meter.used

    @property
    def times(self) -> str:
        """Whose times, and of which kind, in words."""
        return f"{self.device}, {'ESTIMATED by an analytic model, never measured' if self.estimated else 'measured'}"

    def close(self) -> None:
        """End judges and close the store."""
        self.judges.close()
        if self.store is not None:
            self.store.close()


def gather(config: TrainConfig, out: Path, evaluations: int = 0, elsewhere: Elsewhere | None = None) -> Sources:
    """Read trees, or draw specs, as `config` says.

    Args:
        config: the settings.
        out: folder of the run, where a store of live answers lies.
        evaluations: budget; 0 for no limit. Where trees answer, only as many trees are trained on as hold together no
            more evaluations; where a judge answers, it is asked no more often.
        elsewhere: where live judges work; None for this machine.

    Raises:
        TrainingError: no tree, or none of the device, or nothing that can be captured here, or no such processor.
        TreeError: a file holds no trees.
        DeviceError: an unknown device.
    """
    processor_of(config)  # before minutes of reading
    meter, judges = Meter(evaluations, None if config.answers == "stored" else out / ANSWERED), OpenJudges()
    if config.answers == "live":
        device = make_device(config.device or None) if elsewhere is None else elsewhere.device
        store = Store(out / "store.sqlite")
        drawn = list(draw_many(config.seed, config.specs))
        for one in drawn:
            put_drawn(store, one)
        tasks = tuple(live_tasks((d.spec for d in drawn), device, store, meter, judges, config.coder, elsewhere))
        if not tasks:
            raise TrainingError(f"none of {config.specs} drawn specs can be optimized here")
        words = f"live: {len(tasks)} drawn specs (sequence {config.seed})"
        return Sources(tasks, (), (), (), None, meter, device.name, not device.measured, words, 0, store, judges=judges)
    trees = _of_device([t for path in config.trees for t in read_trees(path)], config.device)
    kept, held = split(trees, config.held_out, config.held_out_families, config.seed)
    if config.answers == "stored" and evaluations:
        kept = within(kept, evaluations, config.seed)
    wanted = partial(
        _examples, walks=config.walks, steps=config.ppo.max_steps, seed=config.seed, teacher=config.teacher
    )
    networks, small = [t for t in kept if is_network(t)], [t for t in kept if not is_network(t)]
    if networks and config.answers != "stored":
        raise TrainingError("trees of networks are answered from what was found of regions: set answers = 'stored'")
    # a new tokenizer is learnt from examples as well
    needed = bool(config.imitation.epochs or config.start == "mini") and not (out / IMITATED).is_file()
    if config.bundles.count:
        return _of_bundles(config, kept, held, needed, meter, judges)
    found = list(looked_through(small, config.coder, wanted if needed else None))
    captured = captured_networks(networks)
    large = tuple(network_tasks(captured, config.coder))
    stored, examples = (*(s for s, _ in found), *large), tuple(example for _, some in found for example in some)
    if needed:
        examples = (*examples, *_network_examples(config, large))
    held_small = stored_tasks([t for t in held if not is_network(t)], config.coder)
    held_large = network_tasks(captured_networks(t for t in held if is_network(t)), config.coder, captured)
    apart = tuple(worth_replaying([*held_small, *held_large]))
    if not stored:
        raise TrainingError(f"none of {len(kept)} trees begins with the program that this version makes of its spec")
    conditions = stored[0].task.conditions
    known = {s.task.conditions for s in stored}
    words = describe_trees(config.trees, [t for t in kept if t.conditions in known])
    if config.answers == "stored":
        tasks, offer, asked = tuple(s.task for s in stored), Offer.of(stored), None
    else:
        row = _judging(conditions.device) if elsewhere is None else elsewhere.device
        asked, offer = Store(out / "store.sqlite"), None
        try:
            tasks = tuple(mixed_task(s, row, asked, meter, judges, config.coder, elsewhere) for s in stored)
        except ValueError as error:
            raise TrainingError(f"{error}; set answers = 'stored'") from None
        words += "; gaps judged live"
    return Sources(
        tasks=tasks,
        stored=stored,
        validation=apart[1::2],
        held_out=apart[::2],
        offer=offer,
        meter=meter,
        device=conditions.device,
        estimated=conditions.estimated,
        data=words,
        paid=sum(len(s.tree.evaluations) for s in stored),
        store=asked,
        examples=examples,
        judges=judges,
    )


def _of_bundles(
    config: TrainConfig, kept: Sequence[Tree], held: Sequence[Tree], needed: bool, meter: Meter, judges: OpenJudges
) -> Sources:
    """Bundles of the trees' computations (`qimeng.planner.lm.bundled`)."""
    if config.answers != "stored":
        raise TrainingError("bundles are answered from what was found of regions: set answers = 'stored'")
    writer = Path(config.bundles.writer)
    names = [t.digest for t in kept], [t.digest for t in held], writer.read_text() if writer.is_file() else ""
    about = f"{names} {config.bundles} {config.coder} {config.seed}"

    def ready() -> Bundled:
        found = bundled(kept, held, config.bundles, config.coder, config.seed)
        worth = (tuple(t for t in tasks if t.gain >= GAIN) for tasks in (found.validation, found.held_out))
        return Bundled(found.training, *worth)

    made = cached(f"bundles {about}", ready)
    if not made.training:
        raise TrainingError("no bundle can be made: too little is known of the trees' regions; set bundles.count = 0")
    conditions = made.training[0].task.conditions
    walks = f"walks {about} {config.walks} {config.ppo.max_steps} {config.teacher}"
    examples = cached(walks, lambda: _network_examples(config, made.training)) if needed else ()
    written = f", kernels as a writer with the rows of {writer} has them" if config.bundles.writer else ""
    return Sources(
        tasks=tuple(s.task for s in made.training),
        stored=made.training,
        validation=made.validation,
        held_out=made.held_out,
        offer=Offer.of(made.training),
        meter=meter,
        device=conditions.device,
        estimated=conditions.estimated,
        data=f"{len(made.training)} bundles of {describe_trees(config.trees, kept)}{written}",
        paid=sum(len(tree.evaluations) for tree in kept),
        examples=examples,
        judges=judges,
    )


def _network_examples(config: TrainConfig, tasks: Sequence[NetworkTask]) -> tuple[Example, ...]:
    """What a planner that knows everything does on networks, found on all cores."""
    wanted = partial(_walked, walks=config.walks, steps=config.ppo.max_steps, seed=config.seed, teacher=config.teacher)
    return tuple(example for some in in_processes(wanted, tasks) for example in some)


def _walked(task: NetworkTask, walks: int, steps: int, seed: int, teacher: Teacher) -> list[Example]:
    return [Example.of(seen, choice) for seen, choice in network_pairs([task], walks, steps, seed, teacher)]


def _examples(stored: StoredTask, walks: int, steps: int, seed: int, teacher: Teacher) -> list[Example]:
    return [Example.of(seen, choice) for seen, choice in pairs_of(stored, walks, steps, seed, teacher)]


def within(trees: Sequence[Tree], evaluations: int, seed: int = 0) -> list[Tree]:
    """As many of `trees`, in a random order, as hold together at most so many evaluations.

    Raises:
        TrainingError: not even one does.
    """
    order, left, kept = random.Random(seed).sample(list(trees), len(trees)), evaluations, list[Tree]()
    for tree in order:
        if len(tree.evaluations) <= left:
            left -= len(tree.evaluations)
            kept.append(tree)
    if not kept:
        raise TrainingError(f"no tree holds at most {evaluations} evaluations: give a larger budget")
    return kept


def split(
    trees: Sequence[Tree], share: float, families: Sequence[str] = (), seed: int = 0
) -> tuple[list[Tree], list[Tree]]:
    """(to train on, held out): whole families, and a share of the other specs; trees of one spec stay together.

    Raises:
        TrainingError: no tree is of one of these families, or none is left to train on.
    """
    there = sorted({t.family for t in trees})
    if missing := [f for f in families if f not in there]:
        raise TrainingError(
            f"held_out_families: no tree is of family {', '.join(map(repr, missing))}; there are {', '.join(there)}; "
            "several are a list, such as " + f"{there[:2]}".replace("'", '"')
        )
    specs = sorted({t.conditions.spec for t in trees if t.family not in families})
    apart = set(random.Random(seed).sample(specs, round(share * len(specs))))
    held = [t for t in trees if t.conditions.spec in apart or t.family in families]
    kept = [t for t in trees if not (t.conditions.spec in apart or t.family in families)]
    if not kept:
        raise TrainingError(f"all {len(held)} trees are held out: give more trees, or lower held_out")
    return kept, held


def describe_trees(paths: Sequence[str], trees: Sequence[Tree]) -> str:
    """How many trees, programs and evaluations, from which files, by their content."""
    programs = sum(t.programs for t in trees)
    evaluations = sum(len(t.evaluations) for t in trees)
    files = ", ".join(
        f"{Path(p).name} (blake2b {hashlib.blake2b(Path(p).read_bytes(), digest_size=8).hexdigest()})" for p in paths
    )
    return f"{len(trees)} stored trees with {programs} programs and {evaluations} evaluations, from {files}"


def _of_device(trees: Sequence[Tree], wanted: str) -> list[Tree]:
    kinds = sorted({(t.conditions.device, t.conditions.estimated) for t in trees})
    names = [f"{device}{' (estimated)' if estimated else ''}" for device, estimated in kinds]
    if wanted:
        kinds = [k for k in kinds if wanted in (k[0], row_name(k[0]))]
    if len(kinds) != 1:
        said = f"no trees of {wanted!r}" if wanted and not kinds else f"trees of {len(kinds)} devices; name one"
        raise TrainingError(f"{said}: the files hold {', '.join(names) or 'none'}")
    return [t for t in trees if (t.conditions.device, t.conditions.estimated) == kinds[0]]


def _judging(name: str) -> Device:
    """The device of that name as it is judged here."""
    return make_device(row_name(name))


__all__ = ["ANSWERED", "IMITATED", "Sources", "describe_trees", "gather", "split", "within"]
