"""A kernel's limit of registers, as it goes from PTX into a cubin."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import triton

from graphllm.compile.inductor import with_registers

_VALUES = 96
_LOADS = "".join(f"ld.volatile.global.f32 %f{i}, [%rd1+{4 * i}];\n" for i in range(_VALUES))
_STORES = "".join(f"st.volatile.global.f32 [%rd1+{4 * i}], %f{i};\n" for i in reversed(range(_VALUES)))
PTX = f""".version 8.4
.target sm_90a
.address_size 64
.visible .entry reversed_order(
.param .u64 to
)
.reqntid 128
{{
.reg .f32 %f<{_VALUES}>;
.reg .b64 %rd<2>;
ld.param.u64 %rd1, [to];
{_LOADS}{_STORES}ret;
}}
"""  # all values are held at once


def _registers(cubin: bytes, folder: Path) -> int:
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    tool = Path(triton.knobs.nvidia.cuobjdump.path)
    printed = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True).stdout
    found = re.search(r"reversed_order.*?REG:(\d+)", printed, re.DOTALL)
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize("most", [40, 64])
def test_a_kernel_gets_no_more(most: int, tmp_path: Path) -> None:
    assert _registers(with_registers(PTX, 255), tmp_path) > _VALUES
    assert _registers(with_registers(PTX, most), tmp_path) <= most
