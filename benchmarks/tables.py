"""Make the tables in documents anew from the rows that their markers name.

    python -m benchmarks.tables benchmarks/*.md docs/training.md experiments/README.md

`qimeng bench tables` does the same for tables of benchmark rows alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from experiments.tables import render


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("documents", type=Path, nargs="+", help="Markdown files with bench markers")
    parser.add_argument("--root", type=Path, default=Path(), help="folder that the markers' paths start from")
    arguments = parser.parse_args()
    for document in arguments.documents:
        text = document.read_text()
        new = render(text, arguments.root)
        print(f"{document}: {'unchanged' if new == text else 'written'}")
        if new != text:
            document.write_text(new)


if __name__ == "__main__":
    main()
