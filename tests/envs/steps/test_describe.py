"""A spec from words: sizes and dtypes are read; the text is screened, run apart, mended, saved and shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from qimeng.coder.llm.chat import Chat, ChatError, Message, Reply
from qimeng.coder.llm.coder import LLMCoder
from qimeng.envs.steps.describe import Seen, chat_of, look, screen, spec_from_text
from qimeng.envs.steps.spec_wording import disagreement, read_words
from qimeng.envs.workers.service import Refused
from qimeng.errors import SpecError
from qimeng.spec import KernelSpec

WORDS = "batched matrix product of A and B, batch 4, fp16, 32 x 16"

GOOD = """
import torch
from torch import nn


class Model(nn.Module):
    def forward(self, a, b):
        return torch.bmm(a, b)


def get_inputs():
    return [torch.rand(4, 32, 16), torch.rand(4, 16, 32)]


def get_init_inputs():
    return []
"""


class Scripted(Chat):
    """Answers by a script and keeps what it was asked."""

    name = "scripted"

    def __init__(self, *texts: str):
        self.texts, self.asked = list(texts), []  # type: list[str], list[Sequence[Message]]

    def ask(self, messages: Sequence[Message], count: int = 1, limit_s: float = 0.0) -> Iterable[Reply]:
        self.asked.append(messages)
        yield Reply(self.texts.pop(0))


def fence(text: str) -> str:
    return f"Here it is:\n```python\n{text}\n```\nI hope it helps."


@pytest.mark.parametrize(
    ("words", "dtype", "sizes", "shapes"),
    [
        ("batch 32, fp16, 512 x 512", "float16", [32, 512, 512], [(512, 512)]),
        ("softmax over 4,096 columns of 8k rows in bf16", "bfloat16", [4096, 8000], []),
        ("128 by 64 by 32 half precision, eps 1e-5, slope 0.5, k=3", "float16", [128, 64, 32, 3], [(128, 64, 32)]),
        ("cast from fp32 to fp16, 1024x2048", "", [1024, 2048], [(1024, 2048)]),
        ("a relu", "", [], []),
    ],
)
def test_words_state_sizes_and_dtypes(words: str, dtype: str, sizes: list[int], shapes: list[tuple[int, ...]]) -> None:
    stated = read_words(words)
    assert stated.dtype == dtype
    assert [min(s) for s in stated.sizes] == sizes
    assert [tuple(min(e) for e in s) for s in stated.shapes] == shapes


def test_a_file_agrees_where_its_extents_do() -> None:
    stated = read_words("product, 512 x 256, batch 8, kernel 3")
    assert disagreement(stated, [(8, 512, 256)], "size = 3") is None
    assert disagreement(stated, [(8, 256, 512)], "size = 3") is None
    assert disagreement(stated, [(8, 512), (8, 256)], "size = 3") == (
        "the words say 512 x 256, but the inputs, parameters and outputs have the shapes 8x512, 8x256"
    )
    assert "the words say 3, but no" in str(disagreement(stated, [(8, 512, 256)], ""))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts are tried in this process, which is faster; `test_a_spec_from_words` shows the real way."""

    def try_here(text: str, server: object) -> Seen:
        try:
            return Seen(problem=screen(text) or "") if screen(text) else Seen.from_data(look(text))
        except Refused as refused:
            return Seen(problem=f"it does not run: {refused}")

    monkeypatch.setattr("qimeng.envs.steps.describe.shared_server", lambda: None)
    monkeypatch.setattr("qimeng.envs.steps.describe.try_text", try_here)


def test_a_spec_from_words(tmp_path: Path) -> None:
    shown: list[str] = []
    path = tmp_path / "sub" / "bmm.py"
    chat = Scripted(fence(GOOD.replace("return torch.bmm", "while True: return torch.bmm_")), fence(GOOD))
    spec = KernelSpec.from_text(WORDS, coder=LLMCoder(chat), out=path, show=shown.append)
    assert (spec.name, spec.dtype) == ("bmm", "float16") and spec.source == path.read_text()
    assert spec.source.startswith(f"# From the words: {WORDS}\n# Written by scripted")
    assert spec == KernelSpec.from_file(path, dtype="float16")
    assert shown[0] == spec.source and "inputs 4x32x16, 4x16x32; parameters none; outputs 4x32x32" in shown[1]
    assert chat.asked[0][1].text == WORDS and "has no attribute 'bmm_'" in chat.asked[1][-1].text
    with pytest.raises(SpecError, match="exists; name another file"):
        spec_from_text(WORDS, coder=chat, out=path)


def test_what_is_wrong_goes_back_to_the_model(tmp_path: Path, here: None) -> None:
    chat = Scripted(
        "I need more details.",
        fence(GOOD.replace("torch.bmm(a, b)", "torch.bmm(a, a)")),
        fence(GOOD.replace("32, 16)", "8, 16)").replace("16, 32)", "16, 8)")),
        fence(GOOD),
    )
    spec = spec_from_text(WORDS, coder=chat, out=tmp_path / "x.py", repairs=3, show=lambda text: None)
    told = [m[-1].text for m in chat.asked[1:]]
    assert "no code" in told[0] and "fails on its own inputs" in told[1] and "the words say 32" in told[2]
    assert [len(m) for m in chat.asked] == [2, 4, 4, 4] and "torch.bmm(a, b)" in spec.source


def test_what_stays_wrong_is_refused_and_left_to_be_mended(tmp_path: Path, here: None) -> None:
    path = tmp_path / "x.py"
    zeros = fence(GOOD.replace("torch.bmm(a, b)", "torch.zeros(4, 32, 32)"))
    with pytest.raises(SpecError, match=r"says nothing: zeros pass. The text is in .*x.py: mend it"):
        spec_from_text(WORDS, coder=Scripted(zeros, zeros), out=path, repairs=1, show=lambda text: None)
    assert "torch.zeros" in path.read_text()


def test_no_answer_is_an_error_of_its_own(tmp_path: Path, here: None) -> None:
    class Silent(Scripted):
        def ask(self, messages: Sequence[Message], count: int = 1, limit_s: float = 0.0) -> Iterable[Reply]:
            raise ChatError("the server is gone", "connection")

    with pytest.raises(ChatError, match="is gone"):
        spec_from_text(WORDS, coder=Silent(), out=tmp_path / "x.py")
    with pytest.raises(ValueError, match="has no language model"):
        chat_of("template")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import os", "it imports os"),
        ("from torch.utils import cpp_extension\nimport subprocess", "it imports subprocess"),
        ("open('/etc/passwd')", "it uses open"),
        ("def f(:", "it is no Python"),
        ("import torch\ntorch.nn.functional.relu = None", "changes a name that belongs to another module"),
    ],
)
def test_some_texts_are_not_even_run(text: str, why: str) -> None:
    assert why in str(screen(text))


def test_a_good_text_passes_the_screen() -> None:
    assert screen(GOOD) is None


@pytest.mark.parametrize(
    ("forward", "why"),
    [
        ("torch.log(-a - 1)", "not finite"),
        ("torch.ones(4, 3)", "a constant passes"),
        ("torch.arange(12.0).reshape(4, 3)", "does not depend on the inputs"),
    ],
)
def test_results_that_say_nothing(forward: str, why: str) -> None:
    assert why in look(GOOD.replace("torch.bmm(a, b)", forward))["problem"]


def test_output_shapes_are_known_where_shapes_alone_do_not_say_them() -> None:
    plain = look(GOOD)["outputs"]
    assert plain == ((4, 32, 32),)
    assert look(GOOD.replace("torch.bmm(a, b)", "torch.bmm(a, b) + float(a.max())"))["outputs"] == plain


def test_large_shapes_are_seen_without_memory() -> None:
    seen = look(GOOD.replace("(4, 32, 16)", "(4, 65536, 65536)").replace("(4, 16, 32)", "(4, 65536, 32)"))
    assert seen["outputs"] == ((4, 65536, 32),) and seen["problem"] == ""


def test_a_text_that_changes_its_inputs_is_refused() -> None:
    with pytest.raises(Refused, match="changes its input 0"):
        look(GOOD.replace("torch.bmm(a, b)", "torch.bmm(a.add_(1), b)"))
