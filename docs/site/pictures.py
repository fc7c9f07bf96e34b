"""Makes the pictures of the documentation: reports in headless Chromium, at desktop and phone width.

    python docs/site/pictures.py runs/mine rows.jsonl

Deals in one result's folder and one file of rows. Needs Debian's chromium. Writes `docs/report.png` and `docs/run.png`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from qimeng.report import report

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars"
).split()
SIZE = "1280,1500"


def picture(source: Path, out: Path) -> None:
    """Write the picture of the report of `source`."""
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("chromium is not installed: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(report(source))
        flags = [*FLAGS, f"--user-data-dir={folder}/profile", f"--window-size={SIZE}", f"--screenshot={out}"]
        subprocess.run([chromium, *flags, f"file://{page}"], check=True, capture_output=True)


if __name__ == "__main__":
    here = Path(__file__).resolve().parents[1]
    picture(Path(sys.argv[1]), here / "report.png")
    picture(Path(sys.argv[2]), here / "run.png")
