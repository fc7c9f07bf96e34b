"""What the tests of clients share."""

from __future__ import annotations

import functools
import ssl
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def one_bundle_of_certificates() -> Iterator[None]:
    """Read once: every client reads it anew, and none here leaves this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
        yield
