"""Messages show lines of the user's own file."""

from __future__ import annotations

from pathlib import Path

import pytest

from qimeng import KernelSpec, SpecError
from qimeng.graph.capture import CaptureError
from qimeng.program.verify import capture_spec

HEAD = "import torch\n\nclass Model(torch.nn.Module):\n    def forward(self, x):\n"
TAIL = "\ndef get_inputs():\n    return [torch.rand(16, 32)]\n\ndef get_init_inputs():\n    return []\n"


def spec_of(folder: Path, text: str) -> KernelSpec:
    path = folder / "mine.py"
    path.write_text(text)
    return KernelSpec.from_file(path)


def test_where_a_call_fails(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, HEAD + "        return x @ x\n" + TAIL)
    with pytest.raises(SpecError, match=r"\(mine.py, line 5: `return x @ x`\). The inputs must fit"):
        spec.check()


def test_where_a_capture_ends(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, HEAD + "        return x if x.sum() > 0 else -x\n" + TAIL)
    with pytest.raises(CaptureError, match=r"\(mine.py, line 5: `return x if x.sum\(\) > 0 else -x`\)"):
        capture_spec(spec)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import torch\nimport not_there\n", r"No module named 'not_there' \(mine.py, line 2: `import not_there`\)"),
        ("import torch\ndef (\n", r"SyntaxError: .*\(mine.py, line 2\)$"),
    ],
)
def test_where_a_file_does_not_load(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        spec_of(tmp_path, text)


def test_text_without_a_file_has_its_name() -> None:
    with pytest.raises(SpecError, match=r"\(problem, line 2"):
        KernelSpec.from_source("import torch\nimport not_there\n", "problem")
