"""What the ops of experts take: their matrices, who chose them, their adapters, and what the sum is added to."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from graphllm.ops.encodings.encoded_weights import span_of


def parts_of(activation: str) -> int:
    """Matrices of F rows in an expert's first product: a gate and up, or up alone."""
    return 1 if activation == "relu2" else 2


class Experts(NamedTuple):
    """The matrices of N experts and what lies between their two products.

    gate_up_N2FD: of each expert the rows of the gate before the rows of up, [N, 2F, D]; of "relu2" up's alone,
        [N, F, D], and 2F is F in all that belongs to them.
    down_NDF: [N, D, F].
    activation: "silu", "gelu_tanh", "clamped" or "relu2".
    limit: the bound of "clamped".
    gate_up_bias_N2F, down_bias_ND: added to the products, [N, 2F] and [N, D].
    gate_up_scales_NG2F, gate_up_zeros_NG2F, down_scales_NGD, down_zeros_NGD: of encoded matrices, for each expert as
        `graphllm.ops.encodings.encoded_weights.decoded` says. A decoded matrix may be rounded to x's dtype.
    form: the kind of the codes, empty for plain numbers.
    group: inner entries with one scale, 0 for a whole row.
    """

    gate_up_N2FD: Tensor
    down_NDF: Tensor
    activation: str = "silu"
    limit: float = 0.0
    gate_up_bias_N2F: Tensor | None = None
    down_bias_ND: Tensor | None = None
    gate_up_scales_NG2F: Tensor | None = None
    gate_up_zeros_NG2F: Tensor | None = None
    down_scales_NGD: Tensor | None = None
    down_zeros_NGD: Tensor | None = None
    form: str = ""
    group: int = 0

    @property
    def sizes(self) -> tuple[int, int, int]:
        """N, D and F."""
        return self.gate_up_N2FD.shape[0], self.down_NDF.shape[1], self.gate_up_N2FD.shape[1] // self.parts

    @property
    def parts(self) -> int:
        """Matrices of F rows in the first product."""
        return parts_of(self.activation)

    @property
    def weights(self) -> tuple[Tensor, Tensor]:
        """The matrices of the first and of the second product."""
        return self.gate_up_N2FD, self.down_NDF

    @property
    def biases(self) -> tuple[Tensor | None, Tensor | None]:
        """The biases of the first and of the second product."""
        return self.gate_up_bias_N2F, self.down_bias_ND

    @property
    def scales(self) -> tuple[Tensor | None, Tensor | None]:
        """The scales of the first and of the second product."""
        return self.gate_up_scales_NG2F, self.down_scales_NGD

    @property
    def zeros(self) -> tuple[Tensor | None, Tensor | None]:
        """The zeros of the first and of the second product."""
        return self.gate_up_zeros_NG2F, self.down_zeros_NGD

    def encoding(self, i: int, inner: int) -> dict[str, Any]:
        """Constants of the first or second product that say how its weights are encoded."""
        scales, zeros = self.scales[i], self.zeros[i]
        return {
            "FORM": self.form, "GROUP": self.group, "ZEROS": zeros is not None,
            "GROUPS": 1 if scales is None else scales.shape[1],
            "WEIGHT_ROW": self.weights[i].shape[2],
            "SPAN": span_of(self.form, inner, self.group) if self.form else 0,
        }  # fmt: skip


class Route(NamedTuple):
    """Who computes each token.

    weights_TA: the factor of what each expert gives, [T, A] float32.
    experts_TA: the experts of each token, all different, [T, A] int32. A negative number is none, and counts nothing.
    """

    weights_TA: Tensor
    experts_TA: Tensor


class ExpertLora(NamedTuple):
    """The tables of L adapters of rank r, and the entry of each token. Entry 0 is never read.

    gate_up_lora_a_LNRD: r rows for the gate before r rows for up, [L, N, 2r, D] in x's dtype, as the other tables; up's
        alone where there is no gate.
    gate_up_lora_b_LNrO: [L, N, r, 2F], or [L, N, r, F].
    down_lora_a_LNrF: [L, N, r, F].
    down_lora_b_LNrD: [L, N, r, D].
    adapter_ids_T: [T] int32, 0 for tokens without an adapter.
    """

    gate_up_lora_a_LNRD: Tensor
    gate_up_lora_b_LNrO: Tensor
    down_lora_a_LNrF: Tensor
    down_lora_b_LNrD: Tensor
    adapter_ids_T: Tensor

    @property
    def tables(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The four tables, A before B of each product."""
        return self.gate_up_lora_a_LNRD, self.gate_up_lora_b_LNrO, self.down_lora_a_LNrF, self.down_lora_b_LNrD

    @property
    def a(self) -> tuple[Tensor, Tensor]:
        """A of the first and of the second product."""
        return self.gate_up_lora_a_LNRD, self.down_lora_a_LNrF

    @property
    def b(self) -> tuple[Tensor, Tensor]:
        """B of the first and of the second product."""
        return self.gate_up_lora_b_LNrO, self.down_lora_b_LNrD

    @property
    def rank(self) -> int:
        """r."""
        return self.down_lora_a_LNrF.shape[2]


LORA_TABLES = ExpertLora._fields[:4]


class Residual(NamedTuple):
    """What the experts' sum is added to, and the norm before them.

    residual_TD: [T, D] in x's dtype.
    norm_D: the weight of the `rms_norm` of x that experts get, [D]; None where they get x itself.
    eps: of that norm.
    """

    residual_TD: Tensor
    norm_D: Tensor | None = None
    eps: float = 0.0
