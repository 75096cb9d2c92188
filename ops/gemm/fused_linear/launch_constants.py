"""Which launch constants of the kernels of `triton_fused_linear` are worth compiling and timing at a site.

Of plain weights a tile is tried only where its programs fill the multiprocessors as no other tile's do. At all 79
sites of two shapes, on an H100, the fastest of 1,285 candidates was among the 400 that are left
(bench/notes/gpu_compile.md): programs that all run at once, one on each multiprocessor, are faster than twice as many
parts of sums, even where 96 of them fill 132.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from graphllm.ir import CallSite, runs_gluon
from graphllm.ops.encodings.encoded_weights import BITS, span_of
from graphllm.ops.gemm.fused_linear.triton_encoded import tiles_of
from graphllm.ops.lora.add_lora.triton_low_rank import low_rank_config

Config = Mapping[str, int]
_ROWS = (  # block_n, block_k, warps
    (4, 4096, 8), (4, 2048, 4), (8, 1024, 4), (2, 4096, 4), (2, 2048, 4), (4, 4096, 4), (8, 512, 4),
)  # fmt: skip
_USUAL = 64  # rows of weights of a tile
_ENCODED_TILES = (  # block_n, tiles of a span, stages, warps
    (128, 2, 3, 4), (64, 1, 4, 4), (64, 1, 3, 4), (128, 1, 3, 4), (128, 1, 3, 8), (128, 2, 4, 8), (64, 2, 4, 4),
)  # fmt: skip
_FEWEST, _MOST = 96, 640  # programs that a launch of tiles of encoded weights should have
_DIRECT = (  # block_n, warps, steps of a warp with weights under way
    (16, 4, 2), (16, 8, 2), (16, 4, 3), (16, 4, 4), (32, 8, 2),
)  # fmt: skip
_PLAIN_DIRECT = ((16, 4, 2, 256), (32, 4, 2, 128))  # of plain weights, and entries of a row in a step
_MOST_PLAIN = 1 << 24  # numbers of a plain matrix that is read so: of larger ones tiles are as fast
_MOST_DIRECT = 16  # rows of x
_MOST_STEPS = 20  # of a warp: each is code of its own, and twice as many take five times as long to compile
_SPLITS = (1, 2, 4, 8)
SHARED = 227 * 1024  # bytes of shared memory that one program may use on sm_90


class Tile(NamedTuple):
    """Rows of weights and entries of each that a program takes at once, how many steps are under way, and warps."""

    block_n: int
    block_k: int
    stages: int
    warps: int


_TILES = (Tile(64, 128, 4, 4), Tile(64, 256, 3, 4), Tile(64, 64, 6, 4), Tile(128, 128, 3, 8), Tile(32, 256, 4, 4))
_LEAST_RANGE = 256  # inner entries of a range of sums that are alike
_NARROW = 32  # columns of the smallest tile of `gluon_ordered`
_ALIKE_K = 128  # where such ranges may begin


def read_by_tma(site: CallSite) -> bool:
    """Whether `gluon_gated` can read a gated product's x and weights."""
    return site.args["gated"] and site.args["residual_TN"] is None and reads_tiles(site)


def reads_tiles(site: CallSite) -> bool:
    """Whether the TMA unit can bring the tiles of `gluon_product`."""
    return aligned(site) and min(site.args["weight_OI"].shape) >= 64 and runs_gluon(site.target)


def aligned(site: CallSite) -> bool:
    """Whether rows of x and of the weights, of two-byte numbers, begin at multiples of 16 bytes."""
    return all(
        t.stride(0) % 8 == 0 and t.storage_offset() % 8 == 0 for t in (site.args["x_TI"], site.args["weight_OI"])
    )


def row_configs(site: CallSite) -> list[Config]:
    """Launch constants of the row kernels, the likely best first."""
    inner = site.args["x_TI"].shape[1]
    fitting = [row for row in _ROWS if row[1] < 2 * inner] or _ROWS[-1:]
    return [{"block_n": n, "block_k": k, "warps": w} for n, k, w in fitting]


def tile_configs(site: CallSite) -> list[Config]:
    """Launch constants of the tile kernel for a linear layer at a site."""
    low = low_rank_config(site)
    form = site.args["form"]
    if site.deterministic:
        return [{**config, **low} for config in _alike_configs(site)]
    found = [*_direct_configs(site), *(_encoded_configs(site) if form else _plain_configs(site))]
    return [{**config, **low} for config in found]


def beside_rows(site: CallSite) -> list[Config]:
    """`tile_configs` where row kernels serve one row: of plain weights they do that best, as 15 of 16 rows of a tile
    of tokens are empty, so that one of these is enough."""
    others = site.rows("x_TI") > 1 or site.args["form"] or site.deterministic
    return tile_configs(site)[: None if others else 1]


def is_ordered(site: CallSite) -> bool:
    """Whether rows come out the same in every batch, by both kernels: by those instructions of Hopper's tensor cores
    that take 64 rows of weights. All else has not been shown to."""
    plain = site.args["form"] == "" and site.args["a_LRI"] is None and site.args.get("ranks", 1) == 1
    return site.target.arch[0] == "sm_90" and site.args["x_TI"].dtype == torch.bfloat16 and plain


def sum_order(site: CallSite, constants: Config) -> str:
    """`Impl.row_order`: where the inner dimension is divided. Equal for all rows of a weight."""
    return f"tensor cores, {ranges_of(site)} ranges" if is_ordered(site) else ""


def ranges_of(site: CallSite) -> int:
    """Into how many ranges the inner dimension is divided, whatever the number of rows: as suits few rows, where all
    programs run at once. As few as that allows, because many rows have to make all of them."""
    width, inner = site.args["weight_OI"].shape[0], site.args["x_TI"].shape[1]
    most = min(site.target.multiprocessors // -(-width // _NARROW), inner // _LEAST_RANGE)
    return max((n for n in _SPLITS if n <= most), default=1)


def length_of_range(site: CallSite) -> int:
    """Inner entries of a range."""
    steps = -(-site.args["x_TI"].shape[1] // _ALIKE_K)
    return -(-steps // ranges_of(site)) * _ALIKE_K


def _divides(site: CallSite, block_k: int) -> bool:
    """Whether the tile kernel's tiles of ``block_k`` inner entries begin ranges where others do."""
    tiles, ranges = -(-site.args["x_TI"].shape[1] // block_k), ranges_of(site)
    return ranges == 1 or -(-tiles // ranges) * block_k == length_of_range(site)


def _alike_configs(site: CallSite) -> Iterator[Config]:
    """The tile kernel's constants with which rows are computed alike."""
    ranges = ranges_of(site)
    for block_t, token_tiles, _ in _token_tiles(site):
        for tile in _TILES:
            if tile.block_n >= _USUAL and _divides(site, tile.block_k) and _fits(tile, block_t, 16):
                yield {**_config(tile, block_t, token_tiles, ranges), "alike": 1}


def _plain_configs(site: CallSite) -> list[Config]:
    width, inner = site.args["weight_OI"].shape[0], site.args["x_TI"].shape[1]
    processors = site.target.multiprocessors
    found: list[Config] = []
    for block_t, token_tiles, largest in _token_tiles(site):
        for tile in _TILES:
            if not _fits(tile, block_t, 16):
                continue
            programs = -(-width // tile.block_n) * token_tiles
            usual = -(-width // _USUAL) * token_tiles
            if not _worth_trying(tile, block_t, largest, programs, usual, processors):
                continue
            possible = [n for n in _SPLITS if n <= -(-inner // tile.block_k)]
            splits = max((n for n in possible if n * programs <= processors), default=1)
            found.append(_config(tile, block_t, token_tiles, splits))
    return found


def _worth_trying(tile: Tile, block_t: int, largest: bool, programs: int, usual: int, processors: int) -> bool:
    """Whether a tile may be the fastest. largest: no other one takes more tokens, so that weights are read most
    seldom. usual: programs there would be with tiles of the usual width."""
    if tile.block_n > _USUAL:  # reads tokens less often, where there is enough to do for every processor without
        return usual > processors
    if (tile.block_n < _USUAL or not largest) and programs > processors:  # makes more programs where there are enough
        return False
    # Deep tiles are for few tokens, shallow ones for many: both fill shared memory.
    return tile.block_n < _USUAL or (block_t >= 32 if tile.block_k < 128 else block_t <= 64 or tile.block_k == 128)


def _encoded_configs(site: CallSite) -> Iterator[Config]:
    width, inner = site.args["weight_OI"].shape[0], site.args["x_TI"].shape[1]
    form, group = site.args["form"], site.args["group"]
    span = span_of(form, inner, group)
    for block_t, token_tiles, _ in _token_tiles(site):
        for block_n, parts, stages, warps in _ENCODED_TILES:
            tile = Tile(block_n, span // parts, stages, warps)
            if not _fits(tile, block_t, BITS[form]):
                continue
            programs, tiles = -(-width // block_n) * token_tiles, tiles_of(inner, tile.block_k, span)
            possible = [n for n in _SPLITS if n <= tiles]
            filling = [n for n in possible if _FEWEST <= programs * n <= _MOST]
            for splits in filling or [possible[-1] if programs < _FEWEST else 1]:
                yield _config(tile, block_t, token_tiles, splits)


def _token_tiles(site: CallSite) -> Iterator[tuple[int, int, bool]]:
    """Tokens of a tile, how many such tiles there are, and whether it is the largest."""
    most = max(16, 1 << (site.rows("x_TI") - 1).bit_length())
    sizes = sorted({min(128, most), min(64, most)}, reverse=True)
    for block_t in sizes:
        yield block_t, -(-most // block_t), block_t == sizes[0]


def _fits(tile: Tile, block_t: int, bits: int) -> bool:
    """Whether a tile's steps fit into shared memory and its sums into registers."""
    shared = (tile.block_n * bits // 8 + block_t * 2) * tile.block_k * tile.stages
    return shared <= SHARED and tile.block_n * block_t <= 64 * 32 * tile.warps


def _config(tile: Tile, block_t: int, token_tiles: int, splits: int) -> Config:
    return {"block_t": block_t, "block_n": tile.block_n, "block_k": tile.block_k, "splits": splits,
            "warps": tile.warps, "stages": tile.stages, "token_tiles": token_tiles, "direct": 0, "norm": 0}  # fmt: skip


def _direct_configs(site: CallSite) -> list[Config]:
    """Constants of programs that read weights into registers; for one row and plain weights row kernels do that."""
    rows, form = site.rows("x_TI"), site.args["form"]
    width, inner = site.args["weight_OI"].shape[0], site.args["x_TI"].shape[1]
    if rows > _MOST_DIRECT:
        return []
    if form:
        tried = [(*constants, span_of(form, inner, site.args["group"])) for constants in _DIRECT]
    elif rows > 1 and width * inner <= _MOST_PLAIN:
        tried = [constants for constants in _PLAIN_DIRECT if inner % constants[3] == 0]
    else:
        return []
    norms = (1, 0) if rows == 1 and site.args.get("norm_I") is not None else (0,)
    return [
        {"block_t": 8 if rows <= 8 else 16, "block_n": block_n, "block_k": span, "splits": 1, "warps": warps,
         "stages": 1, "token_tiles": 1, "direct": steps, "norm": norm}
        for block_n, warps, steps, span in tried
        if (warps - 1) * span < inner and (steps == 2 or (steps - 1) * warps * span < inner)
        and inner <= _MOST_STEPS * warps * span
        for norm in norms
    ]  # fmt: skip
