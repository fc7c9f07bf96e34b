"""Naming the planner, and looking for its weights, loads neither transformers nor stable-baselines3."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_planner_is_light_until_it_decides() -> None:
    heavy = ("transformers", "stable_baselines3", "sb3_contrib", "peft", "tokenizers")
    code = (
        "import sys, qimeng.planner.lm.planner\n"
        "qimeng.planner.make_planner('lm')\n"
        f"print([m for m in {heavy!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
