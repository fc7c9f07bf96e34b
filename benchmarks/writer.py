"""A small model that writes Triton, trained on accepted patches, against an untrained one and against copying.

    python benchmarks/writer.py data   OUT --store runs/collect/store.sqlite --draw 0
    python benchmarks/writer.py train  OUT --minutes 18
    python benchmarks/writer.py judge  OUT --requests 100 --minutes 25
    python benchmarks/writer.py table  OUT
    python benchmarks/writer.py toy    OUT          all of it, tiny, on a CPU, from patches that nobody judged

Each command can be repeated: `data` and `train` begin anew, `judge` goes on where it ended. OUT holds `examples.jsonl`,
`examples.json` (counts), `training.jsonl`, `judged.jsonl` (a row for each request and coder) and the two models, which
are not committed.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict
from pathlib import Path

from qimeng.bench.environment import environment
from qimeng.bench.row import append_line
from qimeng.bench.writer.examples import LIMITS, WORDS, Example, Split, collect, split, units
from qimeng.coder.llm.words import Words
from qimeng.device import target_device
from qimeng.interfaces import Coder
from qimeng.planner.data.generate import Bytes

SIZES = tuple(Bytes(1 << n, 1 << (n + 2)) for n in (16, 18, 20, 22))
"""Inputs of drawn specs: 64 KiB to 16 MiB, so that judging takes seconds."""

SHORT = 400
"""Tokens after which an untrained model is cut off: it does not end by itself."""


def data(args: argparse.Namespace) -> None:
    """Make the examples."""
    args.out.mkdir(parents=True, exist_ok=True)
    sizes = SIZES[: args.sizes]
    with open(args.out / "examples.jsonl", "w") as file:
        for example in collect(units(args.store, args.seed, args.draw, sizes), args.processes):
            file.write(example.to_json() + "\n")
    parts = read(args.out)
    counts = {name: len(getattr(parts, name)) for name in ("learnt", "shapes", "chains")}
    learnt = parts.learnt
    counts |= {"verified": sum(e.verified for e in learnt), "chains learnt": len({e.chain for e in learnt})}
    (args.out / "examples.json").write_text(json.dumps({**counts, "environment": asdict(environment(target_device()))}))
    print(json.dumps(counts))


def read(out: Path) -> Split:
    """The examples of a folder, parted."""
    return split([Example.from_json(line) for line in (out / "examples.jsonl").read_text().splitlines()])


def train(args: argparse.Namespace) -> None:
    """Train, within the minutes given."""
    import torch

    from qimeng.bench.writer.model import Training, new_writer
    from qimeng.bench.writer.model import train as train_model

    learnt = read(args.out).learnt
    new_writer(learnt, args.size, args.out / "untrained", args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    how = Training(seconds=60 * args.minutes, steps=args.steps, tokens=args.tokens, rate=args.rate, seed=args.seed)
    about = {**asdict(how), "size": args.size, "environment": asdict(environment(target_device()))}
    append_line(args.out / "training.jsonl", json.dumps(about))

    def tell(row: dict[str, float]) -> None:
        append_line(args.out / "training.jsonl", json.dumps(row))
        print(json.dumps(row), flush=True)

    train_model(args.out / "untrained", args.out / "trained", learnt, how, device, tell)


def judge(args: argparse.Namespace) -> None:
    """Put held-out requests to the trained model, the untrained one and the copier."""
    from qimeng.bench.writer.judging import REPAIRS, CopyCoder, Judged
    from qimeng.bench.writer.judging import judge as judge_examples
    from qimeng.bench.writer.model import WriterChat
    from qimeng.coder.llm.coder import LLMCoder

    parts, stop_at = read(args.out), time.monotonic() + 60 * args.minutes
    chats = {
        "trained": WriterChat(args.out / "trained", batch=args.batch),
        "untrained": WriterChat(args.out / "untrained", max_tokens=SHORT, batch=args.batch),
    }
    coders: dict[str, Coder] = {
        name: LLMCoder(chat, again=0, words=Words(WORDS), limits=LIMITS) for name, chat in chats.items()
    }
    coders["copy"] = CopyCoder(parts.learnt)
    for part in ("shapes", "chains"):
        # the order of their keys is as good as chance, and always the same
        some = sorted(getattr(parts, part), key=lambda e: e.key)[: args.requests]
        for chat in chats.values():
            chat.prepare([e.messages for e in some], REPAIRS)

        def tell(row: Judged) -> None:
            print(row.part, row.coder, row.chain, row.kind, row.tries or row.error, flush=True)

        judge_examples(
            part, some, coders, args.out / "judged.jsonl", environment(target_device()), stop_at=stop_at, on_row=tell
        )
    table(args)


def table(args: argparse.Namespace) -> None:
    """Print the shares."""
    from qimeng.bench.writer.judging import read_rows
    from qimeng.bench.writer.judging import table as as_table

    print(as_table(read_rows(args.out / "judged.jsonl")), end="")


def toy(args: argparse.Namespace) -> None:
    """Everything at toy size: that it runs, nothing about how good it is."""
    args.store, args.draw, args.sizes = [], 6, 2
    data(args)
    args.size, args.steps, args.minutes, args.tokens, args.rate = "toy", 20, 5.0, 8192, 1e-3
    train(args)
    args.requests, args.minutes, args.batch = 2, 5.0, 2
    judge(args)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for function in (data, train, judge, table, toy):
        command = commands.add_parser(function.__name__, help=function.__doc__)
        command.add_argument("out", type=Path)
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--processes", type=int, default=os.cpu_count() or 1)
        command.set_defaults(function=function)
        if function is data:
            command.add_argument("--store", type=Path, action="append", default=[], help="*.sqlite, or a file of trees")
            command.add_argument("--draw", type=int, default=0, help="drawn specs whose patches nobody judged")
            command.add_argument("--sizes", type=int, default=len(SIZES), help="sizes of each drawn spec")
        if function is train:
            command.add_argument("--size", default="small")
            command.add_argument("--minutes", type=float, default=18.0)
            command.add_argument("--steps", type=int, default=1_000_000)
            command.add_argument("--tokens", type=int, default=65_536, help="of a batch")
            command.add_argument("--rate", type=float, default=1e-3)
        if function is judge:
            command.add_argument("--requests", type=int, default=100, help="of each set")
            command.add_argument("--minutes", type=float, default=25.0)
            command.add_argument("--batch", type=int, default=128, help="answers written together")
    args = parser.parse_args()
    args.function(args)


if __name__ == "__main__":
    main()
