"""Lets the tests here import stub_core and byte_tokenizer, which lie with the engine's."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
