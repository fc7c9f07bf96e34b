"""Which kinds there are, and which of their actions apply to a program.

Deals in names, entry points and the list of legal actions. Knows nothing about any one kind.
"""

from __future__ import annotations

from qimeng.actions.base import Context, GraphRewrite, Kind, proposed_on
from qimeng.actions.guard import guarded
from qimeng.errors import FamilyFault, IllegalAction, KindFault
from qimeng.family import families, take_faults
from qimeng.interfaces import Action, Coder, Request
from qimeng.plugins import Installed, not_an_object
from qimeng.program.program import Program

GROUP = "qimeng.actions"
"""Entry-point group through which other packages add kinds."""

_KINDS: dict[str, Kind] = {}


def register(kind: Kind) -> Kind:
    """Add a kind to the vocabulary.

    Raises:
        ValueError: it is no object of `Kind`, a kind of that name is registered already, the name is not an identifier,
            the options are no tuple of texts, or the family is unknown.
    """
    if text := not_an_object(kind, "kind of action", Kind):
        raise ValueError(text)
    name, options, nest = getattr(kind, "name", None), kind.options, getattr(kind, "family", None)
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"a kind's name must be an identifier, {type(kind).__qualname__} has {name!r}")
    if not isinstance(options, tuple) or not options or not all(isinstance(o, str) for o in options):
        raise ValueError(f"the kind {name!r} has options {options!r}; they must be a tuple of texts, ('',) for none")
    if nest is not None and nest not in families():
        raise ValueError(
            f"the kind {name!r} is for the family {nest!r}; known: {', '.join(families())}, or None for every one"
        )
    if kind.name in _KINDS:
        raise ValueError(f"a kind called {kind.name!r} is registered already ({type(_KINDS[kind.name]).__module__})")
    _KINDS[kind.name] = guarded(kind)
    return kind


def unregister(name: str) -> None:
    """Take a kind out of the vocabulary again (for tests and notebooks)."""
    _KINDS.pop(name, None)


def kinds() -> dict[str, Kind]:
    """Every registered kind by name; kinds of installed packages (entry points) are loaded at the first call.

    Raises:
        QimengError: an installed package's kind cannot be loaded or registered; the message names the package.
    """
    _installed.take()
    return dict(_KINDS)


def kind_named(name: str) -> Kind:
    """The kind called `name`.

    Raises:
        IllegalAction: there is none; the message lists the names.
    """
    try:
        return kinds()[name]
    except KeyError:
        raise IllegalAction(f"unknown kind of action {name!r}; known: {', '.join(sorted(kinds()))}") from None


def check_action(program: Program, action: Action, context: Context) -> None:
    """Raise `IllegalAction`, with the numbers, where `action` does not apply to `program`."""
    kind_named(action.kind).check(program, action, context)


def legal_actions(program: Program, context: Context, faults: dict[str, str] | None = None) -> tuple[Action, ...]:
    """Every action that applies, `stop` included; what is offered here can be coded.

    Args:
        program: what they apply to.
        context: device, coder and mode.
        faults: where given, the message of each kind or family that fails by itself is put in; the first action that
            shows it is offered, so that a step tells it.
    """
    found: dict[Action, None] = {}
    known = _Known(program, context)
    for kind in kinds().values():
        if (kept := known.of_kind(kind)) is not None:
            found |= dict.fromkeys(kept)
            continue
        try:
            proposed = tuple(kind.proposals(program, context))
        except KindFault as fault:
            if faults is not None:
                faults[kind.name] = str(fault)
            continue
        for action in proposed:
            try:
                if not known.applies(kind, action):
                    continue
            except KindFault as fault:
                if faults is not None:
                    faults[kind.name] = str(fault)
                    found[action] = None
                break
            except FamilyFault as fault:
                if faults is not None and fault.family not in faults:
                    faults[fault.family] = str(fault)
                    found[action] = None
                continue
            found[action] = None
    if faults is not None:
        faults |= take_faults()
    return tuple(found)


class _Known:
    """Whether actions apply to a program; answers of local kinds (`Kind.local`) are found again at later steps."""

    def __init__(self, program: Program, context: Context):
        self._program, self._context = program, context
        made = program.implementations
        numbers: dict[object, int] = program.graph.memo.setdefault("written regions", {})
        each = {r.id: (r.signature, made.get(r.signature)) for r in program.called}
        self._keys = {name: numbers.setdefault(key, len(numbers)) for name, key in each.items()}
        asked = (context, *families().values())
        self._local = {name: is_local(kind) for name, kind in kinds().items()}
        self._kept: dict[object, bool] = program.graph.memo.setdefault("legal", {}).setdefault(asked, {})
        self._whole: dict[object, tuple[Action, ...]] = program.graph.memo.setdefault("legal kinds", {}).setdefault(
            asked, {}
        )

    def of_kind(self, kind: Kind) -> list[Action] | None:
        """The actions of a local kind that proposes what kinds propose by default; None where it has to be asked."""
        if not self._local[kind.name] or type(kind).proposals is not Kind.proposals:
            return None
        found: list[Action] = []
        for region in proposed_on(kind, self._program):
            key = kind, region.id, self._keys.get(region.id)
            kept = self._whole.get(key)
            if kept is None:
                named = (Action(kind.name, (region.id,), option) for option in kind.options)
                try:
                    kept = tuple(a for a in named if self.applies(kind, a))
                except (KindFault, FamilyFault):
                    return None  # which is told where it is asked
                if region.id in self._keys:
                    self._whole[key] = kept
            found += kept
        return found

    def applies(self, kind: Kind, action: Action) -> bool:
        """Whether `action` applies.

        Raises:
            KindFault, FamilyFault: the kind or a family fails by itself.
        """
        key = None
        if len(action.regions) == 1 and self._local[kind.name] and action.regions[0] in self._keys:
            key = kind, action.param, self._keys[action.regions[0]]
            if key in self._kept:
                return self._kept[key]
        try:
            kind.check(self._program, action, self._context)
            found = True
        except (KindFault, FamilyFault):
            raise
        except IllegalAction:
            found = False
        if key is not None:
            self._kept[key] = found
        return found


def is_local(kind: Kind) -> bool:
    """Whether the class that defines the kind's `check` says that it is local."""
    return bool(vars(next(c for c in type(kind).__mro__ if "check" in vars(c))).get("local", False))


def rewritten(request: Request, coder: Coder) -> GraphRewrite:
    """What the action of `request` makes of its program, but for the kernels.

    Args:
        request: with the program and the action.
        coder: who would write a kernel.

    Raises:
        IllegalAction: the action does not apply.
    """
    kind, context = kind_named(request.action.kind), Context(request.device, coder, request.mode)
    kind.check(request.program, request.action, context)
    return kind.apply(request.program, request.action, context)


_installed = Installed(GROUP, "kind of action", lambda found: register(found() if isinstance(found, type) else found))


__all__ = [
    "GROUP",
    "check_action",
    "is_local",
    "kind_named",
    "kinds",
    "legal_actions",
    "register",
    "rewritten",
    "unregister",
]
