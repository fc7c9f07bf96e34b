"""A small model that writes Triton, trained on accepted patches, beside an untrained one and a copier.

    python -m benchmarks.writer data   OUT --store runs/collect/store.sqlite --others 6
    python -m benchmarks.writer train  OUT --minutes 18
    python -m benchmarks.writer answer OUT --requests 120 --minutes 5
    python -m benchmarks.writer judge  OUT --requests 120 --minutes 10
    python -m benchmarks.writer table  OUT
    python -m benchmarks.writer sft    OUT --minutes 20         a pretrained model instead (extra `smol`)
    python -m benchmarks.writer rl     OUT --minutes 30         that one, by reinforcement over turns
    python -m benchmarks.writer turns  OUT --writer tuned       conversations on what is held out, with repairs
    python -m benchmarks.writer corrections OUT NEW             what `rl` got wrong, to be learnt as repairs in NEW
    python -m benchmarks.writer toy    OUT          all of it, tiny, on a CPU, from patches that nobody judged

Every command uses all GPUs of the machine and can be repeated: `data` begins anew, the others continue. Another
training needs another OUT.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Annotated

import typer

from qimeng.errors import QimengError

app = typer.Typer(help=__doc__, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)

Out = Annotated[Path, typer.Argument(help="Folder of the experiment.")]
Requests = Annotated[int, typer.Option(help="Of each set.")]
Minutes = Annotated[float, typer.Option(help="After which nothing is begun; `turns` cuts off what still runs.")]
Jobs = Annotated[int, typer.Option(help="Processes on each GPU.")]
Processes = Annotated[int, typer.Option(help="Processes that write examples.")]
CORES = os.cpu_count() or 1


@app.command()
def data(
    out: Out,
    store: Annotated[list[Path], typer.Option(help="*.sqlite, or a file of trees.")] = [],  # noqa: B006
    others: Annotated[int, typer.Option(help="Other sizes at which steps are written again.")] = 8,
    draw: Annotated[int, typer.Option(help="Drawn specs whose patches nobody judged.")] = 0,
    walks: Annotated[int, typer.Option(help="Through each drawn spec, at each size.")] = 1,
    sizes: Annotated[int, typer.Option(help="Of four sizes, how many each drawn spec has.")] = 4,
    further: Annotated[
        int, typer.Option(help="Specs of convolutions, windows, scans and recurrences, not judged.")
    ] = 0,
    cuda: Annotated[bool, typer.Option("--cuda", help="Walks through drawn specs lead to CUDA C++ too.")] = False,
    repairs: Annotated[float, typer.Option(help="Share of what is learnt that is learnt as a repair as well.")] = 0.0,
    processes: Processes = CORES,
    seed: int = 0,
) -> None:
    """Make the examples."""
    from experiments.writer.steps import data as run

    run(out, store, draw, sizes, walks, others, processes, seed, further, cuda, repairs)


@app.command()
def train(
    out: Out,
    minutes: Annotated[float, typer.Option(help="Of the training, over all runs.")] = 18.0,
    now: Annotated[float, typer.Option(help="Minutes of this run; 0 prepares it.")] = 1e6,
    size: str = "small",
    weights: Annotated[Path | None, typer.Option(help="Folder of a writer to begin with, same tokenizer.")] = None,
    steps: int = 1_000_000,
    tokens: Annotated[int, typer.Option(help="Of a batch, on each GPU.")] = 32_768,
    rate: float = 1e-3,
    compiled: Annotated[bool, typer.Option("--compiled", help="By torch.compile, which takes a minute.")] = False,
    seed: int = 0,
) -> None:
    """Train, within the minutes given."""
    from experiments.writer.steps import train as run
    from experiments.writer.training import Training

    run(out, Training(60 * minutes, steps, tokens, rate, compiled=compiled, seed=seed), size, now, weights)


@app.command()
def answer(
    out: Out,
    requests: Requests = 100,
    minutes: Minutes = 10.0,
    jobs: Jobs = 4,
    batch: Annotated[int, typer.Option(help="Answers written together.")] = 64,
    longest: Annotated[int, typer.Option(help="Tokens of an answer.")] = 3600,
) -> None:
    """Have held-out requests answered by the trained and the untrained model."""
    from experiments.writer.steps import answer as run

    run(out, requests, minutes, jobs, batch, longest)


@app.command()
def judge(out: Out, requests: Requests = 100, minutes: Minutes = 10.0, jobs: Jobs = 4) -> None:
    """Judge the answers, beside copies of the nearest patches and the template coder's own."""
    from experiments.writer.steps import judge as run

    run(out, requests, minutes, jobs)


@app.command()
def table(out: Out) -> None:
    """Print the shares."""
    from experiments.writer.steps import table as run

    run(out)


@app.command()
def sft(
    out: Out,
    model: Annotated[str, typer.Option(help="smol, a folder, or a name on Hugging Face's hub.")] = "smol",
    minutes: Annotated[float, typer.Option(help="Of the training, over all runs.")] = 20.0,
    now: Annotated[float, typer.Option(help="Minutes of this run.")] = 1e6,
    rank: Annotated[int, typer.Option(help="Of the LoRA adapter; 0 trains the whole model.")] = 16,
    epochs: float = 2.0,
    length: Annotated[int, typer.Option(help="Tokens; longer conversations are left out.")] = 4096,
    tokens: Annotated[int, typer.Option(help="Of an update, on each GPU.")] = 16_384,
    rate: float = 3e-4,
    target: Annotated[str, typer.Option(help="Folder in OUT of the trained model.")] = "tuned",
    seed: int = 0,
) -> None:
    """Fine-tune a pretrained model on the examples."""
    from experiments.writer.tuning import sft as run
    from qimeng.finetune.sft import Sft

    run(out, model, Sft(epochs, 60 * minutes, length, tokens, rate, seed=seed), rank, now, target)


@app.command()
def conversations(out: Out, file: Annotated[Path, typer.Argument(help="JSON lines to write.")]) -> None:
    """Write what is learnt as conversations, which `qimeng finetune` reads."""
    from experiments.writer.tuning import conversations as run

    print(f"{file}: {run(out, file)} conversations")


@app.command()
def rl(
    out: Out,
    source: Annotated[str, typer.Option(help="Folder in OUT of the model to begin with.")] = "tuned",
    target: Annotated[str, typer.Option(help="Folder in OUT of the trained model.")] = "reinforced",
    minutes: Annotated[float, typer.Option(help="Of the training, over all runs.")] = 30.0,
    now: Annotated[float, typer.Option(help="Minutes of this run; no round is begun that would last longer.")] = 1e6,
    steps: Annotated[int, typer.Option(help="Rounds.")] = 100,
    requests: Annotated[int, typer.Option(help="Of a round.")] = 8,
    group: Annotated[int, typer.Option(help="Conversations about each request.")] = 8,
    turns: Annotated[int, typer.Option(help="Most replies of a conversation.")] = 3,
    gamma: Annotated[float, typer.Option(help="Worth of a reward a turn later.")] = 0.5,
    updates: Annotated[int, typer.Option(help="Of the weights in a round.")] = 1,
    rank: Annotated[int, typer.Option(help="Of the LoRA adapter; 0 trains the whole model.")] = 16,
    rate: float = 1e-5,
    longest: Annotated[int, typer.Option(help="Tokens of a reply.")] = 1536,
    length: Annotated[int, typer.Option(help="Tokens of prompt and reply.")] = 4096,
    asked: Annotated[int, typer.Option(help="Requests to draw from.")] = 2000,
    advantages: Annotated[str, typer.Option(help="leave-one-out or grpo.")] = "leave-one-out",
    mismatch: Annotated[bool, typer.Option(help="Drop conversations where sampler and trainer differ.")] = True,
    shares: Annotated[bool, typer.Option(help="Drop right answers that do little of the work.")] = True,
    mixed: Annotated[
        bool, typer.Option(help="Compute in bfloat16; without it, sampler and trainer differ less.")
    ] = True,
    jobs: Jobs = 4,
    device: Annotated[str, typer.Option(help="Without a GPU: the device to estimate for.")] = "",
    seed: int = 0,
) -> None:
    """Train a fine-tuned model by reinforcement over turns."""
    from experiments.writer.tuning import rl as run
    from qimeng.finetune.rl import Rl

    how = Rl(
        steps=steps,
        seconds=60 * minutes,
        requests=requests,
        group=group,
        turns=turns,
        gamma=gamma,
        updates=updates,
        max_tokens=longest,
        length=length,
        batch=requests * group,
        rate=rate,
        advantages=advantages,
        mismatch=mismatch,
        shares=shares,
        mixed=mixed,
        seed=seed,
    )
    run(out, how, source, target, rank, asked, jobs, now, device or None)


@app.command()
def corrections(
    out: Out,
    target: Annotated[Path, typer.Argument(help="Another folder, for `sft --model OUT/tuned`.")],
    also: Annotated[int, typer.Option(help="Other examples that are learnt with them.")] = 4000,
    seed: int = 0,
) -> None:
    """Make repairs of the wrong first replies of `rl`."""
    from experiments.writer.corrections import corrections as run

    print(f"{target}: {run(out, target, also, seed)}")


@app.command()
def turns(
    out: Out,
    writer: Annotated[list[str], typer.Option(help="Folder in OUT of a model; may be repeated.")],
    requests: Requests = 100,
    group: Annotated[int, typer.Option(help="Conversations about each request.")] = 4,
    most: Annotated[int, typer.Option(help="Replies of a conversation.")] = 3,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest.")] = 0.7,
    longest: Annotated[int, typer.Option(help="Tokens of a reply.")] = 2048,
    length: Annotated[int, typer.Option(help="Tokens of prompt and reply.")] = 6144,
    batch: Annotated[int, typer.Option(help="Replies drawn together, on each GPU.")] = 64,
    minutes: Minutes = 10.0,
    jobs: Jobs = 4,
    device: Annotated[str, typer.Option(help="Without a GPU: the device to estimate for.")] = "",
    seed: int = 0,
) -> None:
    """Hold conversations about held-out requests, with real repairs, and print the shares by turn."""
    from experiments.writer.held_out import Talk
    from experiments.writer.held_out import turns as run

    how = Talk(requests, group, most, temperature, longest, length, batch, seed)
    run(out, writer, how, jobs, minutes, device or None)


@app.command()
def toy(out: Out, processes: Processes = CORES) -> None:
    """Everything at toy size on a CPU: that it runs, nothing about how good it is."""
    from experiments.writer.steps import toy as run

    run(out, processes)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `timeout` ends it as Ctrl-C does: what is there is kept
    try:
        app()
    except QimengError as error:
        raise SystemExit(f"writer: {error}") from None
