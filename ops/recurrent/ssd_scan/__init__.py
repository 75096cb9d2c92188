"""ssd_scan: specification in op.py; a C++ kernel for CPUs and a Triton kernel."""

from graphllm.ops.recurrent.ssd_scan import cpu, triton_ssd_scan  # noqa: F401
from graphllm.ops.recurrent.ssd_scan.op import ssd_scan

__all__ = ["ssd_scan"]
