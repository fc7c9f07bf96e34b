"""`qimeng finetune`, and the grader that the documentation shows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from qimeng.cli import app
from qimeng.coder.llm.chat import Message
from qimeng.coder.llm.local_chat import LocalChat
from qimeng.finetune.rl import reinforce
from qimeng.finetune.weights import save, tiny
from qimeng.planner.lm.mini import MiniSize

TRAINING = Path(__file__).resolve().parents[2] / "docs" / "training.md"
SIZE = MiniSize(hidden=32, layers=1, heads=2, kv_heads=1, inner=64, positions=256)


def test_a_model_is_trained_on_a_file(tmp_path: Path) -> None:
    file, base, out = tmp_path / "talks.jsonl", tmp_path / "base", tmp_path / "out"
    talks = [({"role": "user", "content": "say"}, {"role": "assistant", "content": "yes " * n}) for n in (1, 2, 90)]
    file.write_text("".join(f"{json.dumps({'messages': talk})}\n" for talk in talks))
    save(*tiny(["say 1 yes"], SIZE, 260), base)
    given = ["finetune", str(file), "--model", str(base), "--out", str(out), "--rank", "2", "--epochs", "3"]
    done = CliRunner().invoke(app, [*given, "--length", "64", "--tokens", "64"])
    assert done.exit_code == 0, done.output
    assert "2 conversations learnt, 1 too long" in done.output and "transformers:" in done.output
    for name in (str(out), f"{base}+{out / 'adapter'}"):
        (reply,) = LocalChat(name, max_tokens=4, device="cpu").ask([Message("user", "say")])
        assert reply.reply_tokens <= 4


def test_the_grader_of_the_documentation_trains(tmp_path: Path) -> None:
    block = next(b for b in re.findall(r"```python\n(.*?)```", TRAINING.read_text(), re.DOTALL) if "Grader" in b)
    names: dict[str, Any] = {}
    exec(compile(block.replace("steps=100", "steps=2, max_tokens=8, length=64, batch=8"), "training.md", "exec"), names)
    model, tokenizer = tiny(["Write a kernel."], SIZE, 260)
    last = reinforce(model, tokenizer, names["questions"], names["Short"](), names["how"], tmp_path)
    assert last["step"] == 2 and 0 <= last["first_right"] <= 1
