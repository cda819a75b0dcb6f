"""Entry point of `python -m pydist`, for launchers that start a Python module."""

from __future__ import annotations

import sys

from pydist.cli.main import main

sys.exit(main())
