"""The intermediate representation: registered ops, weights as data, the contracts of models and passes."""

from graphllm.ir.kernels import CKernel, launch_triton, zeroed
from graphllm.ir.model import Attn, Model, Step, register_model, select_rows
from graphllm.ir.op import CallSite, Cost, Impl, Op, nbytes, op
from graphllm.ir.weight import Weight

__all__ = [
    "Attn", "CKernel", "CallSite", "Cost", "Impl", "Model", "Op", "Step", "Weight",
    "launch_triton", "nbytes", "op", "register_model", "select_rows", "zeroed",
]  # fmt: skip
