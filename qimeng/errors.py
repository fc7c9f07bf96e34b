"""Every error this library raises on purpose.

QimengError
├── SpecError            a computation that cannot be optimized as given
├── IllegalAction        an action that cannot apply to this program (the message carries the numbers)
│   ├── KindFault        a kind of action, often another package's, that fails by itself
│   └── FamilyFault      a family of kernels, often another package's, that fails by itself
├── PlannerFault         a planner that fails by itself, or chooses what is no action
├── CoderError           a coder that could not write a patch
│   └── ChatError        a language model that gave no usable answer (qimeng.coder.llm.chat)
├── BackendError         an unknown language for kernels, or a backend that fails by itself
├── RequestError         a request for an evaluation that cannot be read, or that another evaluator is meant to get
├── ReplayError          a recipe that does not fit the program it is replayed on
├── StoreError           a store that cannot be read or merged
├── DeviceError          an unknown or unusable device
└── WeightsError         weights of a planner that are missing, damaged, or do not fit

What a candidate kernel does wrong is no exception: it is an `Evaluation` that says which gate refused it.
"""

import traceback


class QimengError(Exception):
    """Base of all errors raised by qimeng.

    Attributes:
        code: names the kind of error; it stays the same from version to version. ``docs/troubleshooting.md`` has a
            section on each.
    """

    code = "error"


class SpecError(QimengError):
    """The computation cannot be optimized as given; the message says what to change."""

    code = "spec"


class IllegalAction(QimengError):
    """The action does not apply to this program on this device; the message carries the numbers."""

    code = "action"


class KindFault(IllegalAction):
    """A kind of action fails by itself: it raises, or returns what no kind may return.

    Attributes:
        kind: its name.
    """

    code = "kind"

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


class FamilyFault(IllegalAction):
    """A family of kernels fails by itself: it raises, or returns what no family may return.

    Attributes:
        family: its name.
    """

    code = "family"

    def __init__(self, family: str, message: str):
        super().__init__(message)
        self.family = family


class PlannerFault(QimengError):
    """A planner or search fails by itself: it raises, or chooses what is no action."""

    code = "planner"


class CoderError(QimengError):
    """The coder could not write a patch for the request.

    Attributes:
        failure: class of the failure in an `Evaluation` (`qimeng.interfaces.LASTING` says which ones are final).
    """

    code = "coder"

    failure = "coder"


class RequestError(QimengError):
    """A request for an evaluation cannot be read, is another evaluator's, or was not answered."""

    code = "request"


class BackendError(QimengError):
    """A language for kernels that is unknown, or whose backend, often another package's, fails by itself."""

    code = "backend"


class ReplayError(QimengError):
    """A recipe does not fit the program it is replayed on."""

    code = "replay"


class StoreError(QimengError):
    """A store cannot be opened, read or merged."""

    code = "store"


class DeviceError(QimengError):
    """An unknown device name, or no usable device."""

    code = "device"


class WeightsError(QimengError):
    """A planner's weights are missing, damaged, or do not fit its tokenizer or this version."""

    code = "weights"


def in_words(error: BaseException, limit: int = 1500) -> str:
    """The error in words, with the line of foreign code (outside this library and installed packages) that raised it.

    Args:
        error: any exception.
        limit: most characters; the middle is left out where it would be longer.

    >>> in_words(ValueError("no"))
    'ValueError: no'
    """
    text = f"{type(error).__name__}: {error}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/qimeng/" not in f.filename]
    own = [f for f in frames if "site-packages" not in f.filename and "dist-packages" not in f.filename]
    if own:
        last = own[-1]
        text += f" (line {last.lineno}, in {last.name}: {(last.line or '').strip()[:200]})"
    return text if len(text) <= limit else text[: limit // 2] + " … " + text[-limit // 2 :]


__all__ = [
    "BackendError",
    "CoderError",
    "DeviceError",
    "FamilyFault",
    "IllegalAction",
    "KindFault",
    "PlannerFault",
    "QimengError",
    "ReplayError",
    "RequestError",
    "SpecError",
    "StoreError",
    "WeightsError",
    "in_words",
]
