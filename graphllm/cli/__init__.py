"""The command line. Importing it, and `graphllm --help`, must not import torch: commands import what they need."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import sys


def command() -> None:
    """The ``graphllm`` command as a process: `main`, and where it has compiled, no more than that.

    Python takes itself apart at the end, and with the compiler's objects that lasts 1.5 s. What libraries have to do
    at the end is done before.
    """
    status = 1

    def leave() -> None:
        if "graphllm.compile.pipeline" in sys.modules:
            with contextlib.suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    atexit.register(leave)  # what is registered first is called last
    try:
        main()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise


def main() -> None:
    """What the ``graphllm`` command does; `graphllm.cli.endings` says how it ends.

    ``graphllm serve`` begins with the process of its engine, before the command line is read: on a GPU nothing takes
    longer than its import of torch.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that lacks a character shows its escape
        sys.stdout.reconfigure(errors="backslashreplace")
    from graphllm.cli.endings import endings
    from graphllm.engine.process.spawn import Child, end, spawn

    early: list[Child] = []
    with endings():
        try:
            if sys.argv[1:2] == ["serve"]:
                early.append(spawn())
            from graphllm.cli.app import command_line

            command_line()(obj=early)
        finally:
            end(early)
