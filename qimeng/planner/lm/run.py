"""A training run in a folder: warm start, PPO, report.

Deals in the order of the phases and in files. `qimeng.planner.lm.sources` provides the data; `imitation` and `training`
train.

| file | holds |
|---|---|
| config.toml | the settings; a run goes on only with the same |
| planner.json … | the planner (see `qimeng.planner.lm.weights`), once the run is done |
| imitation.pt | where imitation stands, while it goes on |
| imitated/ | the planner after imitation alone |
| checkpoint.pt | where PPO stands; a run that was killed goes on from it |
| progress.jsonl | every row of progress, as it was reported |
| answered.txt | the programs that live judges answered, one a line: what is spent of a budget of evaluations |
| store.sqlite | what they answered |
| report.json | what came of it |
"""

from __future__ import annotations

import fcntl
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from qimeng.checkpoint import write_text
from qimeng.envs.gym.reward import Reward, make_reward
from qimeng.planner.lm.checkpoint import FILE, put_weights, trained_weights
from qimeng.planner.lm.config import TrainConfig, TrainingError, load_config, processor_of
from qimeng.planner.lm.corpus import corpus
from qimeng.planner.lm.imitation import Example, imitate
from qimeng.planner.lm.mini import train_tokenizer
from qimeng.planner.lm.networks import learnt_of
from qimeng.planner.lm.planner import LanguageModelPlanner
from qimeng.planner.lm.replay import Chance, mean_shares
from qimeng.planner.lm.scoring import Scale
from qimeng.planner.lm.settings import differences, to_toml
from qimeng.planner.lm.sources import ANSWERED, IMITATED, Sources
from qimeng.planner.lm.stored import Offer
from qimeng.planner.lm.training import Validation, make_environment, train
from qimeng.planner.lm.value import pretrain_value
from qimeng.planner.lm.weights import Card, PlannerModel, add_lora, from_hub, is_planner, load, new_mini, save

FINAL_SEEDS = (0, 1, 2)
FINAL_EVALUATIONS = 20

READ = 1500
"""Maximum number of states, with their actions, to train a tokenizer on. More take minutes and add no new words."""

PASSES = "imitation.pt"
"""File of a run's folder that says where imitation stands."""

SETTINGS = "config.toml"
"""File of a run's settings."""

BEGUN = (PASSES, "imitated", FILE, "planner.json")
"""Of these files, a folder has one once something was trained in it."""

OnProgress = Callable[[str, Mapping[str, float]], None]
"""Called with the name of the phase and its figures."""


@dataclass
class Report:
    """What came of a run.

    Attributes:
        data: what it was trained on.
        times: of which device, of which kind.
        reward: what was paid.
        start: the planner or model that the run began with; empty for a new one.
        curve: rows of PPO and of its validations, in order.
        shares: for the trained planner, the imitated one, its untrained twin and chance, means over the held-out trees
            (`qimeng.planner.lm.replay.mean_shares`); empty where none are held out.
        held_out: number of held-out trees.
        pairs: choices that were imitated.
        coverage: mean share of the legal actions that the trees had answers for; 1 where a judge answered.
        evaluations: programs asked about live, and those that the trees hold.
        trained: parameters trained.
        parameters: all of them.
        seconds: of this process.
    """

    data: str = ""
    times: str = ""
    reward: str = ""
    start: str = ""
    curve: list[dict[str, float]] = field(default_factory=list)
    shares: dict[str, dict[str, float]] = field(default_factory=dict)
    held_out: int = 0
    pairs: int = 0
    coverage: float = 1.0
    evaluations: int = 0
    trained: int = 0
    parameters: int = 0
    seconds: float = 0.0

    def save(self, folder: Path) -> None:
        """Write report.json."""
        (folder / "report.json").write_text(json.dumps(asdict(self), indent=1) + "\n")

    def figures(self) -> dict[str, str]:
        """For the model card."""
        found = {"mean coverage": f"{self.coverage:.0%} of the legal actions had a stored answer"} if self.curve else {}
        for name, shares in self.shares.items():
            shown = ", ".join(f"{key} {value:.0%}" for key, value in shares.items())
            found[f"{name}, {self.held_out} held-out trees"] = f"{shown} (of the best-known log-gain, {self.times})"
        if self.start:
            found["began with"] = self.start
        steps = [row["steps"] for row in self.curve]
        return {**found, "PPO": f"{steps[-1]:.0f} steps" if steps else "none", "evaluations": str(self.evaluations)}


class Run:
    """One run of `qimeng train`.

    Args:
        config: the settings.
        out: its folder; a run that was interrupted there goes on.
        sources: what is trained on (`gather`).
        on_progress: called as the run goes on.
        seconds: PPO ends once this process has trained for so long, and the run is finished as it stands.

    Raises:
        TrainingError: the folder holds a run with other settings, or one that another process trains, or TensorBoard
            is wanted and not installed.
    """

    def __init__(
        self,
        config: TrainConfig,
        out: Path,
        sources: Sources,
        on_progress: OnProgress = lambda phase, row: None,
        seconds: float = math.inf,
    ):
        self.config, self.out, self.sources, self.on_progress, self.seconds = config, out, sources, on_progress, seconds
        self.began = time.monotonic()
        start = "" if config.start == "mini" else config.start
        self.report = Report(sources.data, sources.times, reward_words(config), start, held_out=len(sources.held_out))

    def __call__(self) -> Report:
        """Train, save, report."""
        prepare(self.out, self.config)
        with alone(self.out):
            return self._trained()

    # ---- parts
    def _trained(self) -> Report:
        config = self.config
        model = self._warm()
        rows = train(
            model,
            self.sources.tasks,
            replace(config.ppo, seed=config.seed + config.ppo.seed),
            partial(make_reward, config.reward, config.coverage),
            lambda row: self._log("validation" if "score" in row else "ppo", row),
            str(self.out / "tensorboard") if config.tensorboard else None,
            self.out,
            self.sources.offer,
            self._validation(model),
            lambda: self.sources.meter.over() or time.monotonic() - self.began > self.seconds,
        )
        report = self.report
        report.curve, report.evaluations = rows, self.sources.evaluations
        sizes = [(p.numel(), p.requires_grad) for p in model.scorer.parameters()]
        report.parameters, report.trained = sum(n for n, _ in sizes), sum(n for n, wanted in sizes if wanted)
        report.coverage = self.sources.offer.coverage if self.sources.offer else 1.0
        if self.sources.held_out:
            report.shares["trained"] = self._final("trained", LanguageModelPlanner(model))
        report.seconds = time.monotonic() - self.began
        card = Card(report.data, report.times, report.reward, report.figures())
        save(model, self.out, card)
        report.save(self.out)
        return report

    def _warm(self) -> PlannerModel:
        """The model after imitation and value pretraining; from the folder where it is there already."""
        config, s, figures = self.config, self.sources, self.out / IMITATED
        folder = figures.parent
        if figures.is_file():
            try:
                data = json.loads(figures.read_text())
                self.report.shares, self.report.pairs = data["shares"], data["pairs"]
            except (ValueError, KeyError, TypeError) as error:
                raise TrainingError(f"{figures} cannot be read ({error}): remove {folder} to imitate again") from None
            return _ready(load(folder, trainable=True), config)
        examples = s.examples
        model = start_model(config, s)
        if s.held_out:
            self.report.shares["chance"] = self._logged("chance") or self._final("chance", Chance())
            self.report.shares["untrained"] = self._logged("untrained") or self._final(
                "untrained", LanguageModelPlanner(model)
            )
        if examples and config.imitation.epochs:
            self._imitate(model, examples)
            if s.held_out:
                self.report.shares["imitated"] = self._final("imitated", LanguageModelPlanner(model))
        if config.value.episodes and config.ppo.steps and s.offer is not None:  # live episodes would cost evaluations
            offer = Offer(s.offer.stored)
            env = make_environment(model, s.tasks, config.ppo.max_steps, self._reward(), offer)
            settings_of_value = replace(config.value, seed=config.seed + config.value.seed)
            self._log("value", pretrain_value(model, env, settings_of_value, config.ppo.gamma))
        self.report.pairs = len(examples)
        note = Card(self.report.data, self.report.times, "imitation of the best branches alone", self.report.figures())
        save(model, folder, note)
        write_text(json.dumps({"shares": self.report.shares, "pairs": len(examples)}), figures)
        (self.out / PASSES).unlink(missing_ok=True)
        return model

    def _imitate(self, model: PlannerModel, examples: Sequence[Example]) -> None:
        """Imitate the best branches; a planner to begin with is kept as it is where that makes it no better."""
        settings = replace(self.config.imitation, seed=self.config.seed + self.config.imitation.seed)
        may_lose = bool(self.sources.validation) and is_planner(self.config.start)
        before, weights = (self._shares(model), trained_weights(model.scorer)) if may_lose else ({}, {})
        imitate(model, examples, settings, lambda row: self._log("imitation", row), self.out / PASSES)
        if before:
            after = self._shares(model)
            if (after["area"], after["greedy"]) <= (before["area"], before["greedy"]):
                put_weights(model.scorer, weights)
                self._log("imitation undone", after)

    def _shares(self, model: PlannerModel) -> dict[str, float]:
        """How good the policy is on the trees for validation."""
        return mean_shares(LanguageModelPlanner(model), self.sources.validation, self.config.validation_evaluations)

    def _validation(self, model: PlannerModel) -> Validation | None:
        if not self.sources.validation or not self.config.validate_every:
            return None

        def score() -> tuple[float, dict[str, float]]:
            found = self._shares(model)
            return found.pop("area"), found

        return Validation(score, self.config.validate_every, self.config.patience)

    def _final(self, name: str, planner: Chance | LanguageModelPlanner) -> dict[str, float]:
        found = mean_shares(planner, self.sources.held_out, FINAL_EVALUATIONS, FINAL_SEEDS)
        self._log(name, found)
        return found

    def _logged(self, name: str) -> dict[str, float]:
        """What `_final` found before the run was killed; empty where it did not come so far."""
        log = self.out / "progress.jsonl"
        lines = log.read_text().splitlines() if log.is_file() else []
        whole = (line for line in lines if line.startswith(f'{{"phase": "{name}"') and line.endswith("}"))
        found = json.loads(next(whole, "{}"))
        return {key: value for key, value in found.items() if key.startswith("share at ") or key in ("area", "greedy")}

    def _reward(self) -> Reward:
        return make_reward(self.config.reward, self.config.coverage)

    def _log(self, phase: str, row: Mapping[str, float]) -> None:
        offer = self.sources.offer
        figures = {**row, "evaluations": self.sources.evaluations, "coverage": offer.coverage if offer else 1.0}
        with open(self.out / "progress.jsonl", "a") as log:
            since = round(time.monotonic() - self.began, 1)
            log.write(json.dumps({"phase": phase, **figures, "since": since}) + "\n")
        self.on_progress(phase, figures)


def prepare(out: Path, config: TrainConfig) -> None:
    """Make the folder of a run, or see that the run in it has the same settings.

    A run that ended before it had trained anything does not count: a run with other settings may take its folder.

    Raises:
        TrainingError: it has others, another process trains in it, no trees are named to train on, or TensorBoard is
            wanted and not installed.
    """
    if config.answers != "live" and not config.trees:
        raise TrainingError(
            "no trees to train on: name files that `qimeng collect export` wrote, or set answers = 'live'"
        )
    if config.tensorboard and find_spec("tensorboard") is None:
        raise TrainingError("TensorBoard is not installed: pip install 'qimeng[tensorboard]', or leave its logs out")
    out.mkdir(parents=True, exist_ok=True)
    path = out / SETTINGS
    if path.exists():
        with alone(out):  # before what another process writes is taken away
            pass
    if not any((out / part).exists() for part in BEGUN):
        for part in (ANSWERED, "progress.jsonl"):
            (out / part).unlink(missing_ok=True)
    elif path.exists():
        changed = differences(load_config(path), config)
        if changed:
            raise TrainingError(
                f"{out} holds a run with other settings ({', '.join(changed)}): name another folder, or give the same"
            )
    write_text(to_toml(config, explained=True), path)


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Hold the folder of a run for this process, until it ends at the latest.

    Raises:
        TrainingError: another process has it.
    """
    with open(out / SETTINGS) as settings:
        try:
            fcntl.flock(settings, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TrainingError(
                f"another process trains in {out}: wait for it to end, or name another folder"
            ) from None
        yield


def kept(out: Path) -> str:
    """What a run that was interrupted left in its folder, in words."""
    if (out / FILE).exists():
        return f"{out} keeps what was trained, up to the last rollout of PPO"
    if (out / IMITATED).exists():
        return f"{out} keeps what was imitated; PPO had ended no rollout"
    if (out / PASSES).exists():
        return f"{out} keeps what was imitated, up to the last pass"
    return "nothing was trained yet"


def start_model(config: TrainConfig, sources: Sources) -> PlannerModel:
    """The model that training begins with: new, from a folder, or from Hugging Face; with LoRA where it is wanted.

    Raises:
        WeightsError: it cannot be loaded.
    """
    scale = Scale(temperature=config.temperature)
    if config.start == "mini":
        some = sources.examples[:: max(1, len(sources.examples) // READ)]
        texts = [part for e in some for part in (e.text.state, *e.text.actions)]
        texts = texts or list(corpus(sources.tasks[:8], 1, 4))
        model = new_mini(train_tokenizer(texts), config.mini, scale, config.seed, config.length)
    elif is_planner(config.start):
        model = load(config.start, trainable=True)
        model.base = model.base or (str(Path(config.start).resolve()) if config.lora else "")
    else:
        model = from_hub(config.start, scale, config.dtype, config.length)
    if config.lora and not model.adapted:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            add_lora(model, config.lora, 2 * config.lora)
    model.devices = tuple(dict.fromkeys((*model.devices, sources.device)))
    before, started = model.learnt, is_planner(config.start)
    if sources.offer is None or (started and before is None):  # whatever a judge answers, or nobody knows what
        model.learnt = None
    else:
        found = learnt_of(sources.stored)
        model.learnt = found if before is None else before | found
    return _ready(model, config)


def reward_words(config: TrainConfig) -> str:
    """The reward, for people; without PPO none was paid."""
    if not config.ppo.steps:
        guide = config.teacher.guide
        return f"none: imitation alone{f', of {guide} where stored trees do not decide' if guide else ''}"
    return config.reward + (f" + {config.coverage:g} x generated share of the time" if config.coverage else "")


def _ready(model: PlannerModel, config: TrainConfig) -> PlannerModel:
    model.scorer.to(processor_of(config))
    return model


__all__ = [
    "OnProgress",
    "FINAL_EVALUATIONS",
    "FINAL_SEEDS",
    "Report",
    "Run",
    "alone",
    "kept",
    "prepare",
    "reward_words",
    "start_model",
]
