"""A language-model planner in a folder: weights or an adapter alone, tokenizer, value head, model card.

Deals in files. Knows nothing about training.

| file | holds |
|---|---|
| planner.json | how states are read and scores are scaled; version of the texts; which tokenizer belongs to it |
| config.json, model.safetensors | the language model, or |
| adapter_config.json, adapter_model.safetensors | the `peft` adapter alone; its base is named in planner.json |
| tokenizer.json, tokenizer_config.json | the tokenizer |
| heads.safetensors | the value head, and the head that adds to logits |
| README.md | the model card |
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from qimeng.envs.gym.action_features import ACTION_FEATURES
from qimeng.envs.gym.observation import FEATURES, TEXTS
from qimeng.errors import WeightsError
from qimeng.planner.lm import first_observation
from qimeng.planner.lm.learnt import Learnt
from qimeng.planner.lm.mini import MiniSize, make_mini
from qimeng.planner.lm.reading import Reader
from qimeng.planner.lm.scoring import ActionScorer, Scale

FORMAT = 6
"""Of a planner's folder; 6 since a head reads these numbers of actions and adds to logits, 3 since the features name no
family. Earlier ones are read as well: those of `first_observation`, and 3. They have the value head alone."""

READ = (first_observation.FORMAT, 3, FORMAT)
"""Formats that can be read."""

HEADS = ("value", "worth")
"""Parts of an `ActionScorer` whose weights are in heads.safetensors."""


@dataclass(frozen=True)
class Card:
    """What a model card says.

    Attributes:
        data: what it was trained on, evaluations counted.
        device: whose times these were, and whether they were measured or estimated.
        reward: what it was trained to do.
        figures: name to what was found when it was tried, with units.
    """

    data: str
    device: str
    reward: str
    figures: Mapping[str, str] = field(default_factory=dict)


@dataclass
class PlannerModel:
    """A scorer and the reader that belongs to it.

    Attributes:
        scorer: policy and value.
        reader: turns observations into what `scorer` takes.
        base: name or folder of the model that an adapter belongs to; empty where there is none, or it has no name.
        devices: names of the devices whose times it was trained on; empty where that is not known.
        learnt: what it has learnt to choose; None where that is not known.
    """

    scorer: ActionScorer
    reader: Reader
    base: str = ""
    devices: tuple[str, ...] = ()
    learnt: Learnt | None = None

    @property
    def adapted(self) -> bool:
        """Whether the language model carries a `peft` adapter."""
        return hasattr(self.scorer.lm, "peft_config")


def new_mini(
    tokenizer: Any, size: MiniSize | None = None, scale: Scale | None = None, seed: int = 0, length: int = 512
) -> PlannerModel:
    """An untrained mini model for `tokenizer`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        scorer = _scorer(make_mini(len(tokenizer), size, seed), scale)
    return PlannerModel(scorer, Reader(tokenizer, length))


def from_hub(name: str, scale: Scale | None = None, dtype: str = "float32", length: int = 1024) -> PlannerModel:
    """Any `transformers` causal LM with its tokenizer, by name or path, with a new value head.

    Raises:
        WeightsError: it cannot be loaded, or is no causal language model.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        with _quiet():
            lm = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, dtype))
            tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise WeightsError(f"no causal language model at {name!r}: {_first_line(error)}") from error
    _check_size(tokenizer, lm, name)
    return PlannerModel(_scorer(lm, scale), Reader(tokenizer, length, 48), name)


def _scorer(lm: Any, scale: Scale | None) -> ActionScorer:
    """For the features that observations have today."""
    return ActionScorer(lm, len(FEATURES), scale, len(ACTION_FEATURES))


def add_lora(model: PlannerModel, rank: int = 16, alpha: int = 32, targets: str | list[str] = "all-linear") -> None:
    """Give the language model a LoRA adapter, the only part of it that is trained from now on."""
    model.scorer.lm = with_lora(model.scorer.lm, rank, alpha, targets)


def with_lora(lm: Any, rank: int, alpha: int, targets: str | list[str] = "all-linear") -> Any:
    """The causal language model `lm` with a LoRA adapter, the only part of it that is trained from now on."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, lora_dropout=0.0, task_type="CAUSAL_LM")
    return get_peft_model(lm, config)


def save(model: PlannerModel, folder: str | Path, card: Card, half: bool = False) -> None:
    """Write `model` into `folder`: the whole language model, or its adapter alone where it has one.

    Args:
        model: what is saved.
        folder: made where it does not exist.
        card: for README.md.
        half: keep the weights in half precision, half as large.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    scorer, reader = model.scorer, model.reader
    lm = copy.deepcopy(scorer.lm).half() if half else scorer.lm
    with _quiet():
        lm.save_pretrained(folder)
    reader.tokenizer.save_pretrained(folder)
    heads = {k: v.contiguous().cpu() for k, v in scorer.state_dict().items() if k.partition(".")[0] in HEADS}
    save_file(heads, folder / "heads.safetensors")
    about = {
        "format": FORMAT,
        "texts": TEXTS,
        "adapter": model.adapted,
        "base": model.base,
        "devices": list(model.devices),
        "learnt": model.learnt and model.learnt.to_json(),
        "length": reader.length,
        "action_length": reader.action_length,
        "scale": scorer.scale.to_dict(),
        "features": scorer.features,
        "action_features": scorer.action_features,
        "tokenizer": fingerprint(reader.tokenizer),
    }
    (folder / "planner.json").write_text(json.dumps(about, indent=1) + "\n")
    (folder / "README.md").write_text(_card_text(model, card))


def load(folder: str | Path, base: Any = None, trainable: bool = False) -> PlannerModel:
    """What `save` wrote.

    Args:
        folder: written by `save`.
        base: for an adapter, its language model, or name or folder of it; by default the one named in planner.json.
        trainable: whether an adapter is to be trained further.

    Raises:
        WeightsError: a file is missing or damaged, the tokenizer is not the model's, or this version reads states
            otherwise; the message says which.
    """
    folder = Path(folder)
    about = _about(folder)
    from safetensors import SafetensorError

    try:
        with _quiet():
            return _load(folder, about, base, trainable)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise WeightsError(f"the planner in {folder} cannot be loaded: {_first_line(error)}") from error


def is_planner(folder: str | Path) -> bool:
    """Whether a planner was saved in `folder`."""
    return (Path(folder) / "planner.json").is_file()


def fingerprint(tokenizer: Any) -> str:
    """Content hash of a tokenizer's vocabulary."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.blake2b(vocabulary.encode(), digest_size=8).hexdigest()


def _about(folder: Path) -> dict[str, Any]:
    path = folder / "planner.json"
    if not path.is_file():
        raise WeightsError(f"no planner in {folder}: {path.name} is missing; name a folder that a training run wrote")
    try:
        about: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise WeightsError(f"{path} is damaged: {error}") from error
    if not isinstance(about, dict):
        raise WeightsError(f"{path} is damaged: it holds no table")
    again = "train it again, or use the version that it was trained with"
    first = about.get("format") == first_observation.FORMAT
    if about.get("format") not in READ:
        raise WeightsError(
            f"{path} has format {about.get('format')}; this version of qimeng reads format {FORMAT}: {again}"
        )
    texts = about.get("texts", first_observation.TEXTS if first else None)
    if texts != TEXTS:
        raise WeightsError(
            f"the planner in {folder} reads texts of version {texts}, this version of qimeng writes version {TEXTS}: "
            f"{again}"
        )
    made = {"features": first_observation.COUNT if first else len(FEATURES)}
    if about["format"] == FORMAT:
        made["action_features"] = len(ACTION_FEATURES)
    for name, count in made.items():
        if about.get(name) != count:
            raise WeightsError(
                f"the planner in {folder} reads {about.get(name)} {name.replace('_', ' ')}, this version of qimeng "
                f"makes {count}: {again}"
            )
    return about


def _load(folder: Path, about: dict[str, Any], base: Any, trainable: bool) -> PlannerModel:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if fingerprint(tokenizer) != about["tokenizer"]:
        raise WeightsError(f"the tokenizer in {folder} is not the one that its model was trained with")
    name = str(about["base"])
    if about["adapter"]:
        from peft import PeftModel

        base = base or name
        if not base:
            raise WeightsError(f"the adapter in {folder} names no base model: give its language model as `base`")
        lm: Any = PeftModel.from_pretrained(_language_model(base), str(folder), is_trainable=trainable)
        name = base if isinstance(base, str) else name
    else:
        lm = _language_model(folder)
    _check_size(tokenizer, lm, folder)
    scorer = _scorer(lm, Scale(**about["scale"]))
    _load_heads(scorer, folder, about["format"])
    reader = Reader(tokenizer, about["length"], about["action_length"])
    learnt = Learnt.from_json(about["learnt"]) if about.get("learnt") else None
    return PlannerModel(scorer.eval(), reader, name, tuple(about.get("devices", ())), learnt)


def _load_heads(scorer: ActionScorer, folder: Path, written: int) -> None:
    """The heads of a folder of format `written`; before 5, the one that adds to logits stays at 0."""
    from safetensors.torch import load_file

    if written == FORMAT:
        heads = load_file(folder / "heads.safetensors")
        for name in HEADS:
            own = {k.removeprefix(f"{name}."): v for k, v in heads.items() if k.startswith(f"{name}.")}
            getattr(scorer, name).load_state_dict(own)
        return
    value = load_file(folder / "value.safetensors")
    if written == first_observation.FORMAT:
        value["0.weight"] = first_observation.translated(value["0.weight"])
    scorer.value.load_state_dict(value)


def _language_model(source: Any) -> Any:
    from transformers import AutoModelForCausalLM

    if isinstance(source, torch.nn.Module):
        return source
    loaded: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, output_loading_info=True)
    lm, found = loaded
    wrong = sorted(found["missing_keys"]) + sorted(found["unexpected_keys"])
    if wrong:
        raise WeightsError(f"the weights in {source} do not fit their config.json, beginning with {wrong[0]}")
    return lm


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _check_size(tokenizer: Any, lm: Any, where: object) -> None:
    known = lm.get_input_embeddings().num_embeddings
    if len(tokenizer) > known:
        raise WeightsError(f"the tokenizer in {where} has {len(tokenizer)} token ids, its model knows {known}")


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).strip().split("\n")[0]


def _card_text(model: PlannerModel, card: Card) -> str:
    lm, scale = model.scorer.lm, model.scorer.scale
    total = sum(p.numel() for p in lm.parameters())
    kind = f"LoRA adapter of {model.base or 'a model without a name'}" if model.adapted else "Whole model"
    lines = [
        "---\nlibrary_name: qimeng\nlicense: apache-2.0\ntags: [gpu-kernels, reinforcement-learning]\n---",
        "# A planner for qimeng\n",
        "A causal language model that scores the text of each legal optimization given a program's state as text.\n",
        "| | |\n|---|---|",
        f"| model | {kind}: {lm.config.model_type}, {total:,} parameters, {len(model.reader.tokenizer)} token ids |",
        f"| policy | softmax of joint log-probabilities, normalized by {scale.normalize}, temperature "
        f"{scale.temperature:g} |",
        f"| reads | {model.reader.length} tokens of state, {model.reader.action_length} an action; texts of version "
        f"{TEXTS}, {len(FEATURES)} features |",
        f"| data | {card.data} |",
        f"| device | {card.device} |",
        f"| reward | {card.reward} |",
        *(f"| {name} | {figure} |" for name, figure in card.figures.items()),
        '\n```python\nfrom qimeng import plan_and_code\n\nplan_and_code(spec, planner="lm:THIS_FOLDER")\n```\n',
    ]
    return "\n".join(lines)


__all__ = [
    "FORMAT",
    "HEADS",
    "READ",
    "Card",
    "PlannerModel",
    "add_lora",
    "fingerprint",
    "from_hub",
    "is_planner",
    "load",
    "new_mini",
    "save",
    "with_lora",
]
