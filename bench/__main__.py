"""`python -m bench NAME [options]` runs the benchmark of that name."""

from __future__ import annotations

import pkgutil
import runpy
import sys

import bench


def main() -> None:
    """Run the module that the first argument names, with the others as its own."""
    names = [m.name for m in pkgutil.iter_modules(bench.__path__) if not m.name.startswith("_")]
    if len(sys.argv) < 2 or sys.argv[1] not in names:
        sys.exit(f"usage: python -m bench NAME [options], NAME one of {', '.join(names)}")
    name = sys.argv.pop(1)
    runpy.run_module(f"bench.{name}", run_name="__main__", alter_sys=True)


main()
