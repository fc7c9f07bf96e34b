"""Where a key comes from: the environment, or a file that only its owner can read.

Deals in environment variables and one file. No object stores a key; it is read when a connection is made.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from qimeng.coder.llm.chat import ChatError

OPENAI_HOST = "api.openai.com"
KEYRING = "~/.config/qimeng/keys.toml"


def key_for(base_url: str | None, environment: Mapping[str, str] | None = None) -> str | None:
    """The key for the server at `base_url`, OpenAI's own where None.

    The first of: ``QIMENG_API_KEY``; ``OPENAI_API_KEY``, for OpenAI's own server alone; the host's line in the keyring
    file (``"api.example.com" = "key"``, or with its port), which ``QIMENG_KEYRING`` names.

    Returns:
        The key, or None where there is none: servers on one's own machine need none.

    Raises:
        ChatError: (``"authentication"``) others may read the keyring, or it is no TOML; the message has no key.
    """
    environment = os.environ if environment is None else environment
    if environment.get("QIMENG_API_KEY"):
        return environment["QIMENG_API_KEY"].strip()
    parts = urlsplit(base_url or environment.get("OPENAI_BASE_URL") or f"https://{OPENAI_HOST}")
    if environment.get("OPENAI_API_KEY") and (base_url is None or parts.hostname == OPENAI_HOST):
        return environment["OPENAI_API_KEY"].strip()
    keys = _keyring(Path(environment.get("QIMENG_KEYRING") or KEYRING).expanduser())
    found = keys.get(parts.netloc.rpartition("@")[2]) or keys.get(parts.hostname or "")
    return found.strip() if found else None


def check_reachable(base_url: str | None) -> None:
    """Refuse what cannot be reached, before any work starts.

    Raises:
        ChatError: (``"setup"``) `base_url` is no URL; (``"authentication"``) OpenAI's own server, without a key.
    """
    parts = urlsplit(base_url or os.environ.get("OPENAI_BASE_URL") or f"https://{OPENAI_HOST}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ChatError(f"{base_url!r} is no URL of a server; write it as http://localhost:8000/v1", "setup")
    if parts.hostname == OPENAI_HOST and not key_for(base_url):
        text = f"{OPENAI_HOST} wants a key: set OPENAI_API_KEY, or name another server (--base-url)"
        raise ChatError(text, "authentication")


def _keyring(path: Path) -> dict[str, str]:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_mode & 0o077 or status.st_uid != os.geteuid():
                text = f"{path} can be read by others; make it yours alone (chmod 600 {path}), and think of a new key"
                raise ChatError(text, "authentication")
            data = tomllib.load(file)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):  # a parser's message would quote the line
        data = None
    if data is None or not all(isinstance(value, str) for value in data.values()):
        raise ChatError(f'{path} is no list of keys: each line must read "host" = "key"', "authentication")
    return data


__all__ = ["KEYRING", "OPENAI_HOST", "check_reachable", "key_for"]
