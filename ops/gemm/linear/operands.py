"""What the ops of linear layers take: a matrix, plain or encoded, and the norm of the rows before it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Matrix(NamedTuple):
    """The matrix of a linear layer.

    weight_OI: [O, I], or its codes.
    bias_O: added to the product, [O].
    scales_GO, zeros_GO: of an encoded weight, as `graphllm.ops.encodings.encoded_weights.decoded` says. A decoded
        weight may be rounded to x's dtype.
    form: the kind of the codes, empty for plain numbers.
    group: inner entries with one scale, 0 for a whole row.
    """

    weight_OI: Tensor
    bias_O: Tensor | None = None
    scales_GO: Tensor | None = None
    zeros_GO: Tensor | None = None
    form: str = ""
    group: int = 0

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What a product reads of it."""
        return self.weight_OI, self.bias_O, self.scales_GO, self.zeros_GO

    def width(self, gated: bool) -> int:
        """Columns of the result: O, or with a gate half of that."""
        return self.weight_OI.shape[0] // (2 if gated else 1)


class Norm(NamedTuple):
    """The `rms_norm` of the rows before a product, with offset 0.

    norm_I: its weight, [I].
    eps: added to the mean of squares.
    """

    norm_I: Tensor
    eps: float = 0.0
