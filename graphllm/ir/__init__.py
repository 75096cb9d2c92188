"""The intermediate representation: registered ops, weights as data, the contracts of models and passes."""

from graphllm.ir.exchange import exchange
from graphllm.ir.externs import Extern
from graphllm.ir.gluon import GluonKernel, runs_gluon
from graphllm.ir.kernels import CKernel, zeroed
from graphllm.ir.model import (
    AttentionMetadata,
    ForwardContext,
    Graph,
    Model,
    all_models,
    register_derivation,
    register_model,
    select_rows,
)
from graphllm.ir.op import CallSite, Cost, Impl, Op, each_alone, nbytes, op
from graphllm.ir.triton import launch_triton
from graphllm.ir.weight import Weight
from graphllm.program.specs import InputSpec, OutputSpec, StateSpec

__all__ = [
    "AttentionMetadata", "CKernel", "CallSite", "Cost", "Extern", "ForwardContext", "GluonKernel", "Graph", "Impl",
    "InputSpec", "Model", "Op", "OutputSpec", "StateSpec", "Weight", "all_models", "each_alone", "exchange",
    "launch_triton", "nbytes", "op", "register_derivation", "register_model", "runs_gluon", "select_rows", "zeroed",
]  # fmt: skip
