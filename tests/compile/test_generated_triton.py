"""Triton kernels that Inductor writes, on their way into an artifact: compiled without a GPU, and described for a
launch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.waiting import PATIENCE

PROGRAM = """
import json
from types import SimpleNamespace

import torch
from torch.fx.experimental.proxy_tensor import make_fx

properties = SimpleNamespace(
    major=9, minor=0, multi_processor_count=132, regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048,
    warp_size=32, gcnArchName="",
)
torch.cuda._lazy_init = lambda: None
torch.cuda.get_device_properties = lambda device=None: properties
torch.cuda.get_device_capability = lambda device=None: (9, 0)
torch.cuda.current_device = lambda: 0
torch.cuda.device_count = lambda: 1

import triton

from graphllm.compile.codegen import inductor
from graphllm.compile.codegen.cubins import TargetOnly
from graphllm.compile.codegen.translate import translate
from graphllm.config import Bucket, Target
from graphllm.ir.graph import Shapes, TensorSpec

triton.runtime.driver.set_active(TargetOnly(Target("cuda", ("sm_90", "sms_132"))))
shapes = Shapes("cuda", Bucket("mixed", 2, 512))
x = shapes.tensor(TensorSpec.contiguous("bfloat16", "T", 96))
y = shapes.tensor(TensorSpec.contiguous("bfloat16", "T", 7))
ids = shapes.tensor(TensorSpec.contiguous("int32", "T"))


def piece(x, y, ids):
    return y.float() * ids.unsqueeze(1) + 1, x.float().square().sum(1)


with shapes.mode, torch.no_grad():
    graph = make_fx(piece, decomposition_table=inductor.decompositions())(x, y, ids)
torch.cuda.is_available = lambda: True
bundle = translate(inductor.generate(graph, [x, y, ids], shapes), [x, y, ids], shapes)
made = {name: inductor.cubin(k["generated"], k["source"]) for name, k in bundle.kernels.items()}
text = {name: {**kernel, "cubin": kernel["cubin"][:4].hex()} for name, kernel in made.items()}
print(json.dumps({"kernels": text, "code": bundle.code}))
"""


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    """In another process, as Triton's interpreter has replaced what kernels are made of in this one."""
    native = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=native)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.thorough
def test_kernels_are_compiled_where_there_is_no_gpu(made: dict[str, Any]) -> None:
    kinds = sorted(name.split("_")[1] for name in made["kernels"])
    assert kinds == ["per", "poi"]  # a reduction whose row is one tile, and elementwise work
    for name, kernel in made["kernels"].items():
        assert bytes.fromhex(kernel["cubin"]) == b"\x7fELF"
        assert kernel["symbol"] == name
        assert not kernel["early"]


@pytest.mark.thorough
def test_a_launch_has_an_argument_for_each_name(made: dict[str, Any]) -> None:
    """And its grid covers all rows at any number of tokens."""
    launches = {name: arguments for kind, name, arguments in (c for c in made["code"] if c[0] == "kernel")}
    for name, kernel in made["kernels"].items():
        assert len(launches[name]) == len(kernel["names"]) == len(kernel["args"])
        for argument, kind in zip(launches[name], kernel["args"], strict=True):
            assert (argument[0] == "t") == (kind == "ptr")
        sizes = {n: a for n, a in zip(kernel["names"], launches[name], strict=True) if n == "xnumel"}
        programs = {}
        for tokens in (2, 512):
            numbers = {n: eval(str(a[1]), {"T": tokens}) for n, a in sizes.items()}
            programs[tokens] = eval(str(kernel["grid"][0]), numbers)
        assert 1 <= programs[2] < programs[512]
