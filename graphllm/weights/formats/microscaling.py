"""Four-bit floats (E2M1) with a small scale for each few of them.

mxfp4: a power of two for 32 (OCP Microscaling Formats 1.0), as GPT-OSS stores its experts: ``_blocks`` and ``_scales``
after the name. mxfp4_packed: the same in compressed-tensors' names. nvfp4: an E4M3 scale for 16, divided by a scale of
the whole matrix as compressed-tensors stores it; nvfp4_modelopt: multiplied with it, as NVIDIA's Model Optimizer does.
``_static``: with the scale that activations were divided by, which does not change the weight.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from graphllm.host.libraries import Libraries
from graphllm.ops.encodings.encoded_weights import packed
from graphllm.weights.encodings import Encoding, Part, register_encoding
from graphllm.weights.formats.bits import e2m1, nibbles, spread


def _mxfp4(name: str, values: str, scales: str) -> Encoding:
    def decode(parts: Mapping[str, Tensor], rows: int, inner: int) -> Tensor:
        powers = parts["scales"].int().sub(127).float().exp2()
        return e2m1(nibbles(parts["values"])) * spread(powers, inner)

    def repack(
        parts: Mapping[str, Tensor], rows: int, inner: int, libraries: Libraries | None = None
    ) -> Mapping[str, Tensor]:
        return {"values": packed(nibbles(parts["values"]), "e2m1", 32), "scales": parts["scales"].T.contiguous()}

    return Encoding(
        name,
        (
            Part("values", "uint8", lambda rows, inner: (rows, inner // 2), values),
            Part("scales", "uint8", lambda rows, inner: (rows, inner // 32), scales),
        ),
        (1, 32), None, decode, repacked=(("e2m1-32", repack),),
    )  # fmt: skip


def _nvfp4(name: str, values: str, whole: str, static: str | None, divided: bool) -> Encoding:
    def decode(parts: Mapping[str, Tensor], rows: int, inner: int) -> Tensor:
        scales, one = parts["scales"].float(), parts["whole"].float()
        return e2m1(nibbles(parts["values"])) * spread(scales / one if divided else scales * one, inner)

    parts = [
        Part("values", "uint8", lambda rows, inner: (rows, inner // 2), values),
        Part("scales", "float8_e4m3fn", lambda rows, inner: (rows, inner // 16), "{stem}.weight_scale"),
        Part("whole", "float32", lambda rows, inner: (1,), whole),
    ]
    if static is not None:
        parts.append(Part("input_scale", "float32", lambda rows, inner: (1,), static))
    return Encoding(name, tuple(parts), (1, 16), None, decode)


register_encoding(_mxfp4("mxfp4", "{source}_blocks", "{source}_scales"))
register_encoding(_mxfp4("mxfp4_packed", "{stem}.weight_packed", "{stem}.weight_scale"))
for _end, _static in (("", False), ("_static", True)):
    register_encoding(
        _nvfp4(
            f"nvfp4{_end}", "{stem}.weight_packed", "{stem}.weight_global_scale",
            "{stem}.input_global_scale" if _static else None, divided=True,
        )
    )  # fmt: skip
    register_encoding(
        _nvfp4(
            f"nvfp4_modelopt{_end}", "{stem}.weight", "{stem}.weight_scale_2",
            "{stem}.input_scale" if _static else None, divided=False,
        )
    )  # fmt: skip
