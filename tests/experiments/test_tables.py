from pathlib import Path

from experiments.tables import render

ROOT = Path(__file__).resolve().parents[2]


def test_the_tables_in_the_documents_are_what_the_rows_give() -> None:
    documents = [d for where in (".", "docs", "benchmarks", "experiments") for d in (ROOT / where).glob("*.md")]
    stale = [str(d.relative_to(ROOT)) for d in documents if render(d.read_text(), ROOT) != d.read_text()]
    assert not stale, f"run: python -m benchmarks.kernelbench tables {' '.join(stale)}"
