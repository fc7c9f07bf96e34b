"""Where ``qimeng`` and ``python -m qimeng`` begin: Ctrl-C is one line even while the command line is imported."""

from __future__ import annotations

import os
import sys

from qimeng.openmp import waiting


def main() -> None:
    """Run the command line."""
    os.environ.update(waiting(os.environ))  # before PyTorch is imported
    try:
        from qimeng import cli
    except KeyboardInterrupt:
        print("qimeng: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    cli.main()


if __name__ == "__main__":
    main()


__all__ = ["main"]
