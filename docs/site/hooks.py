"""What MkDocs asks while it builds the site: pages made from the library itself, and links out of `docs/`.

Deals in files of the site. Knows nothing about how a page is made (`pages.py` beside it).
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]

COPIED = {
    "benchmarks/README.md": "results.md",
    "benchmarks/trust.md": "trust.md",
    "experiments/README.md": "experiments.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
"""Documents of the repository that become pages."""

_LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)((?:#[^)]*)?)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made from the library and from documents elsewhere."""
    for name, make in _pages().items():
        files.append(File.generated(config, name, content=make()))
    for path, name in COPIED.items():
        text = _LINK.sub(lambda found: _target(found, Path(path).parent), (ROOT / path).read_text())
        files.append(File.generated(config, name, content=text))
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        text = _LINK.sub(lambda found: _target(found, Path("notebooks")), _notebook(path))
        files.append(File.generated(config, f"{path.stem}.md", content=text))
    return files


def _notebook(path: Path) -> str:
    """A notebook as a page: its texts, its code, and the text of its stored outputs."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"````python\n{source}\n````")
        for output in cell.get("outputs", ()):
            shown = "".join(output.get("text") or output.get("data", {}).get("text/plain", ""))
            parts.append(f"````text\n{shown.rstrip()}\n````")
    return "\n\n".join(parts) + "\n"


def _pages() -> dict[str, Any]:
    """The pages of the file beside this one; MkDocs loads this file without its folder."""
    spec = importlib.util.spec_from_file_location("qimeng_site_pages", Path(__file__).with_name("pages.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    found: dict[str, Any] = module.PAGES
    return found


def on_page_markdown(markdown: str, page: Any, **unused: Any) -> str:
    """Let links from `docs/` to documents elsewhere lead to their pages."""
    if page.file.generated_by:
        return markdown
    return _LINK.sub(lambda found: _target(found, Path("docs")), markdown)


def _target(found: re.Match[str], folder: Path) -> str:
    """A link seen from `folder` of the repository, as the site has it; plain text where the site has no such page."""
    path, anchor = found.groups()
    whole = (ROOT / folder / path).resolve()
    name = str(whole.relative_to(ROOT)) if whole.is_relative_to(ROOT) else path
    if name in COPIED:
        return f"]({COPIED[name]}{anchor})"
    if whole.parent == ROOT / "notebooks" and whole.suffix == ".ipynb":
        return f"]({whole.stem}.md{anchor})"
    if name == "README.md":
        return "](index.md)"
    if name.startswith("docs/") and whole.exists():
        return f"]({name.removeprefix('docs/')}{anchor})"
    return "](glossary.md#files)"
