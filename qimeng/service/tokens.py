"""The tokens by which the service knows its clients.

Deals in a file with a line for each client: a name and a token, or a token alone. Tokens are compared in constant time,
and only their hashes are kept. Knows nothing about HTTP.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from qimeng.service.errors import ServiceError

VARIABLE = "QIMENG_SERVICE_TOKEN"
"""Environment variable of a server's only token, or of a client's."""
LEAST = 16
"""Characters that a token has at least."""


class TokenError(ServiceError):
    """A file of tokens cannot be used; the message says what to change."""


class Tokens:
    """Who may ask.

    Args:
        tokens: name of each client to its token.

    Raises:
        TokenError: a token is too short, or there is none.
    """

    def __init__(self, tokens: Mapping[str, str]):
        short = [name for name, token in tokens.items() if len(token) < LEAST]
        if short or not tokens:
            raise TokenError(f"a token has at least {LEAST} characters" if short else "the file holds no token")
        self._hashes = {name: _hash(token) for name, token in tokens.items()}

    def client_of(self, token: str) -> str | None:
        """The name of the client whose token this is; None where it is nobody's. Every token takes the same time."""
        asked, found = _hash(token), None
        for name, known in self._hashes.items():
            if hmac.compare_digest(asked, known):
                found = name
        return found


def read_tokens(path: Path) -> Tokens:
    """The tokens of a file, with a line ``NAME TOKEN`` or ``TOKEN`` for each client; ``#`` begins a remark.

    Raises:
        TokenError: others than its owner may read it, or it holds no token.
    """
    if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise TokenError(f"others may read {path}: chmod 600 {path}")
    found: dict[str, str] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        name = words[0] if len(words) == 2 else f"client {number}"
        if len(words) > 2 or name in found:
            raise TokenError(f"{path}, line {number}: a name and a token, each name once")
        found[name] = words[-1]
    return Tokens(found)


def make_token(path: Path) -> str:
    """A new token, written into a file that only its owner may read.

    Raises:
        FileExistsError: there is such a file.
    """
    token = secrets.token_urlsafe(32)
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(file, "w") as opened:
        opened.write(f"client {token}\n")
    return token


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


__all__ = ["LEAST", "VARIABLE", "TokenError", "Tokens", "make_token", "read_tokens"]
