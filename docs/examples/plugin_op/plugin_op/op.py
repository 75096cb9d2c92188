from torch import Tensor

from graphllm.ir import Cost, nbytes, op


@op(cost=lambda x_TF: Cost(2 * nbytes(x_TF), 2 * x_TF.numel()))
def squared_relu(x_TF: Tensor) -> Tensor:
    """max(x, 0)^2: [T, F] in x's dtype, contiguous.

    x_TF [T, F]; rows may be strided. The square is rounded once. Source: So et al. 2021 (Primer).
    """
    return x_TF.relu().square().contiguous()
