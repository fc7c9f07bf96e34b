"""The command line: `qimeng optimize`, `describe`, `show`, `actions`, `devices`, `doctor`, and groups of commands.

Deals in arguments, printing and exit codes. Knows nothing about how anything is optimized. Heavy modules are imported
inside the commands, so that ``--help`` answers at once.

An error ends with its code in brackets, which ``docs/troubleshooting.md`` explains.

Exit codes: 0 done; 1 `doctor` found something broken or a wrong verdict; 2 an error of the library, the arguments or a
file, printed on one line; 130 interrupted (`optimize`: before there was a program to keep).
"""

from __future__ import annotations

import inspect
import json
import signal
import sys
import tempfile
import threading
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markdown import Markdown
from rich.table import Table

from qimeng.cli_bench import app as bench_app
from qimeng.cli_cluster import Cluster, Generation, on_cluster
from qimeng.cli_cluster import app as cluster_app
from qimeng.cli_coder import (
    BaseUrl,
    Calls,
    Candidates,
    CoderName,
    Money,
    PriceList,
    Prompts,
    Tokens,
    check_answered,
    made_coder,
)
from qimeng.cli_collect import app as collect_app
from qimeng.cli_console import console
from qimeng.cli_finetune import finetune
from qimeng.cli_names import Activations, PlannerName, SearchName, Weights, check_names, number, split
from qimeng.cli_report import replay, report
from qimeng.cli_serve import serve
from qimeng.cli_train import adapt, train
from qimeng.errors import QimengError
from qimeng.planner import PLANNER, SEARCH
from qimeng.plugins import use_files
from qimeng.version import VERSION

if TYPE_CHECKING:
    from qimeng.envs.steps.result import Result

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(bench_app, name="bench")
app.add_typer(collect_app, name="collect")
app.add_typer(cluster_app, name="cluster")

INTERRUPTED = 130
"""What typer exits with on Ctrl-C (128 and the number of SIGINT, as shells do)."""

Plugins = Annotated[
    list[Path],
    typer.Option(
        "--plugin", help="A Python file that registers kinds of action, families, … of yours; may be repeated."
    ),
]

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


def _version(asked: bool) -> None:
    if asked:
        print(f"qimeng {VERSION}")
        raise typer.Exit


@app.callback()
def before_a_command(
    plugin: Plugins = [],  # noqa: B006  typer reads the default and changes nothing
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version, then end.")
    ] = False,
) -> None:
    """Faster GPU kernels for PyTorch programs."""
    use_files(plugin)


@app.command()
def optimize(
    file: Annotated[Path, typer.Argument(help="A file with Model, get_inputs and get_init_inputs.")],
    seconds: Annotated[float, typer.Option(callback=number, help="Wall-clock budget.")] = 60.0,
    evaluations: Annotated[int, typer.Option(min=0, help="Maximum number of programs sent to the judge.")] = 40,
    planner: PlannerName = PLANNER,
    coder: CoderName = "template",
    base_url: BaseUrl = "",
    llm_calls: Calls = None,
    llm_tokens: Tokens = None,
    llm_money: Money = None,
    llm_prices: PriceList = "",
    candidates: Candidates = 1,
    llm_prompts: Prompts = None,
    search: SearchName = SEARCH,
    device: Annotated[
        str, typer.Option(help="Name of a device (see `qimeng devices`). Default: this machine's GPU.")
    ] = "",
    mode: Annotated[str, typer.Option(help="Precision mode: default, highest or high.")] = "default",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    compile_modes: Annotated[
        str, typer.Option(help="Modes of torch.compile to compare with, comma-separated; '' for none.")
    ] = "default",
    weights: Weights = "",
    activations: Activations = "",
    deterministic: Annotated[
        bool,
        typer.Option("--deterministic", help="Ask for the same bits in every call; kernels whose sums vary are out."),
    ] = False,
    sanitize: Annotated[
        str,
        typer.Option(help="compute-sanitizer tools to run on the final program: memcheck,racecheck,initcheck."),
    ] = "",
    out: Annotated[
        Path | None, typer.Option(help="Folder for the result. Default: runs/FILE.", file_okay=False)
    ] = None,
    store: Annotated[Path | None, typer.Option(help="Store to resume from. Default: OUT/store.sqlite.")] = None,
    cluster: Cluster = "",
    generation: Generation = "",
    interactive: Annotated[
        bool,
        typer.Option("--interactive", help="Ask before every step. Answers are read from standard input, one a line."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Optimize the computation in FILE; Ctrl-C keeps the best program so far."""
    from qimeng.api import plan_and_code
    from qimeng.cli_interactive import terminal_search
    from qimeng.cli_progress import ProgressDisplay
    from qimeng.envs.screening.sanitizer import check_tools
    from qimeng.envs.steps.setup import make_device
    from qimeng.spec import KernelSpec

    modes = split(compile_modes)
    check_names(planner, coder, search, mode, dtype, modes)
    writer = made_coder(coder, base_url, llm_calls, llm_tokens, llm_money, llm_prices, candidates, llm_prompts)
    target = make_device(device or None)
    declared = {"weights": weights, "activations": activations}
    spec = KernelSpec.from_file(file, dtype=dtype, mode=mode, deterministic=deterministic, **declared)
    folder = out or Path("runs") / file.stem
    folder.mkdir(parents=True, exist_ok=True)
    screen = console(stderr=as_json)
    if cluster:
        if interactive or store or writer.free_hand:
            raise QimengError(
                "with --cluster, neither --interactive, --store nor a language model as coder can be used: all of them "
                "need this machine"
            )
        options = {"seconds": seconds, "evaluations": evaluations, "planner": planner, "coder": coder, "search": search}
        options |= {"device": device or None, "mode": mode, "compile_modes": modes}
        options["sanitize"] = check_tools(split(sanitize))
        _print_result(on_cluster(cluster, generation, spec, options, folder, screen), folder, as_json)
        return
    asking = terminal_search(screen, planner, search) if interactive else None
    with ProgressDisplay(screen, estimated=not target.measured, quiet=interactive) as display:
        result = plan_and_code(
            spec,
            seconds=seconds,
            evaluations=evaluations,
            planner=planner,
            coder=writer,
            search=asking or search,
            device=target,
            mode=mode,
            compile_modes=modes,
            sanitize=check_tools(split(sanitize)),
            store=store or folder / "store.sqlite",
            on_step=display,
        )
    _print_result(result, _saved(result, folder), as_json)
    check_answered(writer)


def _print_result(result: Result, folder: Path, as_json: bool) -> None:
    if as_json:
        print(json.dumps({**json.loads(result.to_json()), "steps": result.rows(), "folder": str(folder)}))
        return
    print_markdown(result.report())
    console().print(f"written: {', '.join(str(folder / name) for name in ('program.py', 'recipe.json', 'report.md'))}")


def _saved(result: Result, folder: Path) -> Path:
    """Where the result was written: `folder`, or a temporary one where that cannot be written (the disk is full)."""
    try:
        return result.save(folder)
    except OSError as error:
        other = result.save(tempfile.mkdtemp(prefix="qimeng_result_"))
        print(f"qimeng: {folder} cannot be written ({error}); the result is in {other}", file=sys.stderr)
        return other


@app.command()
def describe(
    words: Annotated[str, typer.Argument(help="What to compute, with shapes and dtype.")],
    coder: Annotated[str, typer.Option(help="The model: openai:MODEL or transformers:FOLDER[+ADAPTER].")],
    base_url: BaseUrl = "",
    llm_calls: Calls = None,
    llm_tokens: Tokens = None,
    llm_money: Money = None,
    llm_prices: PriceList = "",
    llm_prompts: Prompts = None,
    out: Annotated[Path | None, typer.Option(help="File to write. Default: runs/NAME.py.")] = None,
    as_json: Json = False,
) -> None:
    """Write the computation described in WORDS as a file, with a language model. Read it, then optimize it."""
    from qimeng.envs.steps.describe import slug, spec_from_text

    screen = console(stderr=True)

    def say(text: str) -> None:
        screen.print(text, markup=False, soft_wrap=True)

    path = out or Path("runs") / f"{slug(words)}.py"
    writer = made_coder(coder, base_url, llm_calls, llm_tokens, llm_money, llm_prices)
    try:
        spec = spec_from_text(words, coder=writer, out=path, prompts=llm_prompts, show=say)
    except ValueError as error:
        raise QimengError(str(error)) from None
    command = f"qimeng optimize {path} --dtype {spec.dtype}"
    print(json.dumps({"file": str(path), "dtype": spec.dtype, "then": command}) if as_json else f"then: {command}")


@app.command()
def show(
    folder: Annotated[Path, typer.Argument(help="Folder that `qimeng optimize` wrote.")],
    source: Annotated[bool, typer.Option("--source", help="Print the program's source instead.")] = False,
    as_json: Json = False,
) -> None:
    """Show a stored result: its figures and steps, or the program."""
    from qimeng.envs.steps.result import Result

    result = Result.load(folder)
    if source:
        print(result.source, end="")
    elif as_json:
        print(json.dumps({**json.loads(result.to_json()), "steps": result.rows()}))
    else:
        print_markdown(result.report())


@app.command()
def actions(as_json: Json = False) -> None:
    """List every kind of optimization, its options, and what it rewrites."""
    from qimeng.actions import Kind, kinds

    def entry(kind: Kind) -> dict[str, object]:
        text = inspect.cleandoc(type(kind).__doc__ or "")  # its own: what it extends says nothing about it
        summary, _, rest = text.partition("\n\n")
        rewrite = next((line.partition("rewrite:")[2].strip() for line in rest.splitlines() if "rewrite:" in line), "")
        return {
            "kind": kind.name,
            "options": [option for option in kind.options if option],
            "summary": " ".join(summary.split()),
            "rewrite": rewrite.replace("``", ""),
        }

    entries = [entry(kind) for kind in kinds().values()]
    if as_json:
        print(json.dumps(entries, indent=1))
        return
    table = Table("kind", "options", "what it does", "rewrite")
    for e in entries:
        options = e["options"]
        assert isinstance(options, list)
        table.add_row(str(e["kind"]), " ".join(options), str(e["summary"]), str(e["rewrite"]))
    console().print(table, markup=False)


@app.command()
def devices(as_json: Json = False) -> None:
    """List the devices you can optimize for. This machine's GPU comes first."""
    from qimeng.device import DEVICES, current_device

    here = current_device()
    rows = [*([here] if here else []), *DEVICES.values()]
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    table = Table(
        "name",
        "arch",
        "SMs",
        "shared KiB/block",
        "L2 MiB",
        "memory GiB",
        "GB/s",
        "fp32",
        "TF32",
        "half",
        "8-bit TFLOP/s",
    )
    for r in rows:
        sizes = (r.shared_per_block >> 10, r.l2_bytes >> 20, r.memory_bytes >> 30)
        rates = (r.bandwidth_gbs, r.fp32_tflops, r.tf32_tflops, r.half_tflops, r.byte_tflops)
        table.add_row(r.name, str(r.arch), str(r.sms), *map(str, sizes), *(f"{rate:g}" for rate in rates))
    console().print(table)
    if here is None:
        console().print("No GPU found: times are estimated for a device of this table (default: h200).")


@app.command()
def doctor(
    exploits: Annotated[
        bool,
        typer.Option(
            "--exploits", help="Test the judge with every exploit and every honest candidate (takes minutes)."
        ),
    ] = False,
    only: Annotated[
        str, typer.Option(help="With --exploits: test only one class, such as timing, reuse or honest.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Check this machine: device, versions, sandbox, and a small kernel on each path. Or test the judge."""
    if exploits or only:
        _doctor_exploits(only, as_json)
        return
    from qimeng.doctor import checks

    found = checks()
    if as_json:
        print(json.dumps([asdict(check) for check in found], indent=1))
    else:
        table = Table("check", "works", "details")
        for check in found:
            table.add_row(check.name, {True: "yes", False: "NO", None: "–"}[check.works], check.details)
        console().print(table, markup=False)
    if any(check.works is False for check in found):
        raise typer.Exit(1)


def _doctor_exploits(only: str, as_json: bool) -> None:
    """Exit with 1 if a case got a wrong verdict."""
    from qimeng.cli_exploits import check_exploits, suite_table
    from qimeng.exploits import HONEST, KINDS
    from qimeng.exploits.here import as_data

    if only and only not in (*KINDS, HONEST):
        raise QimengError(f"unknown class {only!r}; known: {', '.join((*KINDS, HONEST))}")
    outcomes, skipped = check_exploits(console(stderr=as_json), only)
    if as_json:
        data = {"outcomes": [as_data(o) for o in outcomes], "skipped": [c.name for c in skipped]}
        print(json.dumps(data, indent=1))
    else:
        console().print(suite_table(outcomes, skipped), markup=False)
    if not all(o.as_expected for o in outcomes):
        raise typer.Exit(1)


app.command()(report)
app.command()(replay)
app.command()(train)
app.command()(adapt)
app.command()(finetune)
app.command()(serve)


def print_markdown(text: str) -> None:
    """Print Markdown: formatted on a terminal, as plain text elsewhere."""
    screen = console()
    if screen.is_terminal:
        screen.print(Markdown(text))
    else:
        print(text, end="")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; errors of the library and of files become one line and exit code 2."""
    interrupts: list[int] = []
    before = signal.getsignal(signal.SIGINT)

    def interrupt(number: int, frame: Any) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    if before is signal.default_int_handler and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, interrupt)
    try:
        app(arguments)
    except (Exception, KeyboardInterrupt) as error:
        if interrupts or isinstance(error, KeyboardInterrupt):  # imports that are interrupted may raise anything
            print("qimeng: interrupted", file=sys.stderr)
            raise SystemExit(INTERRUPTED) from None
        if not isinstance(error, QimengError | OSError):
            raise
        code = error.code if isinstance(error, QimengError) else "file"
        print(f"qimeng: {error} [{code}]", file=sys.stderr)
        raise SystemExit(2) from None
    except SystemExit as ended:
        if ended.code == INTERRUPTED:
            print("qimeng: interrupted", file=sys.stderr)
        raise
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    main()


__all__ = ["actions", "before_a_command", "describe", "devices", "doctor", "main", "optimize", "print_markdown", "show"]
