"""How processes that this one starts find the modules that it finds: a user's functions and classes among them."""

from __future__ import annotations

import os
import sys


def import_path() -> str:
    """What PYTHONPATH must be for them."""
    return os.pathsep.join(entry or os.getcwd() for entry in sys.path)
