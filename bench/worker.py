"""A process that runs one function: `python -m bench.worker call|serve MODULE FUNCTION ARGUMENTS`.

call: the function's result goes to stdout as JSON. serve: its first argument is the `Commands` of the process.
"""

from __future__ import annotations

import importlib
import json
import sys

from bench.process import Commands


def main() -> None:
    """Do what the arguments say."""
    how, module, name, arguments = sys.argv[1:]
    commands, function = Commands(), getattr(importlib.import_module(module), name)
    if how == "serve":
        function(commands, *json.loads(arguments))
    else:
        commands.answer(function(*json.loads(arguments)))


if __name__ == "__main__":
    main()
