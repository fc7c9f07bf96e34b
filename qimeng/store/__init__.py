"""The store: everything that was tried and its outcome, keyed by content hashes."""

from qimeng.store.database import SCHEMA_VERSION
from qimeng.store.rows import (
    ACCIDENT,
    Conditions,
    StoredAttempt,
    StoredStep,
    content_hash,
    evaluation_key,
    reply_key,
    subject_of,
)
from qimeng.store.store import Store

__all__ = [
    "ACCIDENT",
    "SCHEMA_VERSION",
    "Conditions",
    "Store",
    "StoredAttempt",
    "StoredStep",
    "content_hash",
    "evaluation_key",
    "reply_key",
    "subject_of",
]
