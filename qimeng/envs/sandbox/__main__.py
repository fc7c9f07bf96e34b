"""`python -m qimeng.envs.sandbox LEVEL FOLDER`: enter the sandbox and print what came of each layer."""

from __future__ import annotations

import sys

from qimeng.envs.sandbox.sandbox import main

if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
