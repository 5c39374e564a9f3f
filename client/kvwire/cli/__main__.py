"""`python -m kvwire.cli`: the command without its script, for programs that start it."""

from __future__ import annotations

import sys

from kvwire.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
