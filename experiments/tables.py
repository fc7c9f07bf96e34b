"""Every table that the documents of this repository show: those of benchmark rows and those of the experiments.

Deals in names of views and the functions that read their rows. Knows nothing about how figures are computed.
"""

from __future__ import annotations

from pathlib import Path

from experiments.beside import BESIDE, read_beside
from experiments.cluster.views import CLUSTERS
from experiments.languages import LANGUAGE_TABLES, read_languages
from experiments.planners.bound import BOUNDS, read_bounds
from experiments.planners.replay import read_replays
from experiments.planners.summary import REPLAYS
from experiments.resized import RESIZED
from experiments.rivals import RIVALS
from experiments.trust.journal import read_journal
from experiments.trust.product_views import PRODUCTS
from experiments.trust.views import JOURNALS
from experiments.writer.judging import WRITERS
from experiments.writer.judging import read_rows as read_judged
from experiments.writer.turns import TURNS, read_conversations
from qimeng.bench.row import read_rows
from qimeng.bench.tables import VIEWS, Kinds
from qimeng.bench.tables import render as render_kinds

KINDS: Kinds = (
    (VIEWS | RESIZED, read_rows),
    (JOURNALS | PRODUCTS | CLUSTERS, read_journal),
    (REPLAYS, read_replays),
    (BOUNDS, read_bounds),
    (WRITERS, read_judged),
    (TURNS, read_conversations),
    (BESIDE | RIVALS, read_beside),
    (LANGUAGE_TABLES, read_languages),
)
"""What a marker may ask for, and how the rows are read that it is made of."""


def render(text: str, root: Path) -> str:
    """`text` with every marked table made anew; see `qimeng.bench.tables.render`."""
    return render_kinds(text, root, KINDS)


__all__ = ["KINDS", "render"]
