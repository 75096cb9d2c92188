from graphllm.config import Bucket
from graphllm.ir.testing import Case


def _case(T, F, size="small"):
    return Case(
        name=f"T{T}_F{F}",
        inputs=lambda make: {"x_TF": make.normal(T, F)},
        tolerance={"float32": 1e-7, "bfloat16": 4e-3},
        reason="one rounding of the square to the dtype",
        bucket=Bucket("decode", T, T),
        size=size,
    )


CASES = (_case(0, 8), _case(1, 48), _case(5, 33), _case(64, 4096, size="real"))
