"""KernelBench's class `ModelNew` as a function of inputs and parameters, without running any of it.

A kernel's text keeps nothing between calls, so a module's state has to come in as arguments:

- what `__init__` makes as `nn.Parameter`, as a buffer or as a layer of `torch.nn` is replaced by the reference's own
  tensors of the same names, as KernelBench has it when both draw their weights from one seed;
- a layer that is called becomes a small class that calls its function (`LAYERS`), with the settings of the reference's
  layer of that name;
- other attributes of `__init__` stay, computed from the values of `get_init_inputs`;
- `forward` and all other methods stay as they are.

Deals in syntax trees. Knows nothing about regions or judges.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from qimeng.envs.screening.text_scopes import bindings

_CONVOLUTION = (
    "torch.nn.functional.conv{}d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)"
)
_TRANSPOSED = (
    "torch.nn.functional.conv_transpose{}d(x, self.weight, self.bias, self.stride, self.padding, self.output_padding, "
    "self.groups, self.dilation)"
)
LAYERS: dict[str, str] = {
    "Linear": "torch.nn.functional.linear(x, self.weight, self.bias)",
    "LayerNorm": "torch.nn.functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)",
    "GroupNorm": "torch.nn.functional.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)",
    "RMSNorm": "torch.nn.functional.rms_norm(x, self.normalized_shape, self.weight, self.eps)",
    "Embedding": "torch.nn.functional.embedding(x, self.weight, self.padding_idx)",
    "Softmax": "torch.nn.functional.softmax(x, self.dim)",
    "LogSoftmax": "torch.nn.functional.log_softmax(x, self.dim)",
    "LeakyReLU": "torch.nn.functional.leaky_relu(x, self.negative_slope)",
    "ELU": "torch.nn.functional.elu(x, self.alpha)",
    "GELU": "torch.nn.functional.gelu(x, approximate=self.approximate)",
    "Hardtanh": "torch.nn.functional.hardtanh(x, self.min_val, self.max_val)",
    "Softplus": "torch.nn.functional.softplus(x, self.beta, self.threshold)",
    "Identity": "x",
    "ReLU": "torch.relu(x)",
    "Sigmoid": "torch.sigmoid(x)",
    "Tanh": "torch.tanh(x)",
    "SiLU": "torch.nn.functional.silu(x)",
    "Mish": "torch.nn.functional.mish(x)",
    "ReLU6": "torch.nn.functional.relu6(x)",
    "Hardswish": "torch.nn.functional.hardswish(x)",
    "Hardsigmoid": "torch.nn.functional.hardsigmoid(x)",
    "Softsign": "torch.nn.functional.softsign(x)",
    "SELU": "torch.nn.functional.selu(x)",
    **{f"Conv{n}d": _CONVOLUTION.format(n) for n in (1, 2, 3)},
    **{f"ConvTranspose{n}d": _TRANSPOSED.format(n) for n in (1, 2, 3)},
    **{
        f"MaxPool{n}d": f"torch.nn.functional.max_pool{n}d(x, self.kernel_size, self.stride, self.padding, "
        "self.dilation, self.ceil_mode)"
        for n in (1, 2, 3)
    },
    **{
        f"AvgPool{n}d": f"torch.nn.functional.avg_pool{n}d(x, self.kernel_size, self.stride, self.padding, "
        "self.ceil_mode, self.count_include_pad)"
        for n in (1, 2, 3)
    },
    **{f"AdaptiveAvgPool{n}d": f"torch.nn.functional.adaptive_avg_pool{n}d(x, self.output_size)" for n in (1, 2, 3)},
}
"""Class of `torch.nn` to what a call of it computes from ``x``. Those with state that a call changes are not here."""


class Untranslated(Exception):
    """A class that cannot become a function; the message says what to write instead."""


@dataclass(frozen=True)
class Original:
    """The reference's module, as far as its place is taken.

    Attributes:
        module: itself; its values are not looked at.
        arguments: positional arguments of its constructor.
        keywords: keyword arguments of its constructor.
        state: key of each parameter and buffer that the computation uses to its name as an argument of `entry`.
        inputs: what `forward` is called with, in order: arguments of `entry`, and constants.
        single: whether it returns one tensor, and not a list or tuple of some.
    """

    module: torch.nn.Module
    arguments: Sequence[Any]
    keywords: Mapping[str, Any]
    state: Mapping[str, str]
    inputs: Sequence[str]
    single: bool


def as_function(text: str, name: str, entry: str, arguments: Sequence[str], original: Original) -> str:
    """The text with the class `name` as a plain class, and a function that makes and calls it.

    Args:
        text: Python.
        name: of the class.
        entry: of the function.
        arguments: of the function.
        original: what the class stands in for.

    Raises:
        Untranslated: the class does what a function of its inputs and parameters cannot.
        SyntaxError: `text` is no Python.
    """
    tree = ast.parse(text)
    found = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    if not found:
        raise Untranslated(f"there is no class {name}")
    if any(isinstance(node, ast.FunctionDef) and node.name == entry for node in tree.body):
        raise Untranslated(f"the text has both a class {name} and a function `{entry}`; send one of them")
    model = _Model(found[-1], tree, original)
    lines = text.split("\n")
    for node in reversed(found):
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
        del lines[first : node.end_lineno]
    parts, made = model.parts()
    made += [original.state[key] for key in model.own]
    call = f"{name}({', '.join(made)}).forward({', '.join(original.inputs)})"
    function = [f"def {entry}({', '.join(arguments)}):", f"    found = {call}"]
    function.append("    return (found,)" if original.single else "    return tuple(found)")
    return "\n\n\n".join(["\n".join(lines).rstrip(), *parts, model.text(), "\n".join(function)]) + "\n"


class _Model:
    """The class: what its constructor makes, and what its methods read."""

    def __init__(self, node: ast.ClassDef, tree: ast.Module, original: Original):
        self._node, self._original = node, original
        self._names = {"torch": "torch", "nn": "torch.nn"}
        for statement in ast.walk(tree):
            if isinstance(statement, ast.Import | ast.ImportFrom):
                self._names.update(bindings(statement))
        self._modules = {n.name for n in tree.body if isinstance(n, ast.ClassDef) and n.bases}
        methods = [n for n in node.body if isinstance(n, ast.FunctionDef)]
        self._init = next((m for m in methods if m.name == "__init__"), None)
        self._methods = [m for m in methods if m.name != "__init__"]
        if not any(m.name == "forward" for m in self._methods):
            raise Untranslated(f"{node.name} has no method forward")
        self.layers: dict[str, str] = {}
        self._state: set[str] = set()
        body = self._init.body if self._init else []
        kept = self._without_state(body)
        read = {n.attr for m in self._methods for n in ast.walk(m) if _is_own(n, ast.Load)}
        self._body = _needed(kept, read)
        read |= {n.attr for s in self._body for n in ast.walk(s) if _is_own(n, ast.Load)}
        self.own = [attribute for attribute in sorted(self._state) if attribute in read]
        self.layers = {attribute: kind for attribute, kind in self.layers.items() if attribute in read}
        self._reads_training = "training" in read
        for key in self.own:
            self._known(key)

    def parts(self) -> tuple[list[str], list[str]]:
        """A class for each layer, and how each is made from arguments of the function."""
        classes, made = [], []
        for attribute, kind in self.layers.items():
            layer = self._layer(attribute, kind)
            tensors = {**layer._parameters, **layer._buffers}
            there = [n for n, t in tensors.items() if t is not None and f"{attribute}.{n}" in self._original.state]
            unused = [n for n, t in tensors.items() if t is not None and n not in there]
            if unused:
                raise Untranslated(f"the reference does not use {attribute}.{unused[0]}, so it is not there to be read")
            plain = {n: _literal(v) for n, v in vars(layer).items() if n[:1] != "_" and _is_plain(v)}
            plain |= {n: None for n, t in tensors.items() if t is None}
            lines = [f"class Layer_{attribute}:", f"    def __init__(self{''.join(f', {n}' for n in there)}):"]
            lines += [f"        self.{n} = {n}" for n in there]
            lines += [f"        self.{n} = {v!r}" for n, v in plain.items()] or ["        pass"]
            if kind in LAYERS and getattr(layer, "padding_mode", "zeros") == "zeros":
                lines += ["", "    def __call__(self, x):", f"        return {LAYERS[kind]}"]
            elif self._calls(attribute):
                raise Untranslated(
                    f"self.{attribute}(…) is a call of nn.{kind}; call a function of its tensors instead"
                )
            classes.append("\n".join(lines))
            made.append(f"Layer_{attribute}({', '.join(self._original.state[f'{attribute}.{n}'] for n in there)})")
        return classes, made

    def text(self) -> str:
        """The plain class."""
        taken = [*self.layers, *self.own]
        init = [f"    def __init__(self{''.join(f', {n}' for n in taken)}):"]
        init += [f"        self.{n} = {n}" for n in taken]
        if self._reads_training:
            init.append(f"        self.training = {self._original.module.training}")
        init += [f"        {line}" for line in self._arguments()]
        init += [f"        {line}" for s in self._body for line in ast.unparse(s).split("\n")]
        constants = [
            f"    {line}"
            for s in self._node.body
            if isinstance(s, ast.Assign | ast.AnnAssign)
            for line in ast.unparse(s).split("\n")
        ]
        methods = [[f"    {line}" for line in ast.unparse(m).split("\n")] for m in self._methods]
        blocks = [constants, [*init, "        pass"] if len(init) == 1 else init, *methods]
        return f"class {self._node.name}:\n" + "\n\n".join("\n".join(block) for block in blocks if block)

    # -- parts

    def _without_state(self, body: Sequence[ast.stmt]) -> list[ast.stmt]:
        """Statements of the constructor without those that make parameters, buffers and layers, which are noted."""
        kept: list[ast.stmt] = []
        for statement in body:
            if isinstance(statement, ast.Expr):
                self._note_call(statement.value)
                continue
            if isinstance(statement, ast.Assign | ast.AnnAssign) and self._note_made(statement):
                continue
            if isinstance(statement, ast.If | ast.For | ast.While | ast.With):
                for block in ("body", "orelse"):
                    if getattr(statement, block, None):
                        inner = self._without_state(getattr(statement, block))
                        setattr(statement, block, inner or ([ast.Pass()] if block == "body" else []))
            kept.append(statement)
        return kept

    def _note_call(self, node: ast.expr) -> None:
        """Note a buffer or parameter that is registered; other calls, such as of `nn.init`, do nothing for a result."""
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
            return
        if node.func.attr in ("register_buffer", "register_parameter") and isinstance(node.args[0], ast.Constant):
            self._state.add(str(node.args[0].value))

    def _note_made(self, node: ast.Assign | ast.AnnAssign) -> bool:
        """Whether an assignment makes a parameter or a layer, which is noted."""
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        own = [t.attr for t in targets if isinstance(t, ast.Attribute) and _is_own(t, ast.Store)]
        if not own or not isinstance(node.value, ast.Call):
            return False
        dotted = self._dotted(node.value.func)
        home, _, last = dotted.rpartition(".")
        if dotted in self._modules:
            raise Untranslated(f"self.{own[0]} is a module of your own ({dotted}); write it into {self._node.name}")
        if last in ("Parameter", "Buffer") and home.startswith("torch.nn"):
            self._state.update(own)
        elif home.startswith("torch.nn") and last[:1].isupper():
            self.layers.update(dict.fromkeys(own, last))
        else:
            return False
        return True

    def _layer(self, attribute: str, kind: str) -> torch.nn.Module:
        found = self._original.module._modules.get(attribute)
        if found is None or type(found).__name__ != kind:
            has = "none" if found is None else f"an nn.{type(found).__name__}"
            raise Untranslated(f"self.{attribute} is an nn.{kind}, and the reference has {has} of that name")
        if found._modules:
            raise Untranslated(f"self.{attribute} is an nn.{kind}; write what it computes into {self._node.name}")
        return found

    def _known(self, key: str) -> None:
        if key not in self._original.state:
            names = ", ".join(self._original.state) or "none"
            raise Untranslated(
                f"self.{key} is no parameter or buffer that the reference computes from; it has: {names}"
            )

    def _arguments(self) -> list[str]:
        """Lines that give the constructor's arguments their values, as far as they are read."""
        if self._init is None:
            return []
        read = {
            n.id for s in self._body for n in ast.walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)
        }
        spec = self._init.args
        names = [a.arg for a in (*spec.posonlyargs, *spec.args)][1:]
        texts = dict(zip(reversed(names), map(ast.unparse, reversed(spec.defaults)), strict=False))
        texts |= {
            a.arg: ast.unparse(d) for a, d in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if d is not None
        }
        given = {**dict(zip(names, self._original.arguments, strict=False)), **self._original.keywords}
        for name, value in given.items():
            if name in read and not _is_plain(value):
                raise Untranslated(
                    f"the constructor's argument {name} is a {type(value).__name__}, which no text holds"
                )
            texts[name] = repr(_literal(value))
        if (spec.vararg and spec.vararg.arg in read) or (spec.kwarg and spec.kwarg.arg in read):
            raise Untranslated("name the constructor's arguments")
        return [
            f"{name} = {texts[name]}"
            for name in [*names, *(a.arg for a in spec.kwonlyargs)]
            if name in read & texts.keys()
        ]

    def _calls(self, attribute: str) -> bool:
        calls = [n.func for m in self._methods for n in ast.walk(m) if isinstance(n, ast.Call)]
        return any(_is_own(f, ast.Load) and f.attr == attribute for f in calls)

    def _dotted(self, node: ast.expr) -> str:
        if isinstance(node, ast.Name):
            return self._names.get(node.id, node.id)
        return f"{self._dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def _is_own(node: ast.AST, use: type[ast.expr_context]) -> TypeGuard[ast.Attribute]:
    """Whether `node` is an attribute of ``self`` that is read, or stored."""
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, use)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def _needed(body: Sequence[ast.stmt], read: set[str]) -> list[ast.stmt]:
    """The statements of a constructor that the attributes `read` depend on."""
    wanted = {f"self.{name}" for name in read}
    while True:
        kept = [s for s in body if _stored(s) & wanted or isinstance(s, ast.Assert | ast.Raise)]
        more = {name for s in kept for name in _read(s)} - wanted
        if not more:
            return kept
        wanted |= more


def _stored(statement: ast.stmt) -> set[str]:
    nodes = list(ast.walk(statement))
    names = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    names |= {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    return names | {f"self.{n.attr}" for n in nodes if isinstance(n, ast.Attribute) and _is_own(n, ast.Store)}


def _read(statement: ast.stmt) -> set[str]:
    nodes = list(ast.walk(statement))
    names = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    return names | {f"self.{n.attr}" for n in nodes if isinstance(n, ast.Attribute) and _is_own(n, ast.Load)}


def _literal(value: Any) -> Any:
    return tuple(value) if isinstance(value, torch.Size) else value


def _is_plain(value: Any) -> bool:
    """Whether a value's text is the value."""
    if isinstance(value, list | tuple):
        return type(value) in (list, tuple, torch.Size) and all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(_is_plain(part) for pair in value.items() for part in pair)
    return value is None or type(value) in (bool, int, str) or type(value) is float and abs(value) < float("inf")


__all__ = ["LAYERS", "Original", "Untranslated", "as_function"]
