from __future__ import annotations

import sys

from kvwire.cli.app import main

sys.exit(main())
