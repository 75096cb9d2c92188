"""A tiny Llama in the quantized checkpoints of other programs: written by their own packages, or by formulas here that
share nothing with the engine's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

HIDDEN, WIDTH, GROUP = 64, 96, 32
Tensors = dict[str, Tensor]
_ONE = torch.ones(1)


class Format(NamedTuple):
    """config: the quantization_config. encode: from a matrix [rows, inner], the tensors behind a module's name, and the
    matrix that they stand for in float64."""

    config: dict[str, Any]
    encode: Callable[[Tensor], tuple[Tensors, Tensor]]


def words(numbers: Tensor, bits: int) -> Tensor:
    """int32 words [rows, ..] of a stream of unsigned integers [rows, count], the lowest bits first."""
    if 32 % bits == 0 and numbers.shape[1] % (32 // bits) == 0:  # none lies in two words
        parts = numbers.long().unflatten(1, (-1, 32 // bits)) << bits * torch.arange(32 // bits)
        return parts.sum(2).to(torch.uint32).view(torch.int32)
    rows = []
    for row in numbers.tolist():
        stream = sum(int(n) << bits * i for i, n in enumerate(row))
        count = -(-len(row) * bits // 32)
        rows.append([(stream >> 32 * i) & 0xFFFFFFFF for i in range(count)])
    return torch.tensor(rows, dtype=torch.int64).to(torch.uint32).view(torch.int32)


def grouped(matrix: Tensor, bits: int, of: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Integers [rows, inner], float16 scales and zero points [rows, groups]. of: the group of each column."""
    count, most = int(of.max()) + 1, (1 << bits) - 1
    columns = [matrix[:, of == g] for g in range(count)]
    low, high = (torch.stack([f(c, 1).values for c in columns], 1) for f in (torch.min, torch.max))
    scales = ((high - low) / most).half()
    zeros = (-low / scales.float()).round().clamp(1, most).int()
    integers = (matrix / scales.float()[:, of] + zeros[:, of]).round().clamp(0, most).int()
    return integers, scales, zeros


def _gptq(bits: int, by_activation: bool, less: int, g_idx: bool = True) -> Callable[[Tensor], tuple[Tensors, Tensor]]:
    """Frantar et al. 2022: weight = scale * (integer - zero). less: what is taken from stored zero points."""

    def encode(matrix: Tensor) -> tuple[Tensors, Tensor]:
        of = torch.arange(matrix.shape[1]) // GROUP
        if by_activation:
            of = of[torch.randperm(len(of), generator=torch.Generator().manual_seed(5))]
        integers, scales, zeros = grouped(matrix, bits, of)
        tensors = {
            "qweight": words(integers, bits).T,
            "qzeros": words((zeros - less).T, bits),
            "scales": scales.T,
            **({"g_idx": of.int()} if g_idx else {}),
        }
        return tensors, scales.double()[:, of] * (integers - zeros[:, of]).double()

    return encode


def symmetric(stored: int, bits: int = 4, g_idx: Tensor | None = None) -> Callable[[Tensor], tuple[Tensors, Tensor]]:
    """GPTQ with the zero point in the middle, which is stored as one of several programs' numbers."""

    def encode(matrix: Tensor) -> tuple[Tensors, Tensor]:
        of, half = torch.arange(matrix.shape[1]) // GROUP, 1 << bits - 1
        scales = torch.stack([c.abs().max(1).values for c in matrix.split(GROUP, 1)], 1).div(half - 1).half()
        integers = (matrix / scales.float()[:, of]).round().clamp(-half, half - 1).int()
        tensors = {
            "qweight": words(integers + half, bits).T,
            "qzeros": words(torch.full_like(scales, stored, dtype=torch.int32).T, bits),
            "scales": scales.T,
            **({} if g_idx is None else {"g_idx": g_idx[: matrix.shape[1]]}),
        }
        return tensors, scales.double()[:, of] * integers.double()

    return encode


def _awq(matrix: Tensor) -> tuple[Tensors, Tensor]:
    """Lin et al. 2023: rows 0, 2, 4, 6, 1, 3, 5, 7 of eight lie in a word, from the lowest bits on."""
    of = torch.arange(matrix.shape[1]) // GROUP
    integers, scales, zeros = grouped(matrix, 4, of)

    def turned(numbers: Tensor) -> Tensor:  # [rows, n] to words [n, rows / 8]
        order = [8 * i + j for i in range(len(numbers) // 8) for j in (0, 2, 4, 6, 1, 3, 5, 7)]
        return words(numbers[order].T, 4)

    tensors = {"qweight": turned(integers), "qzeros": turned(zeros), "scales": scales.T}
    return tensors, scales.double()[:, of] * (integers - zeros[:, of]).double()


def _float8(rows: int, inner: int, scale: str = "weight_scale", extra: Tensors | None = None) -> Any:
    """E4M3 times a scale for each block; 0: of all."""

    def encode(matrix: Tensor) -> tuple[Tensors, Tensor]:
        r, i = rows or matrix.shape[0], inner or matrix.shape[1]
        scales = torch.stack([torch.stack([c.abs().max() / 448 for c in band.split(i, 1)]) for band in matrix.split(r)])
        full = scales.repeat_interleave(r, 0)[: len(matrix)].repeat_interleave(i, 1)[:, : matrix.shape[1]]
        values = (matrix / full).to(torch.float8_e4m3fn)
        stored = scales.reshape(()) if not rows and not inner else scales
        return {"weight": values, scale: stored, **(extra or {})}, values.double() * full.double()

    return encode


def e2m1(packed: Tensor) -> Tensor:
    """float64 numbers of two codes a byte: sign, two bits of exponent, one of mantissa, the lower code first (OCP
    Microscaling Formats 1.0)."""
    codes = torch.stack([packed % 16, packed // 16], -1).flatten(-2).double()
    sign, exponent, half = 1 - 2 * (codes // 8), codes // 2 % 4, codes % 2
    return sign * torch.where(exponent == 0, half / 2, 2 ** (exponent - 1) * (1 + half / 2))


def _compressed(format_: str, extra: Tensors | None = None, **weights: Any) -> Format:
    """By the package of compressed-tensors."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    group = {"targets": ["Linear"], "weights": weights}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))

    def encode(matrix: Tensor) -> tuple[Tensors, Tensor]:
        args, compressor = scheme.weights, BaseCompressor.get_value_from_registry(format_)
        assert args is not None
        size = args.group_size or matrix.shape[1]
        parts = matrix.unflatten(1, (-1, size))
        given: Tensors = {}
        if args.strategy == "tensor_group":
            given["weight_global_scale"] = (448 * 6 / matrix.abs().max()).reshape(1)
        low, high = (parts, parts) if args.strategy != "tensor" else (matrix.flatten(), matrix.flatten())
        low, high = low.amin(-1), high.amax(-1)
        scales, zeros = calculate_qparams(low, high, args, global_scale=given.get("weight_global_scale"))
        if args.strategy == "tensor":
            scales = scales.reshape(1)
        state = {"weight": matrix, "weight_scale": scales, **given}
        if not args.symmetric:
            state["weight_zero_point"] = zeros.to(torch.int8)
        stored = compressor.compress(state, scheme)
        if args.num_bits == 4 and args.type == "float":  # the package's reader rounds to bfloat16
            scale = stored["weight_scale"]
            scale = 2.0 ** (scale.double() - 127) if scale.dtype == torch.uint8 else scale.double()
            scale = scale / given.get("weight_global_scale", _ONE).double()
            back = e2m1(stored["weight_packed"]) * scale.repeat_interleave(size, 1)
        else:
            back = compressor.decompress(dict(stored), scheme)["weight"].double()
        return {**stored, **(extra or {})}, back

    config = {"quant_method": "compressed-tensors", "format": format_, "ignore": ["lm_head"]}
    return Format({**config, "config_groups": {"group_0": group}}, encode)


def _bitsandbytes(kind: str, nested: bool) -> Format:
    """By the package; its own reader gives the numbers."""
    import bitsandbytes.functional as bnb

    def encode(matrix: Tensor) -> tuple[Tensors, Tensor]:
        if kind == "int8":
            values, scales, _ = bnb.int8_vectorwise_quant(matrix.half())
            stored = {"weight": values, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
            return stored, values.double() * scales.double().unsqueeze(1) / 127
        codes, state = bnb.quantize_4bit(matrix, blocksize=64, compress_statistics=nested, quant_type=kind)
        parts = {f"weight.{n}": t for n, t in state.as_dict(packed=True).items()}
        state.shape = torch.Size([matrix.numel() // 64, 64])  # its AVX-512 kernel wants rows of whole blocks
        return {"weight": codes, **parts}, bnb.dequantize_4bit(codes, state).view_as(matrix).double()

    config = {"load_in_8bit": kind == "int8", "load_in_4bit": kind != "int8"}
    if kind != "int8":
        config |= {"bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": nested}
    return Format({"quant_method": "bitsandbytes", **config}, encode)


def _torchao(kind: str, data: dict[str, Any], encode: Callable[[Tensor], tuple[Tensors, Tensor]]) -> Format:
    """As transformers writes TorchAO's tensors, which are not made here."""
    default = {"_type": kind, "_version": 2, "_data": data}
    return Format({"quant_method": "torchao", "quant_type": {"default": default}}, encode)


def _ao_ints(matrix: Tensor) -> tuple[Tensors, Tensor]:
    """Integers less a zero point, times the scale of a group."""
    of = torch.arange(matrix.shape[1]) // GROUP
    integers, scales, zeros = grouped(matrix, 7, of)
    stored = {
        "_weight_qdata": integers.to(torch.int8),
        "_weight_scale": scales,
        "_weight_zero_point": zeros.to(torch.int8),
    }
    return stored, scales.double()[:, of] * (integers - zeros[:, of]).double()


def _ao_rows(matrix: Tensor) -> tuple[Tensors, Tensor]:
    scales = matrix.abs().amax(1, True) / 127
    integers = (matrix / scales).round()
    return {"_weight_qdata": integers.to(torch.int8), "_weight_scale": scales}, integers.double() * scales.double()


def _ao_int4(matrix: Tensor) -> tuple[Tensors, Tensor]:
    """Integers of -8 to 7 times a scale, plus the middle of the group."""
    parts = matrix.unflatten(1, (-1, GROUP))
    low, high = parts.amin(-1), parts.amax(-1)
    scales = ((high - low) / 15).bfloat16()
    middle = (low + 8 * scales.float()).bfloat16()
    integers = ((parts - middle.float().unsqueeze(-1)) / scales.float().unsqueeze(-1)).round().clamp(-8, 7)
    codes = integers.flatten(1).int() % 16
    packed = (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8).view(torch.int8)
    stored = {"_weight_qdata": packed, "_weight_scale": scales.T, "_weight_zero_point": middle.T}
    return stored, (integers.double() * scales.double().unsqueeze(-1) + middle.double().unsqueeze(-1)).flatten(1)


def _ao_float8(matrix: Tensor) -> tuple[Tensors, Tensor]:
    stored, numbers = _float8(1, 0)(matrix)
    return {"_weight_qdata": stored["weight"], "_weight_scale": stored["weight_scale"]}, numbers


_PER_ROW = {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}
_PER_GROUP = {"_type": "PerGroup", "_version": 1, "_data": {"group_size": GROUP}}


def _gptq_config(bits: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": False, **more}


_FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
FORMATS: dict[str, Format] = {
    **{f"gptq {bits} bits": Format(_gptq_config(bits), _gptq(bits, False, 1)) for bits in (2, 3, 4, 8)},
    "gptq by activation": Format(_gptq_config(4, desc_act=True), _gptq(4, True, 1)),
    "gptq 3 bits by activation": Format(_gptq_config(3, desc_act=True), _gptq(3, True, 1)),
    "gptq_v2": Format(_gptq_config(4, checkpoint_format="gptq_v2"), _gptq(4, False, 0)),
    "auto-round": Format(
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": GROUP},
        _gptq(4, False, 1, g_idx=False),
    ),
    "awq": Format({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}, _awq),
    "fp8 tensors": Format(_FP8, _float8(0, 0)),
    "fp8 static": Format({**_FP8, "activation_scheme": "static"}, _float8(0, 0, extra={"input_scale": _ONE[0]})),
    "fp8 blocks": Format({**_FP8, "weight_block_size": [32, 16]}, _float8(32, 16, "weight_scale_inv")),
    "fbgemm_fp8": Format({"quant_method": "fbgemm_fp8"}, _float8(1, 0)),
    "packed int4": _compressed("pack-quantized", num_bits=4, strategy="group", group_size=GROUP),
    "packed int4, zeros": _compressed(
        "pack-quantized", num_bits=4, strategy="group", group_size=GROUP, symmetric=False
    ),
    "packed int3": _compressed("pack-quantized", num_bits=3, strategy="group", group_size=GROUP),
    "packed int8 channels": _compressed("pack-quantized", num_bits=8, strategy="channel"),
    "int8 channels": _compressed("int-quantized", num_bits=8, strategy="channel"),
    "float8 channels": _compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    "float8 tensors": _compressed("float-quantized", num_bits=8, type="float", strategy="tensor"),
    "mxfp4 compressed": _compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
    "nvfp4": _compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
    "nvfp4 static": _compressed(
        "nvfp4-pack-quantized", {"input_global_scale": _ONE}, num_bits=4, type="float", strategy="tensor_group",
        group_size=16,
    ),
    "torchao int8": _torchao("Int8WeightOnlyConfig", {"granularity": _PER_ROW}, _ao_rows),
    "torchao integers": _torchao("Int8DynamicActivationIntxWeightConfig", {"weight_granularity": _PER_GROUP}, _ao_ints),
    "torchao int4": _torchao("Int4WeightOnlyConfig", {"group_size": GROUP}, _ao_int4),
    "torchao float8": _torchao(
        "Float8DynamicActivationFloat8WeightConfig", {"granularity": [_PER_ROW, _PER_ROW]}, _ao_float8
    ),
    "nf4": _bitsandbytes("nf4", False),
    "nf4 nested": _bitsandbytes("nf4", True),
    "fp4": _bitsandbytes("fp4", False),
    "fp4 nested": _bitsandbytes("fp4", True),
    "llm.int8": _bitsandbytes("int8", False),
}  # fmt: skip


def write(folder: Path, made: Format, width: int = WIDTH, keys: int = 2) -> LlamaForCausalLM:
    """A checkpoint in that format, and transformers' model with the numbers that it stands for. keys: heads of them."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=128, hidden_size=HIDDEN, intermediate_size=width, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=keys, max_position_embeddings=512,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    tensors: Tensors = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("proj.weight"):
                tensors[name] = parameter.clone()
                continue
            stored, numbers = made.encode(parameter.float())
            tensors |= {f"{name.removesuffix('weight')}{n}": t.clone().contiguous() for n, t in stored.items()}
            parameter.copy_(numbers)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = config.to_dict() | {"architectures": ["LlamaForCausalLM"], "quantization_config": made.config}
    (folder / "config.json").write_text(json.dumps(settings))
    return model
