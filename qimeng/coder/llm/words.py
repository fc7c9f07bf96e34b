"""The words of prompts: text files, one a section, which a user may replace.

Deals in files and their placeholders (`$name`; `$$` is a dollar sign). Knows nothing about the values.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from string import Template

from qimeng.errors import CoderError


class Words:
    """The texts of the sections, by name.

    Args:
        folder: files ``NAME.md`` here replace those of `qimeng/coder/llm/prompts`; an empty one leaves its section out.

    Raises:
        CoderError: the folder is not there, a file has a name that no section has, or asks for a place that its
            section does not fill; the message lists what there is.
    """

    def __init__(self, folder: str | Path | None = None):
        own = _package_texts()
        self._texts = {name: Template(text) for name, text in own.items()}
        if folder is None:
            return
        if not Path(folder).is_dir():
            raise CoderError(f"{folder} is no folder of prompts; copy the files to change from {home()}")
        for path in sorted(Path(folder).glob("*.md")):
            if path.stem not in own:
                raise CoderError(f"{path}: no section has this name; the sections are {', '.join(sorted(own))}")
            text = Template(path.read_text(encoding="utf-8"))
            places = set(Template(own[path.stem]).get_identifiers())
            wrong = [p for p in text.get_identifiers() if p not in places]
            if wrong or not text.is_valid():
                known = ", ".join(f"${p}" for p in sorted(places)) or "none"
                what = f"${wrong[0]} is no place" if wrong else "a dollar sign that begins no place is written $$"
                raise CoderError(f"{path}: {what}; the places of this section are: {known}")
            self._texts[path.stem] = text

    def fill(self, section: str, /, **values: str) -> str:
        """The section with its places filled in; what fills them is not looked at for further places."""
        return self._texts[section].substitute(values).strip()

    def leaves_out(self, section: str) -> bool:
        """Whether the file of the section is empty, so that there is no need to find out what would fill it."""
        return not self._texts[section].template.strip()


def home() -> str:
    """Where the package's own files are."""
    return str(files("qimeng.coder.llm").joinpath("prompts"))


@lru_cache(1)
def _package_texts() -> dict[str, str]:
    return {
        entry.name.removesuffix(".md"): entry.read_text(encoding="utf-8")
        for entry in files("qimeng.coder.llm").joinpath("prompts").iterdir()
        if entry.name.endswith(".md")
    }


__all__ = ["Words", "home"]
