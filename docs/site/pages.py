"""Pages that are made from the library: its commands, actions, generated kernels and public names.

Deals in Markdown. Knows nothing about MkDocs.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from typer.main import get_command

from qimeng.actions import Kind, kinds

ROOT = Path(__file__).resolve().parents[2]

MINUTES = {
    "optimize": "the budget (`--seconds`), and up to half a minute",
    "describe": "as long as the model takes, and some seconds",
    "replay": "half a minute",
    "doctor": "half a minute; `--exploits` some minutes",
    "train": "as long as its settings say; `--seconds` ends it",
    "finetune": "as long as its passes take; `--seconds` ends it",
    "adapt": "as long as its settings say; `--seconds` ends it",
    "bench": "seconds for each problem: its budget and 20 s",
    "collect": "the budget (`--total-seconds`)",
}
"""Rough time of commands that take more than a few seconds."""

USERS = (
    "qimeng",
    "qimeng.integration",
    "qimeng.interfaces",
    "qimeng.bench.suite",
    "qimeng.store",
    "qimeng.coder.named",
    "qimeng.coder.llm.account",
    "qimeng.cluster.fleet",
    "qimeng.cluster.pool",
    "qimeng.service.client",
    "qimeng.spec",
    "qimeng.spec.declared",
    "qimeng.vocabulary.sparse",
)
"""Modules whose public names users need."""

AUTHORS = (
    "qimeng.actions",
    "qimeng.family",
    "qimeng.planner",
    "qimeng.planner.search",
    "qimeng.planner.greedy",
    "qimeng.planner.heuristic",
    "qimeng.planner.random",
    "qimeng.planner.lm.planner",
    "qimeng.planner.lm.weights",
    "qimeng.planner.lm.imitation",
    "qimeng.planner.lm.corpus",
    "qimeng.planner.lm.mini",
    "qimeng.planner.lm.scoring",
    "qimeng.planner.data.tree_file",
    "qimeng.planner.data.tree_store",
    "qimeng.backend.base",
    "qimeng.coder.llm.chat",
    "qimeng.coder.template.coder",
    "qimeng.coder.template.families.tile.family",
    "qimeng.coder.template.families.tile.plan",
    "qimeng.coder.template.families.tile.schedule",
    "qimeng.envs.gym.wrappers",
    "qimeng.envs.steps.session",
    "qimeng.envs.steps.setup",
    "qimeng.envs.steps.state",
    "qimeng.envs.steps.loop",
    "qimeng.envs.steps.task",
    "qimeng.finetune.rl",
    "qimeng.finetune.rollout",
    "qimeng.graph.capture",
    "qimeng.graph.ops",
    "qimeng.graph.region",
    "qimeng.program.program",
    "qimeng.program.verify",
    "qimeng.testing",
)
"""Modules whose public names authors of extensions and of training code need besides."""


# ---- commands


def commands() -> str:
    """Every command with its options."""
    import qimeng.cli

    lines = ["# Command line", "", "Every command has `--help`. Options that stand before the command hold for all.", ""]
    group = get_command(qimeng.cli.app)
    lines += _options(group)
    for path, command in _commands(group, ()):
        lines += [f"## qimeng {' '.join(path)}", "", inspect.cleandoc(command.help or ""), ""]
        if path[0] in MINUTES:
            lines += [f"Takes {MINUTES[path[0]]}.", ""]
        lines += _options(command)
    return "\n".join(lines)


def _commands(group: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, (*path, name))
        else:
            yield (*path, name), command


def _options(command: Any) -> list[str]:
    rows = []
    for p in command.params:
        names = ", ".join(f"`{o}`" for o in p.opts) if p.param_type_name == "option" else f"`{p.name}`"
        default = "" if p.default in (None, "", False, ()) or callable(p.default) else f"`{p.default}`"
        rows.append(f"| {names} | {_cell(getattr(p, 'help', None) or '')} | {default} |")
    return ["| option | meaning | default |", "|---|---|---|", *rows, ""] if rows else []


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


# ---- actions


def actions() -> str:
    """A line for every kind of action."""
    lines = [
        "# Actions",
        "",
        "A planner picks one of these at each step. An action is one line of text: its kind, an option, and the regions "
        "it is for. Which actions are legal depends on the program and the device. `qimeng actions` prints this table.",
        "",
        "| kind | what it does |",
        "|---|---|",
    ]
    for kind in kinds().values():
        summary = inspect.cleandoc(type(kind).__doc__ or "").partition("\n\n")[0]
        lines.append(f"| [{kind.name}](actions/{kind.name}.md) | {_cell(summary)} |")
    return "\n".join(lines)


def action(kind: Kind) -> str:
    """One kind of action: its docstring, and what it does in the examples of the tests."""
    golden = [p.read_text() for p in sorted((ROOT / "tests" / "actions" / "golden").glob("*.txt"))]
    lines = [f"# {kind.name}", "", _prose(inspect.cleandoc(type(kind).__doc__ or "")), ""]
    options = [f"`{option}`" for option in kind.options if option]
    lines += [f"Options: {', '.join(options)}.", ""] if options else []
    found = [e for text in golden for e in _examples(text, kind.name)][:3]
    lines += ["## Examples", ""] if found else []
    for example in found:
        lines += ["```text", example, "```", ""]
    return "\n".join([*lines, "[All actions](../actions.md)"])


def _prose(text: str) -> str:
    """A docstring as Markdown: its arguments and its rewrite as lines of a list."""
    text = text.replace("``", "`")
    return re.sub(r"^(args|rewrite|options): ", r"- **\1:** ", text, flags=re.MULTILINE)


def _examples(text: str, kind: str) -> Iterator[str]:
    for part in re.split(r"\n(?=\S)", text):
        if re.match(rf"{kind}( |:|$)", part.splitlines()[0]):
            yield part.rstrip()


# ---- gallery


class Gated(nn.Module):
    """A gate and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(512, 1024, bias=False), nn.Linear(512, 1024, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(self.gate(x)) * self.up(x)


class Attention(nn.Module):
    """Causal attention."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class Total(nn.Module):
    """A running sum of squares."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * x).cumsum(-1)


def examples() -> dict[str, tuple[str, nn.Module, tuple[torch.Tensor, ...]]]:
    """Title to the PyTorch text, the module, and its inputs."""
    heads = tuple(torch.randn(2, 4, 256, 64) for _ in range(3))
    return {
        "Softmax of a scaled sum": ("torch.softmax(x * 2 + 1, -1)", Scaled(), (torch.randn(512, 1000),)),
        "Layer norm and GELU": (
            "nn.Sequential(nn.LayerNorm(768), nn.GELU())",
            nn.Sequential(nn.LayerNorm(768), nn.GELU()).eval(),
            (torch.randn(512, 768),),
        ),
        "Two products and a gate": (inspect.getsource(Gated), Gated().eval(), (torch.randn(256, 512),)),
        "Convolution, bias and ReLU": (
            "nn.Sequential(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU())",
            nn.Sequential(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()).eval(),
            (torch.randn(2, 32, 28, 28),),
        ),
        "Causal attention": (inspect.getsource(Attention), Attention(), heads),
        "Running sum": (inspect.getsource(Total), Total(), (torch.randn(64, 1000),)),
        "Maxima of windows": ("nn.MaxPool2d(3, 2)", nn.MaxPool2d(3, 2), (torch.randn(4, 16, 56, 56),)),
    }


class Scaled(nn.Module):
    """A softmax of a scaled sum."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * 2 + 1, -1)


def gallery() -> str:
    """Generated kernels beside the PyTorch that they replace."""
    lines = [
        "# Gallery",
        "",
        "What the template coder prints for an H100 before any tuning: the first schedule of each kernel. A search then "
        "tries others. Helpers that every program has are left out.",
        "",
    ]
    for title, (text, module, inputs) in examples().items():
        lines += [f"## {title}", "", "```python", inspect.cleandoc(text), "```", ""]
        lines += ["becomes", "", "```python", _kernels(module, inputs), "```", ""]
    return "\n".join(lines)


def _kernels(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> str:
    """The generated regions of a program, after everything was fused and lowered."""
    from qimeng.actions import Context, legal_actions, rewritten
    from qimeng.backend.registry import implementation_source
    from qimeng.coder.template.coder import TemplateCoder
    from qimeng.device import DEVICES
    from qimeng.interfaces import Request
    from qimeng.program.program import Program
    from qimeng.program.verify import capture_spec
    from qimeng.spec import KernelSpec

    context = Context(DEVICES["h100"], TemplateCoder(), "default")
    program = Program.start(capture_spec(KernelSpec.from_module(module, inputs), verify=False))
    for kind in ("fusion", "lowering"):
        while action := next((a for a in legal_actions(program, context) if a.kind == kind), None):
            patch = context.coder.write(Request(program, action, context.device))
            program = patch.apply(program)
    made = [program.implementation(region) for region in program.regions]
    return "\n\n\n".join(implementation_source(i).strip() for i in made if i.generated)


# ---- names


def api() -> str:
    """The public names that users need, with their docstrings."""
    return _names("Python API", "What `import qimeng` offers, and what stands beside it.", USERS, ())


def extension_api() -> str:
    """Those that authors of extensions need besides."""
    return _names("API for extensions", "What [extensions](extending.md) and training code use.", AUTHORS, USERS)


def _names(title: str, about: str, rooms: Sequence[str], elsewhere: Sequence[str]) -> str:
    lines = [f"# {title}", "", about, ""]
    done = {path for room in elsewhere for path, _ in public(room)}
    for room in rooms:
        lines += [f"## {room}", "", (inspect.getdoc(import_module(room)) or "").partition("\n")[0], ""]
        for path, whole in public(room):
            if path not in done:
                lines += [f"::: {path}", "    options:", "      heading_level: 3", *([] if whole else ["      members: false"]), ""]
        done |= {path for path, _ in public(room)}
    return "\n".join(lines)


def public(room: str) -> list[tuple[str, bool]]:
    """Where each public name of a module is defined, and whether its members are shown: those of a module are not."""
    module = import_module(room)
    names = sorted((n for n in module.__all__ if not n.startswith("__")), key=lambda n: (n[:1].isupper(), n))
    return [(_path(room, name, inspect.unwrap(getattr(module, name))), not inspect.ismodule(getattr(module, name))) for name in names]


def _path(room: str, name: str, thing: Any) -> str:
    """Where a class or function is defined; other names are shown under the module that offers them."""
    if inspect.isclass(thing) or inspect.isfunction(thing):
        return f"{thing.__module__}.{thing.__qualname__}"
    return f"{room}.{name}"


PAGES: dict[str, Callable[[], str]] = {
    "commands.md": commands,
    "actions.md": actions,
    **{f"actions/{kind.name}.md": partial(action, kind) for kind in kinds().values()},
    "gallery.md": gallery,
    "api.md": api,
    "extension_api.md": extension_api,
}

__all__ = ["AUTHORS", "PAGES", "USERS", "public"]
