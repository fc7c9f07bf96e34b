"""The calling interface of an emitted program: positions and keywords, no gradients, parameters of any name.

Deals in lines of source text at the edge of the class `Model`. Knows nothing about regions or kernels.
"""

from __future__ import annotations

from qimeng.graph.opgraph import OpGraph
from qimeng.graph.region import literal
from qimeng.spec.call import Call

GRADIENTS = '''
def _check_gradients(tensors):
    """Refuse what autograd would take for a constant: nothing in this file computes gradients."""
    ad = torch.autograd.forward_ad
    moving = ad._current_level >= 0 and any(ad.unpack_dual(t).tangent is not None for t in tensors)
    if moving or any(t.requires_grad for t in tensors):
        raise RuntimeError(
            "this program computes no gradients: call it under torch.no_grad(), or with inputs and parameters that "
            "require none (x.detach(), model.requires_grad_(False)); to train, call the module it was made from"
        )

'''

BY_POSITION = '''
def _by_position(args, kwargs):
    """Inputs by position, from a call with keywords or with defaults left out."""
    names = (*_NAMES, *_LEFT_OUT)
    if len(args) > len(names):
        raise ValueError(f"made for {len(_NAMES)} inputs, got {len(args)}")
    given = dict(zip(names, args))
    for name, value in kwargs.items():
        if name not in names or name in given:
            raise ValueError(f"input {name}: {'given twice' if name in given else 'made for no input of that name'}")
        given[name] = value
    for name, value in _LEFT_OUT.items():
        if type(given.get(name, value)) is not type(value) or given.get(name, value) != value:
            got = "a tensor" if isinstance(given[name], torch.Tensor) else repr(given[name])
            raise ValueError(f"input {name}: made for {value!r}, got {got}")
    missing = [name for name in _NAMES if name not in given and name not in _DEFAULTS]
    if missing:
        raise ValueError(f"made for {len(_NAMES)} inputs, got no {', '.join(missing)}")
    return tuple([given[name] if name in given else _DEFAULTS[name] for name in _NAMES])

'''

OUTPUT_CLASS = '''
_CLASSES = {}


def _output_class(home, name, fields, kind):
    """The class of an output or input; where it cannot be imported, one of the same name and fields."""
    if (home, name) not in _CLASSES:
        import collections
        import dataclasses
        import importlib

        try:
            found = importlib.import_module(home)
            for part in name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError, OSError):  # the last where a sandbox does not let it read the file
            last = name.split(".")[-1]
            if kind == "named":
                found = collections.namedtuple(last, fields)
            elif kind == "object":
                found = type(last, (), {})
            else:
                found = dataclasses.make_dataclass(last, [(field, object, None) for field in fields])
            found.__module__, found.__qualname__ = home, name
        _CLASSES[home, name] = found
    return _CLASSES[home, name]

'''

OUTPUT_OBJECT = '''
def _output_object(found, state):
    """An object of the class with these attributes."""
    made = found.__new__(found)
    made.__dict__.update(state)
    return made

'''

INPUT_CLASS = '''
def _input_class(*facts):
    """The same, seen into by PyTorch."""
    found = _output_class(*facts)
    if facts[-1] == "record" and found not in torch.utils._pytree.SUPPORTED_NODES:
        torch.utils._pytree.register_dataclass(found)
    return found


def _same_structure(a, b):
    """Whether inputs are put together alike; of classes the names and fields count."""
    if a == b:
        return True
    kinds = [getattr(t.context if isinstance(t.context, type) else t.type, "__qualname__", "") for t in (a, b)]
    fields = [getattr(t.context, "_fields", t.context if not isinstance(t.context, type) else None) for t in (a, b)]
    parts = a.children(), b.children()
    return kinds[0] == kinds[1] and fields[0] == fields[1] and len(parts[0]) == len(parts[1]) > 0 and all(
        map(_same_structure, *parts)
    )

'''


def face_runtime(graph: OpGraph) -> str:
    """The functions that the lines of this room call."""
    given = any(graph.in_spec.classes())
    own = OUTPUT_CLASS if given or any(graph.out_spec.classes()) else ""
    own += OUTPUT_OBJECT if any(c.kind == "object" for c in graph.out_spec.classes()) else ""
    return GRADIENTS + (BY_POSITION if graph.call.names else "") + own + (INPUT_CLASS if given else "")


def call_constants(call: Call) -> list[str]:
    """Constants that hold names and defaults of the inputs."""
    if not call.names:
        return []

    def table(values: dict[str, object]) -> str:
        return "{" + ", ".join(f"{name!r}: {literal(value)}" for name, value in values.items()) + "}"

    return [
        "",
        f"_NAMES = {call.names!r}",
        f"_DEFAULTS = {table(dict(call.defaults))}",
        f"_LEFT_OUT = {table(dict(call.left_out))}",
        "",
    ]


def arrange(call: Call) -> list[str]:
    """Lines that turn keywords into positions."""
    if not call.names:
        return ["if kwargs:", "    raise ValueError(f\"made for inputs by position, got {', '.join(kwargs)}\")"]
    return [f"if kwargs or len(args) != {len(call.names)}:", "    args = _by_position(args, kwargs)"]


def refuse_gradients(graph: OpGraph) -> list[str]:
    """Lines that refuse a call that may need gradients."""
    tensors = [f"a{n.target}" for n in graph.nodes.values() if n.kind == "input"]
    if any(n.kind in ("parameter", "buffer") for n in graph.nodes.values()):
        tensors.append("*state.values()")
    if not tensors:
        return []
    return [
        "if torch.is_grad_enabled() or torch.autograd.forward_ad._current_level >= 0:",
        f"    _check_gradients(({', '.join(tensors)},))",
    ]


__all__ = ["arrange", "call_constants", "face_runtime", "refuse_gradients"]
