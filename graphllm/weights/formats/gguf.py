"""The block types of GGUF files, as ggml defines them: rows of blocks of 32 or 256 inner entries, kept as their bytes.

gguf_q4_k and the like are the types by their names in the format; "gguf_q4_k-128" is the same for a matrix with rows
that are interleaved, in heads of 128: the first and the second half of a head take turns, which is how files of the
architecture llama store queries and keys. Decoding puts the rows back, as the model's rotary embedding wants them.
tiled_q4_k and the like are the same bytes in the order in which a CPU reads them, see
`graphllm.ops.encodings.gguf_blocks`."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from graphllm.host.libraries import Libraries
from graphllm.ops.encodings.encoded_weights import packed
from graphllm.ops.encodings.gguf_blocks import NUMBERS, dequantize, mxfp4_codes, tiles
from graphllm.ops.encodings.gguf_tiles import ROWS, TILED
from graphllm.weights.checkpoint.gguf.header import TYPES, Blocks
from graphllm.weights.encodings import Encoding, Part, register_encoding, register_family
from graphllm.weights.formats.grouped import grouped_integers, grouped_name

Parts = Mapping[str, Tensor]


def _encoding(kind: Blocks, name: str, head: int = 1) -> Encoding:
    """head: rows that are interleaved, 1 for rows in their order."""

    def decode(parts: Parts, rows: int, inner: int) -> Tensor:
        return in_order(NUMBERS[kind.name](parts["blocks"].reshape(-1, kind.nbytes)).reshape(rows, inner))

    def in_order(stored: Tensor) -> Tensor:
        return stored if head == 1 else stored.unflatten(0, (-1, head // 2, 2)).transpose(1, 2).flatten(0, 2)

    def to_tiles(parts: Parts, rows: int, inner: int, libraries: Libraries | None = None) -> Parts:
        return {"tiles": fast_tiles(in_order(parts["blocks"]), kind.name, libraries)}

    def to_nibbles(parts: Parts, rows: int, inner: int, libraries: Libraries | None = None) -> Parts:
        d, codes = parts["blocks"].reshape(-1, kind.nbytes).split((2, 16), 1)
        numbers = torch.cat([codes & 15, codes >> 4], 1).to(torch.int8) - 8
        numbers, scales = (in_order(each.reshape(rows, -1)) for each in (numbers, d.contiguous().view(torch.float16)))
        return grouped_integers(numbers, 4, kind.entries, scales.T)

    def to_e2m1(parts: Parts, rows: int, inner: int, libraries: Libraries | None = None) -> Parts:
        powers, codes = mxfp4_codes(parts["blocks"].reshape(-1, kind.nbytes))
        codes, powers = (in_order(each.reshape(rows, -1)) for each in (codes, powers))
        return {"values": packed(codes, "e2m1", kind.entries), "scales": powers.T.contiguous()}

    def blocks(rows: int, inner: int) -> tuple[int, int]:
        return rows, inner // kind.entries * kind.nbytes

    same = []
    if kind.name == "q4_0":
        same.append((grouped_name(4, "float16", kind.entries, zeros=False), to_nibbles))
    if kind.name == "mxfp4":
        same.append((f"e2m1-{kind.entries}", to_e2m1))
    if kind.name in TILED:
        same.append((f"tiled_{kind.name}", to_tiles))
    return Encoding(name, (Part("blocks", "uint8", blocks),), (head, kind.entries), None, decode, repacked=tuple(same))


def _tiled(kind: str) -> Encoding:
    form = TILED[kind]

    def shape(rows: int, inner: int) -> tuple[int, int, int]:
        """Tiles of rows, tiles of inner entries, bytes."""
        return -(-rows // ROWS), inner // form.entries, ROWS * form.nbytes

    def decode(parts: Parts, rows: int, inner: int) -> Tensor:
        return dequantize(parts["tiles"], kind, rows)

    return Encoding(
        f"tiled_{kind}", (Part("tiles", "uint8", shape),), (ROWS, form.entries), "gguf_linear", decode,
        row_op="gguf_embedding", settings={"kind": kind}, devices=("cpu",),
    )  # fmt: skip


def fast_tiles(blocks_RN: Tensor, kind: str, libraries: Libraries | None) -> Tensor:
    """`graphllm.ops.encodings.gguf_blocks.tiles`, by a routine of the artifact's libraries if these have the kernels
    of the kind."""
    function = libraries.find(f"graphllm_gguf_tiles_{kind}") if libraries else None
    if function is None or blocks_RN.device.type != "cpu":
        return tiles(blocks_RN, kind)
    blocks_RN, form = blocks_RN.contiguous(), TILED[kind]
    rows, width = blocks_RN.shape[0], blocks_RN.shape[1] // form.nbytes
    out = blocks_RN.new_empty((-(-rows // ROWS), width, ROWS * form.nbytes))
    fields = (ctypes.c_int64 * (3 * len(form.fields)))(*(int(n) for field in form.fields for n in field))
    function.restype = None
    sizes = map(ctypes.c_int64, (rows, width))
    addresses = map(ctypes.c_void_p, (blocks_RN.data_ptr(), out.data_ptr()))
    function(*addresses, *sizes, fields, ctypes.c_int64(len(form.fields)))
    return out


for _type in TYPES.values():
    register_family(f"gguf_{_type.name}", partial(_encoding, _type))
for _kind in TILED:
    register_encoding(_tiled(_kind))
