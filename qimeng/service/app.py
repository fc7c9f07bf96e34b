"""The service's HTTP face: FastAPI's routes over the jobs.

Deals in paths, status numbers and JSON. Knows nothing about how anything is judged.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from qimeng.service.guard import CLIENT, App, Guard, error_of
from qimeng.service.jobs import Job, Jobs
from qimeng.service.limits import Refused
from qimeng.service.messages import Batch, Submission
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

    @app.post("/v1/batches")
    async def submit_all(batch: Batch, request: Request) -> JSONResponse:
        _check_number(jobs, len(batch.submissions))
        return JSONResponse({"evaluations": [_taken(jobs, one, _client(request)) for one in batch.submissions]}, 202)

    @app.get(_PATH)
    async def find_all(ids: str, request: Request, wait: float = 0.0) -> JSONResponse:
        names = ids.split(",")
        _check_number(jobs, len(names))
        found = [_found(jobs, name, _client(request)) for name in names]
        await _wait(lambda: any(not isinstance(one, Job) or one.state.ended for one in found), wait)
        return JSONResponse({"evaluations": [_data(one) for one in found]})

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
        where = ".".join(str(part) for part in first["loc"][1:]) or "the body"
        return JSONResponse(error_of(Refused(422, "invalid", f"{where}: {first['msg']}"[:500])), 422)

    @app.exception_handler(HTTPException)
    async def failed(request: Request, error: HTTPException) -> JSONResponse:
        what = f"{request.method} {request.url.path}: {error.detail}"
        return JSONResponse(error_of(Refused(error.status_code, "invalid", what[:500])), error.status_code)

    return Guard(app, tokens, jobs.limits)


def _client(request: Request) -> str:
    return str(request.scope["state"][CLIENT])


def _check_number(jobs: Jobs, number: int) -> None:
    if number > jobs.limits.batch:
        raise Refused(413, "too-large", f"a request has at most {jobs.limits.batch} submissions, this one {number}")


def _taken(jobs: Jobs, submission: Submission, client: str) -> dict[str, Any]:
    """What is known of a submission of a batch, or why it was refused."""
    try:
        return _data(jobs.submit(submission, client))
    except Refused as refused:
        return _data(refused)


def _found(jobs: Jobs, job_id: str, client: str) -> Job | Refused:
    try:
        return jobs.find(job_id, client)
    except Refused as refused:
        return refused


async def _told(jobs: Jobs, job: Job, wait: float) -> JSONResponse:
    """What is known of a job, once it has ended or the client has waited long enough."""
    await _wait(lambda: job.state.ended, wait)
    return JSONResponse(_data(job), 200 if job.state.ended else 202)


async def _wait(until: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + min(max(seconds, 0.0), WAIT_S)
    while not until() and time.monotonic() < end:
        await asyncio.sleep(LOOK_S)


def _data(found: Job | Refused) -> dict[str, Any]:
    if isinstance(found, Refused):
        return error_of(found)
    answer = None if found.answer is None else asdict(found.answer)
    return {"id": found.id, "state": found.state.value, "known": found.known, "answer": answer}


__all__ = ["WAIT_S", "make_app"]
