"""Calls a function of a module, in a process of its own: python -m tests.integration.calling MODULE NAME."""

import sys
from importlib import import_module

if __name__ == "__main__":
    getattr(import_module(sys.argv[1]), sys.argv[2])()
