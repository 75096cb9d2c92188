"""Measure model types, each in a process of its own, and write the page.

`python -m bench.coverage` measures those that docs/models.json lacks, and `python -m bench.coverage TYPE ...` some
again. Each result is written at once, so a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import tempfile
import time
import warnings
from pathlib import Path

import msgspec
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from bench.coverage.check import check, warm
from bench.coverage.page import PAGE, Table, page
from bench.coverage.row import Row

_SECONDS, _BYTES = 180, 24 << 30  # of one type; most of the addresses are libraries


def measure(model_type: str) -> Row:
    """The row of a type, made by a process that ends after some time."""
    with tempfile.NamedTemporaryFile() as file:
        child = os.fork()
        if not child:
            _in_child(model_type, file.name)
        status, end = 0, time.monotonic() + _SECONDS
        while not (done := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > end:
                os.kill(child, signal.SIGKILL)
                end = float("inf")
            time.sleep(0.05)
        status = done[1]
        try:
            return msgspec.json.decode(Path(file.name).read_bytes(), type=Row)
        except msgspec.DecodeError:
            return Row(model_type, untried=f"no result: the process ended with {os.waitstatus_to_exitcode(status)}")


def _in_child(model_type: str, file: str) -> None:
    """Write a row, and end the process."""
    resource.setrlimit(resource.RLIMIT_AS, (_BYTES, _BYTES))
    try:
        Path(file).write_bytes(msgspec.json.encode(check(model_type)))
    finally:
        os._exit(0)


def main() -> None:
    """Measure what is asked for, and write both files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", metavar="TYPE")
    wanted = parser.parse_args().types
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    warm()
    table = Table.read()
    if table.transformers != transformers.__version__:
        table = Table(transformers.__version__)
    names = list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    for name in wanted or [n for n in names if n not in table.rows]:
        started = time.monotonic()
        table.rows[name] = row = measure(name)
        table.write()
        states = [row.untried[:60], *(r.state for r in (row.ours, row.traced) if r is not None)]
        print(f"{name:28} {time.monotonic() - started:5.1f} s  {' '.join(filter(None, states))}", flush=True)
    PAGE.write_text(page(table))


if __name__ == "__main__":
    main()
