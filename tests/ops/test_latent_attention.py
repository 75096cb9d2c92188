"""Latent attention of prompts whose keys and values are made in several chunks, or fit into none."""

from __future__ import annotations

import pytest
import torch

from graphllm.config import Target
from graphllm.ir.op import CallSite
from graphllm.ir.registry import load_ops
from graphllm.ir.testing import Maker
from graphllm.ir.testing.check import cases_of, relative_error

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs Triton's interpreter")


@pytest.mark.parametrize("chunks", [2, 4])
def test_chunks(chunks: int) -> None:
    """Prompts that end within a chunk, go on in the next one, and are too long for all of them."""
    op = load_ops()["latent_attention"]
    case = next(c for c in cases_of(op) if c.name == "prompts_ragged")
    maker = Maker(torch.Generator().manual_seed(0), torch.device("cpu"), torch.float32)
    args = op.bind((), case.inputs(maker))
    truth = op.reference(**{n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in args.items()})
    impl = op.impls["triton_prefill"]
    site = CallSite(args, Target("cuda", ("sm_90", "sms_2"), ""), case.bucket)
    found = impl.fn(**args, **{**impl.configs(site)[0], "chunk": 32, "chunks": chunks})
    assert relative_error(found, truth) < case.tolerance["float32"]
