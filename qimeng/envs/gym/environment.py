"""The Gymnasium environment: choosing optimizations as a decision problem.

Deals in Gymnasium's interface. `qimeng.envs.steps.session` runs the steps, `qimeng.envs.gym.reward` defines the reward,
`qimeng.envs.gym.observation` the observation.
"""

from __future__ import annotations

import copy
import json
import math
import operator
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, SupportsInt

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.utils import seeding

from qimeng.envs import register_environment
from qimeng.envs.gym.observation import TEXTS, action_texts, feature_bounds, features, render_text
from qimeng.envs.gym.reward import MilestoneReward, Reward, Transition
from qimeng.envs.steps.session import Session
from qimeng.envs.steps.state import Budget
from qimeng.envs.steps.task import Task
from qimeng.envs.steps.time_shares import MAX_ACTIONS
from qimeng.interfaces import Evaluation, Observation, Step, Ticket
from qimeng.store import Store

TEXT_LENGTH = 8192
"""Most characters of the observation's text; a longer one is cut."""

CHARSET = string.ascii_letters + string.digits + string.punctuation + " \n"


class KernelOptimizationEnv(gymnasium.Env[dict[str, Any], Any]):
    """Optimize a PyTorch program for a GPU, one macro action at a time.

    ## Description
    An episode starts from a program that is right (the computation on PyTorch) and improves it step by step. An action
    is an intent, such as "fuse these regions" or "retile that one, taller"; the task's coder writes it, the task's
    evaluator checks it against the reference and times it. A right patch advances the state, even where it is slower; a
    wrong one is repaired or rolled back, and its action masked.

    ## Action Space
    `Discrete(256)`: an index into the printed list `actions_text()`. Index 0 is always ``stop``; the others are the
    legal actions, those that touch most of the GPU's time first. `action_masks()` says which indices name one. An index
    that names none is a step that changes nothing and is paid like a refused one.

    ## Observation Space
    A `Dict` of

    | key | space | contents |
    |---|---|---|
    | text | `Text(8192)`, ASCII | device, times in ms, regions by time, last 4 steps (`observation.render_text`) |
    | features | `Box`, float32 | see the table `qimeng.envs.gym.observation.FEATURES` |

    | Num | Feature | Min | Max | Unit |
    |---|---|---|---|---|
    | 0 | speedup | -8 | 8 | log2 of eager's device time over the present program's |
    | 1 | best speedup | -8 | 8 | log2 of eager's device time over the best program's |
    | 2 | headroom | -8 | 16 | log2 of the present time over the regions' roofline bounds |
    | 3 | time | 0 | 32 | log2 of 1 + device nanoseconds |
    | 4 | regions | 0 | 16 | log2 of 1 + number |
    | 5 | generated regions | 0 | 1 | fraction of the regions |
    | 6 | generated time | 0 | 1 | fraction of the device time |
    | 7 | steps left | 0 | 16 | log2 of 1 + steps |
    | 8 | judged | 0 | 16 | log2 of 1 + steps so far that were judged |
    | 9 | refusals | 0 | 1 | refused steps in a row, over 8 |
    | 10, 11 | mode high, highest | 0 | 1 | 1 in that mode |
    | 12 | bandwidth | 0 | 16 | log2 of GB/s |
    | 13 | half rate | 0 | 16 | log2 of TFLOP/s |
    | 14 | multiprocessors | 0 | 16 | log2 of their number |
    | 15 + 38 i | region i: share of the time | 0 | 1 | fraction |
    | 16 + 38 i | region i: roofline bound over time | 0 | 1 | fraction |
    | 17 + 38 i | region i: intensity | -16 | 16 | log2 of FLOP a byte |
    | 18 + 38 i | region i: operators | 0 | 16 | log2 of 1 + number |
    | 19 + 38 i | region i: generated | 0 | 1 | 1 for a generated kernel |
    | 20 + 38 i | region i: present | 0 | 1 | 1 where there is such a region |
    | 21 + 38 i … 36 + 38 i | region i: word of its family | -1 | 1 | hash (`qimeng.envs.gym.words`) |
    | 37 + 38 i … 52 + 38 i | region i: its operators | -1 | 1 | mean of their hashes |

    with i from 0 to 7, the region that takes most time first. A family or an operator that a package adds changes
    neither space: it has a word in the text, and that word's hash in the vector. ``metadata["texts"]`` is the version
    of the texts; a policy stores the version that it learnt to read.

    ## Rewards
    An object of `qimeng.envs.gym.reward`, whose docstring is its formula; `MilestoneReward` by default.

    ## Starting State
    The computation on PyTorch, every operator a region of its own, judged once. With several tasks one is drawn at
    each reset (``options={"task": 2}`` picks one).

    ## Episode End
    Terminated by ``stop``. Truncated after `max_steps` steps, those of no effect included.

    ## Arguments
    ```python
    import gymnasium
    from qimeng.envs.steps.setup import make_task

    env = gymnasium.make("qimeng.envs.gym.environment:qimeng/KernelOptimization-v1", tasks=make_task("problem.py"))
    ```
    `tasks`: a `Task` or several; `reward`: a `Reward`; `max_steps`: longest episode; `repairs`: times that a refused
    patch is repaired; `store`: where every attempt is recorded; `render_mode`: ``"ansi"`` or None.

    Each episode judges anew what no store knows: give `make_task` a store, so that a program is judged once. With a
    replaying evaluator (`qimeng.envs.steps.caching`) it is deterministic. `fork()` gives an equal, independent
    copy; `state` is one line of JSON that holds the recipe of the present program.

    ## References
    QiMeng-Kernel: Macro-Thinking Micro-Coding paradigm for LLM-based high-performance GPU kernel generation,
    https://arxiv.org/abs/2511.20100

    ## Version History
    - v1: hashes of words in place of four known families, so that families and operators may be added. A planner that
      was trained on v0 is read as it was (`qimeng.planner.lm.first_observation`); own code on v0's 87 features
      has to be changed: v0 is gone, and Gymnasium says so.
    - v0: initial version
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 1, "texts": TEXTS}

    def __init__(
        self,
        tasks: Task | Sequence[Task],
        reward: Reward | None = None,
        max_steps: int = 32,
        repairs: int = 1,
        store: Store | None = None,
        render_mode: str | None = None,
    ):
        some = (tasks,) if isinstance(tasks, Task) else tuple(tasks) if isinstance(tasks, Iterable) else None
        if some is None or not all(isinstance(task, Task) for task in some):
            raise ValueError(f"tasks are made by qimeng.envs.steps.setup.make_task, got {tasks!r}")
        if not some:
            raise ValueError("the environment needs at least one task")
        self.tasks: tuple[Task, ...] = some
        if not (isinstance(reward, Reward) or reward is None):
            raise ValueError(f"a reward is made by qimeng.envs.gym.reward.make_reward, got {reward!r}")
        if max_steps < 1 or repairs < 0:
            raise ValueError(f"max_steps is at least 1, repairs at least 0; got {max_steps} and {repairs}")
        self.reward = reward or MilestoneReward()
        self.store, self.render_mode, self.max_steps = store, render_mode, max_steps
        self.ahead: dict[str, Ticket] = {}  # start programs that `prepare` submitted, by the digest of the request
        self._budget = Budget(seconds=math.inf, evaluations=1 << 30, steps=1 << 30, repairs=repairs)
        self._session = Session(self.tasks[0], self._budget, store)
        self._steps, self._cut = 0, 0
        self._seen: Observation | None = None
        low, high = feature_bounds()
        self.observation_space = spaces.Dict(
            {
                "text": spaces.Text(TEXT_LENGTH, min_length=0, charset=CHARSET),
                "features": spaces.Box(low, high, dtype=np.float32),
            }
        )
        self.action_space = spaces.Discrete(MAX_ACTIONS)

    # ---- Gymnasium's interface
    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin an episode; ``options={"task": number}`` picks the task.

        Raises:
            ValueError: there is no task of that number, or an option has another name.
        """
        super().reset(seed=seed)
        task = self.tasks[self._picked(options or {})]
        self._session = Session(task, self._budget, self.store)
        asked = task.request(task.start).digest
        if asked in self.ahead:
            self._session.ledger.submitted[asked] = self.ahead.pop(asked)
        self._session.begin()
        self._steps = 0
        self.reward.reset()
        self._look()
        return self._observation(), self._info()

    def prepare(self, seed: int | None = None) -> None:
        """Submit the start program that the next `reset` draws, where the judge works on several requests at a time.

        Args:
            seed: of that reset.
        """
        generator = copy.deepcopy(self.np_random) if seed is None else seeding.np_random(seed)[0]
        task = self.tasks[self._drawn(generator)]
        asked = task.request(task.start)
        if task.evaluator.at_once < 2 or asked.digest in self.ahead:
            return
        ticket = task.submit(asked)
        if ticket is not None:
            self.ahead[asked.digest] = ticket

    def step(self, action: SupportsInt) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Carry out the action with this index; one that names none changes nothing.

        Raises:
            gymnasium.error.ResetNeeded: the episode is over or has not begun.
        """
        if self._seen is None or self._session.state.done or self._steps >= self.max_steps:
            raise gymnasium.error.ResetNeeded("call reset before step")
        index, session, taken = int(action), self._session, None
        before, best_before = session.state.evaluation, self._best
        if 0 <= index < len(self._seen.actions):
            taken = session.step(self._seen.actions[index])
        self._steps += 1
        after = session.state.evaluation
        reward = self.reward.update(Transition(taken, self._steps, before, after, best_before, self._best))
        self._look()
        truncated = self._steps >= self.max_steps and not session.state.done
        return self._observation(), reward, session.state.done, truncated, self._info(taken, index)

    def render(self) -> str | None:
        """The state and the actions as text, in render mode ``"ansi"``."""
        if self.render_mode != "ansi" or self._seen is None:
            return None
        listed = (f"{i}: {text}" for i, text in enumerate(self.actions_text()))
        return "\n".join((render_text(self._seen), "actions:", *listed))

    # ---- what masks, searches and replays need
    def action_masks(self) -> np.ndarray:
        """Which indices name an action: bool, one for each index."""
        mask = np.zeros(MAX_ACTIONS, dtype=bool)
        mask[: len(self._seen.actions) if self._seen else 0] = True
        return mask

    def actions_text(self) -> tuple[str, ...]:
        """The printed list: the text of each legal action, by index."""
        return action_texts(self._seen) if self._seen else ()

    @property
    def observed(self) -> Observation:
        """What a `Planner` sees in this state.

        Raises:
            gymnasium.error.ResetNeeded: no episode has begun.
        """
        if self._seen is None:
            raise gymnasium.error.ResetNeeded("call reset first")
        return self._seen

    @property
    def session(self) -> Session:
        """The optimization under way."""
        return self._session

    @property
    def state(self) -> str:
        """One line of JSON: specification, recipe of the present program, steps taken and their outcomes."""
        state = self._session.state
        taken = [{"action": asdict(s.action), "accepted": s.accepted} for s in state.history]
        spec = self._session.task.conditions.spec
        recipe = json.loads(state.recipe().to_json())
        for step in recipe["steps"]:
            del step["ms"]  # equal states may have been timed apart
        return json.dumps({"spec": spec, "recipe": recipe, "taken": taken, "steps": self._steps}, sort_keys=True)

    def fork(self) -> KernelOptimizationEnv:
        """An equal copy that goes its own way; tasks, evaluators and the store are shared."""
        twin = copy.copy(self)
        twin._session, twin.ahead = self._session.clone(), {}  # a ticket is answered once
        twin.reward = copy.deepcopy(self.reward)
        twin._np_random = copy.deepcopy(self._np_random)
        twin.action_space = copy.deepcopy(self.action_space)
        twin.observation_space = copy.deepcopy(self.observation_space)
        return twin

    # ---- parts
    def _picked(self, options: Mapping[str, Any]) -> int:
        """Number of the task that `options` names, else of one that is drawn."""
        if unknown := sorted(set(options) - {"task"}):
            raise ValueError(f"unknown option {unknown[0]!r}; the only one is 'task', the number of a task")
        number = options.get("task")
        if number is None:
            return self._drawn(self.np_random)
        try:
            index = operator.index(number)
        except TypeError:
            raise ValueError(f"a task is named by its number, got {number!r}") from None
        if not 0 <= index < len(self.tasks):
            raise ValueError(f"no task {index}; there are {len(self.tasks)}")
        return index

    def _drawn(self, generator: np.random.Generator) -> int:
        """Number of a task."""
        return int(generator.integers(len(self.tasks)))

    def _look(self) -> None:
        self._seen = self._session.observe(self.max_steps - self._steps)
        self._cut = self._session.cut

    def _observation(self) -> dict[str, Any]:
        assert self._seen is not None
        return {"text": render_text(self._seen)[:TEXT_LENGTH], "features": features(self._seen)}

    @property
    def _best(self) -> Evaluation | None:
        best = self._session.ledger.best
        return best.evaluation if best else None

    def _info(self, taken: Step | None = None, index: int = 0) -> dict[str, Any]:
        assert self._seen is not None
        return {
            "name": self._session.task.name,
            "actions": len(self._seen.actions),
            "cut": self._cut,
            "accepted": taken.accepted if taken is not None else False,
            "no_action": taken is None and self._steps > 0,
            "best_speedup": (self._best.speedup if self._best else None) or 0.0,
            "evaluations": self._session.ledger.evaluations,
        }


register_environment()


__all__ = ["KernelOptimizationEnv"]
