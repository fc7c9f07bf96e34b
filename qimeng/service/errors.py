"""The error of the evaluation service, of which its parts have their own kinds."""

from __future__ import annotations

from qimeng.errors import QimengError


class ServiceError(QimengError):
    """The service cannot be run, reached or asked as it was tried; the message says what to do."""

    code = "service"


__all__ = ["ServiceError"]
