"""The command line of trained coders: `qimeng finetune`.

Deals in arguments and in showing progress. Knows nothing about how models are trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qimeng.cli_console import console, resumable
from qimeng.cli_names import number

if TYPE_CHECKING:
    from qimeng.finetune.members import Member
    from qimeng.finetune.sft import Sft


def finetune(
    conversations: Annotated[Path, typer.Argument(help="JSON lines with `messages`; the last turn is learnt.")],
    out: Annotated[
        Path, typer.Option(help="Folder of the trained model. An interrupted run resumes.", file_okay=False)
    ] = Path("runs/coder"),
    model: Annotated[
        str, typer.Option(help="smol (SmolLM2-135M-Instruct), a folder, or a name on Hugging Face's hub.")
    ] = "smol",
    rank: Annotated[int, typer.Option(min=0, help="Rank of the LoRA adapter; 0 trains the whole model.")] = 16,
    epochs: Annotated[float, typer.Option(callback=number, help="Passes over the conversations.")] = 2.0,
    seconds: Annotated[float, typer.Option(callback=number, help="Time limit over all runs; 0 for none.")] = 0.0,
    length: Annotated[int, typer.Option(min=2, help="Tokens; longer conversations are left out.")] = 4096,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of an update, on each GPU.")] = 16_384,
    rate: Annotated[float, typer.Option(callback=number, help="Highest learning rate.")] = 3e-4,
    seed: Annotated[int, typer.Option(help="Seed of the order and of the adapter.")] = 0,
) -> None:
    """Fine-tune a language model on conversations, to be used as coder="transformers:FOLDER". All GPUs take part."""
    import torch

    from qimeng.finetune.conversations import read_conversations
    from qimeng.finetune.members import together
    from qimeng.finetune.sft import CHECKPOINT, Sft

    said = list(read_conversations(conversations))
    how = Sft(epochs, seconds or math.inf, length, tokens, rate, seed=seed)

    def kept() -> str:
        if (out / CHECKPOINT).exists():
            return f"{out} keeps what was trained, up to the last checkpoint"
        return f"no checkpoint yet: one is written every {how.keep_s:.0f} s"

    count = torch.cuda.device_count()
    with resumable(kept):
        together(_member, "cuda" if count else "cpu", count, model, rank, said, how, out)


def _member(
    member: Member, stopped: Callable[[], bool], model: str, rank: int, said: list[Any], how: Sft, out: Path
) -> None:
    """What one process does of the fine-tuning; the first one tells, and writes the model where it was not stopped."""
    import torch

    from qimeng.finetune.conversations import encoded
    from qimeng.finetune.sft import fine_tune
    from qimeng.finetune.weights import adapted, load, save

    screen = console()
    member.join()
    beside = rank and member.device.startswith("cuda")  # weights that stay as they are may be short
    lm, tokenizer = load(model, torch.bfloat16 if beside else torch.float32, member.device)
    lm = adapted(lm, rank, how.seed)
    rows = encoded(tokenizer, said)

    def tell(row: Mapping[str, float]) -> None:
        screen.print(f"update {row['step']:.0f}: loss {row.get('loss', math.nan):.4f}", markup=False)

    found = fine_tune(lm, rows, how, out, member=member, stopped=stopped, on_row=tell)
    if member.rank == 0 and not stopped():
        save(lm, tokenizer, out)
        left_out = len(rows) - int(found["examples"])
        screen.print(f"{int(found['examples'])} conversations learnt, {left_out} too long", markup=False)
        screen.print(f"written: {out}; use it as coder='transformers:{out}'", markup=False)
    member.leave()


__all__ = ["finetune"]
