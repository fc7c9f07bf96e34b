"""How a computation is called: positional inputs, keywords and defaults.

Deals in signatures. All other modules use positional inputs only. Keywords become positions here, once. The emitted
program maps a user's keywords to the same positions. Knows nothing about values.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from qimeng.errors import SpecError
from qimeng.spec.origin import FunctionModule

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_PLAIN = (bool, int, float, str, type(None), torch.dtype)


@dataclass(frozen=True)
class Call:
    """What a user may write in a call.

    Attributes:
        names: of the positional inputs, in order, ``xs[0]`` for one of ``*xs``; empty where they have none.
        defaults: of those that have one that is a plain value.
        left_out: names of further arguments, not among the inputs, with the plain default that each was left at.
    """

    names: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    left_out: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, thing: Any, count: int) -> Call:
        """The call of a module, its class, a function or what `with_keywords` made, with `count` positional inputs."""
        forward, keywords = getattr(thing, "forward", None), ()
        if isinstance(forward, functools.partial) and forward.func is _by_position:
            thing, keywords, _ = forward.args
            forward = thing.function if isinstance(thing, FunctionModule) else _forward_of(thing)
        else:
            forward = _called(thing)
        try:
            parameters = list(inspect.signature(forward).parameters.values())
        except (TypeError, ValueError):  # built-in functions need not have one
            return cls()
        named = [p.name for p in parameters if p.kind in _BY_POSITION][: count - len(keywords)]
        rest = next((p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL), None)
        if rest is not None:
            named += [f"{rest}[{i}]" for i in range(count - len(keywords) - len(named))]
        names = (*named, *keywords)
        if len(names) != count:
            return cls()
        plain = {p.name: p.default for p in parameters if isinstance(p.default, _PLAIN)}
        return cls(
            names,
            {name: plain[name] for name in names if name in plain},
            {name: value for name, value in plain.items() if name not in names},
        )


def arranged(thing: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """Inputs by position for ``thing(*args, **kwargs)``, and the names of the last ones that go in by keyword only.

    Arguments that come between those given are filled in with their defaults.

    >>> arranged(lambda x, y=1, *, z=2: x, (5,), {"y": 6})
    ((5, 6), ())
    >>> arranged(lambda x, y=1, *, z=2: x, (5,), {"z": 7})
    ((5, 1, 7), ('z',))

    Raises:
        SpecError: they do not fit.
    """
    if not kwargs:
        return tuple(args), ()
    try:
        signature = inspect.signature(_called(thing))
        bound = signature.bind(*args, **kwargs)
    except (TypeError, ValueError) as error:
        name = getattr(_called(thing), "__name__", "") if isinstance(thing, FunctionModule) else type(thing).__name__
        raise SpecError(f"the example inputs do not fit {name}: {error}") from error
    given = set(bound.arguments)
    bound.apply_defaults()
    kinds = {p.name: p.kind for p in signature.parameters.values()}
    kept = {name for name in given if kinds[name] is inspect.Parameter.KEYWORD_ONLY}
    if _hooks_see_keywords(thing):
        kept |= given & set(kwargs)
    by_name = {name: bound.arguments[name] for name in kept}
    by_name = {name: by_name[name] for name in kinds if name in by_name}
    by_name |= next((bound.arguments[n] for n, k in kinds.items() if k is inspect.Parameter.VAR_KEYWORD), {})
    places = [name for name, kind in kinds.items() if kind in _BY_POSITION]
    if _hooks_see_keywords(thing):
        places = places[: len(args)]
    elif not by_name:
        places = places[: 1 + max((i for i, name in enumerate(places) if name in given), default=-1)]
    rest = next((bound.arguments[n] for n, k in kinds.items() if k is inspect.Parameter.VAR_POSITIONAL), ())
    return (*(bound.arguments[name] for name in places), *rest, *by_name.values()), tuple(by_name)


def with_keywords(module: torch.nn.Module, keywords: tuple[str, ...], count: int) -> torch.nn.Module:
    """`module`, its parameters and parts included, called with `count` positions, the last of which are `keywords`.

    It shares everything with `module` except its plain attributes. A call with named arguments goes to the module
    unchanged.
    """
    if not keywords:
        return module
    twin = copy.copy(module)
    twin.forward = functools.partial(_by_position, twin, keywords, count)
    if _hooks_see_keywords(module):
        for name in ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"):
            vars(twin)[name] = copy.copy(vars(module)[name])
        twin.register_forward_pre_hook(functools.partial(_by_name, keywords, count), prepend=True, with_kwargs=True)
    return twin


def _hooks_see_keywords(thing: Any) -> bool:
    """Whether `thing` is a module with hooks that are given keywords beside positions."""
    kinds = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs")
    return any(vars(thing).get(kind) for kind in kinds) if isinstance(thing, torch.nn.Module) else False


def _by_name(keywords: tuple[str, ...], count: int, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Positions and keywords of a call with `count` positions, for the hooks that come next."""
    if kwargs or len(args) != count:
        return None
    split = count - len(keywords)
    return args[:split], dict(zip(keywords, args[split:], strict=True))


def _by_position(module: torch.nn.Module, keywords: tuple[str, ...], count: int, /, *values: Any, **named: Any) -> Any:
    forward = _forward_of(module)
    if named or len(values) != count:
        return forward(*values, **named)
    split = count - len(keywords)
    return forward(*values[:split], **dict(zip(keywords, values[split:], strict=True)))


def _forward_of(module: torch.nn.Module) -> Callable[..., Any]:
    """The forward of the module's class, bound to it."""
    return functools.partial(type(module).forward, module)


def _called(thing: Any) -> Any:
    """The function behind `thing`."""
    if isinstance(thing, FunctionModule):
        return thing.function
    if isinstance(thing, torch.nn.Module):
        return thing.forward
    is_class = isinstance(thing, type) and issubclass(thing, torch.nn.Module)
    return functools.partial(thing.forward, None) if is_class else thing


__all__ = ["Call", "arranged", "with_keywords"]
