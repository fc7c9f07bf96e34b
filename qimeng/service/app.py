"""The service's HTTP face: FastAPI's routes over the jobs.

Deals in paths, status numbers and JSON. Knows nothing about how anything is judged.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from qimeng.service.guard import CLIENT, App, Guard, error_of
from qimeng.service.jobs import Job, Jobs
from qimeng.service.limits import Refused
from qimeng.service.messages import Submission
from qimeng.service.tokens import Tokens

WAIT_S = 60.0
"""Longest that a request may wait for an answer."""
LOOK_S = 0.05
_PATH = "/v1/evaluations"


def make_app(jobs: Jobs, tokens: Tokens | None, about: dict[str, Any] | None = None) -> App:
    """The app, guarded.

    Args:
        jobs: that it serves.
        tokens: who may ask; None for anybody.
        about: what judges, for the metrics.
    """
    app = FastAPI(title="qimeng evaluation service", docs_url=None, redoc_url=None)
    began = time.time()

    @app.post(_PATH)
    async def submit(submission: Submission, request: Request, wait: float = 0.0) -> JSONResponse:
        return await _told(jobs, jobs.submit(submission, _client(request)), wait)

    @app.get(_PATH + "/{job_id}")
    async def find(job_id: str, request: Request, wait: float = 0.0) -> JSONResponse:
        return await _told(jobs, jobs.find(job_id, _client(request)), wait)

    @app.delete(_PATH + "/{job_id}")
    async def cancel(job_id: str, request: Request) -> JSONResponse:
        return await _told(jobs, jobs.cancel(job_id, _client(request)), 0.0)

    @app.get("/v1/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/v1/metrics")
    async def metrics() -> dict[str, Any]:
        return {**jobs.metrics(), "uptime_s": round(time.time() - began, 1), "judge": dict(about or {})}

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> JSONResponse:
        return JSONResponse(error_of(error), error.status)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:])
        return JSONResponse(error_of(Refused(422, "invalid", f"{where}: {first['msg']}"[:500])), 422)

    return Guard(app, tokens, jobs.limits)


def _client(request: Request) -> str:
    return str(request.scope["state"][CLIENT])


async def _told(jobs: Jobs, job: Job, wait: float) -> JSONResponse:
    """What is known of a job, once it has ended or the client has waited long enough."""
    until = time.monotonic() + min(max(wait, 0.0), WAIT_S)
    while not job.state.ended and time.monotonic() < until:
        await asyncio.sleep(LOOK_S)
    answer = None if job.answer is None else asdict(job.answer)
    data = {"id": job.id, "state": job.state.value, "known": job.known, "answer": answer}
    return JSONResponse(data, 200 if job.state.ended else 202)


__all__ = ["WAIT_S", "make_app"]
