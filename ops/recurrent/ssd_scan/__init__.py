"""ssd_scan: specification in op.py, kernels in files of their own."""

import importlib.util

from graphllm.ops.recurrent.ssd_scan import cpu, tuning  # noqa: F401
from graphllm.ops.recurrent.ssd_scan.op import ssd_scan

if importlib.util.find_spec("triton"):
    from graphllm.ops.recurrent.ssd_scan import gpu  # noqa: F401

__all__ = ["ssd_scan"]
