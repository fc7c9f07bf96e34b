"""The version of this library, whether it is installed or used from its folder."""

VERSION = "0.1.0"
"""The same as in ``pyproject.toml``."""

__all__ = ["VERSION"]
