"""The command line of the evaluation service: `qimeng serve`.

Deals in arguments and printing. Knows nothing about HTTP or how anything is judged.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qimeng.cli_cluster import Cluster, Generation
from qimeng.cli_console import console
from qimeng.service.errors import ServiceError

if TYPE_CHECKING:
    from rich.console import Console

    from qimeng.service.tokens import Tokens

PORT = 8460


def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = PORT,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="File with a line `NAME TOKEN` for each client; made with a new token where it is missing. "
            "Default: the variable QIMENG_SERVICE_TOKEN."
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Evaluations at a time on each GPU.")] = 1,
    gpus: Annotated[int, typer.Option(min=0, help="GPUs of this machine to use; 0 for all.")] = 0,
    device: Annotated[
        str, typer.Option(help="Name of a device (see `qimeng devices`). Default: this machine's GPU.")
    ] = "",
    seconds: Annotated[float, typer.Option(min=1, help="Seconds that one evaluation may take.")] = 600.0,
    reference_seconds: Annotated[float, typer.Option(min=1, help="Seconds that loading a reference may take.")] = 120.0,
    queue: Annotated[int, typer.Option(min=1, help="Open submissions of one client at a time.")] = 64,
    answers: Annotated[
        Path | None,
        typer.Option(help="File in which answers are kept, so that they are known after a restart. Default: memory."),
    ] = None,
    cluster: Cluster = "",
    generation: Generation = "",
) -> None:
    """Judge kernels for others over HTTP: are they right, how fast, and by their own work? Ctrl-C ends it."""
    from importlib.util import find_spec

    if find_spec("fastapi") is None or find_spec("uvicorn") is None:
        raise ServiceError("`qimeng serve` needs the extra `service`: pip install 'qimeng[service]'")
    from qimeng.cluster.gpus import ClusterError
    from qimeng.device import device_named
    from qimeng.service.hosting import Settings
    from qimeng.service.limits import Limits
    from qimeng.service.server import Place, check_address, run

    if cluster and gpus:
        raise ClusterError("--gpus counts the GPUs of this machine; with --cluster, all of one --generation are used")
    if device and not device.startswith("cuda"):
        device_named(device)
    screen = console()
    tokens = _tokens(token_file, screen)
    check_address(host, tokens)
    place = Place(jobs, gpus, cluster, generation, Settings(device, reference_seconds))
    screen.print(f"serving on http://{host}:{port}{'' if tokens else ', for every process of this machine'}")
    run(place, tokens, host, port, Limits(per_client=queue, seconds=seconds), answers)


def _tokens(path: Path | None, screen: Console) -> Tokens | None:
    """Those of the file, or of the environment; None without either."""
    from qimeng.service.tokens import VARIABLE, Tokens, make_token, read_tokens

    if path is None:
        token = os.environ.pop(VARIABLE, "")  # no process that is started inherits it
        return Tokens({"client": token}) if token else None
    if not path.exists():
        screen.print(f"a new token, shown this once and kept in {path}: {make_token(path)}", soft_wrap=True)
    return read_tokens(path)


__all__ = ["serve"]
