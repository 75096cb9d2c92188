"""gated_delta for prompts on Hopper, in Gluon: what of chunks of 64 tokens does not depend on states, as
`triton_chunks` describes it. A program has a chunk and a key head, and goes through the heads that share it.

(I + A)^-1 is made in two steps. First the blocks of 16 on the diagonal, D: a thread has a column in registers and
reads rows of A from shared memory, so that no thread waits for sums of others. With L as what is below these blocks
and N = D L, whose fourth power is zero, the whole is (I - N + N^2 - N^3) D. These are four products of the tensor
cores in float16, whose mantissa is that of tf32. N has small numbers, since keys have a length of at most 1.
"""

# mypy: allow-untyped-defs, disable-error-code="annotation-unchecked"

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from graphllm.ir import CallSite, GluonKernel, runs_gluon
from graphllm.ops.recurrent.gated_delta.triton_lengths import CHUNKED

_LOG2E = gl.constexpr(1.4426950408889634)
_BLOCK_S = gl.constexpr(256)  # sequences that are looked at at once


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _find_sequence(start_ptr, chunk, S, CHUNKED: gl.constexpr):
    """The sequence of a chunk, S if there is none, and the chunks before it: as `triton_lengths.find_sequence`."""
    flat: gl.constexpr = gl.BlockedLayout([_BLOCK_S // 128], [32], [4], [0])
    s = gl.to_tensor(0)
    chunks = gl.to_tensor(0)
    before = gl.to_tensor(0)
    for base in range(0, S, _BLOCK_S):
        i = base + gl.arange(0, _BLOCK_S, layout=flat)
        count = gl.load(start_ptr + 1 + i, mask=i < S, other=0) - gl.load(start_ptr + i, mask=i < S, other=0)
        own = gl.where(count >= CHUNKED, (count + 63) // 64, 0)
        earlier = before + gl.associative_scan(own, 0, _add) <= chunk
        s += gl.sum(gl.where(earlier & (i < S), 1, 0), 0)
        chunks += gl.sum(gl.where(earlier, own, 0), 0)
        before += gl.sum(own, 0)
    return s, chunks


@gluon.jit
def _scales(x, EPS: gl.constexpr):
    """What rows are to be multiplied by so that they have length 1."""
    wide = x.to(gl.float32)
    return 1.0 / gl.sqrt_rn(gl.sum(wide * wide, 1) + EPS)


@gluon.jit
def _product(a, b):
    """a @ b [64, 64] in float32. a: float16, in registers or in shared memory."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    zeros = gl.zeros([64, 64], gl.float32, layout=layout)
    return hopper.warpgroup_mma(a, b, zeros, use_acc=False)


@gluon.jit
def _left(a):
    """As the left factor of `_product`."""
    return gl.convert_layout(a.to(gl.float16), gl.DotOperandLayout(0, a.type.layout, 2))


@gluon.jit
def _write(to, x):
    """A tile of 64 rows, 16 bytes a thread."""
    layout: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [],
        [64, 64],
    )  # fmt: skip
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, layout)).expand_dims(1)
    j = gl.arange(0, 64, layout=gl.SliceLayout(0, layout)).expand_dims(0)
    gl.store(to + i * 64 + j, gl.convert_layout(x.to(to.dtype.element_ty), layout))


@gluon.jit
def _inverses(diagonal):
    """Inverses of I plus the strictly lower triangular blocks [16, 16] in shared memory: entry [n, 16 b + r] is that of
    row r and column n of block b. Returns [64, 64] the other way round, column by row, zeros between blocks."""
    whole: gl.constexpr = gl.DistributedLinearLayout(  # block, column, block, row: a thread has a column
        [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 0, 8], [0, 0, 1, 0], [0, 0, 2, 0]],
        [[0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0], [0, 8, 0, 0], [0, 0, 0, 0]],
        [[1, 0, 0, 0], [2, 0, 0, 0]], [], [4, 16, 4, 16],
    )  # fmt: skip
    own: gl.constexpr = gl.SliceLayout(2, whole)
    line: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8]], [[0, 0], [0, 0], [0, 0], [0, 0], [0, 0]], [[0, 16], [0, 32]], [], [1, 64]
    )
    row = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(0, own))).expand_dims(0).expand_dims(0)
    column = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, own))).expand_dims(0).expand_dims(2)
    zeros = gl.zeros([4, 16, 16], gl.float32, layout=own)
    inverse = gl.where(row == column, 1.0, zeros)
    for n in gl.static_range(15):
        below = diagonal.slice(n, 1, dim=0).load(line).reshape([4, 16])
        below = gl.convert_layout(below, gl.SliceLayout(1, own)).expand_dims(1)
        found = gl.sum(gl.where(row == n, inverse, -0.0), 2).expand_dims(2)  # -0.0 is what a compiler drops from sums
        inverse = inverse - found * below
    first = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, whole))))
    second = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, whole))))
    first = first.expand_dims(1).expand_dims(2).expand_dims(3)
    second = second.expand_dims(0).expand_dims(1).expand_dims(3)
    return gl.where(first == second, inverse.to(gl.float16).expand_dims(2), 0.0).reshape([64, 64])


@gluon.jit(do_not_specialize=["S"])
def hopper_solve_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, start_ptr, inverse_ptr, seen_ptr, factor_ptr, S,
    Q_ROW: gl.constexpr, Q_HEAD: gl.constexpr, K_ROW: gl.constexpr, K_HEAD: gl.constexpr, G_ROW: gl.constexpr,
    G_HEAD: gl.constexpr, BETA_ROW: gl.constexpr, BETA_HEAD: gl.constexpr, H: gl.constexpr, SHARE: gl.constexpr,
    K: gl.constexpr, SCALE: gl.constexpr, EPS: gl.constexpr, CHUNKED: gl.constexpr,
):  # fmt: skip
    chunk = gl.program_id(0) // (H // SHARE)
    key_head = gl.program_id(0) % (H // SHARE)
    s, before = _find_sequence(start_ptr, chunk, S, CHUNKED)
    if s < S:
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
        rows: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [4, 1], [1, 0])
        shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        keys = gl.allocate_shared_memory(k_ptr.dtype.element_ty, [64, K], shared)
        queries = gl.allocate_shared_memory(k_ptr.dtype.element_ty, [64, K], shared)
        inverses = gl.allocate_shared_memory(gl.float16, [64, 64], shared)
        lower = gl.allocate_shared_memory(gl.float16, [64, 64], shared)
        diagonal = gl.allocate_shared_memory(gl.float32, [16, 64], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
        t0 = gl.load(start_ptr + s) + (chunk - before) * 64
        end = gl.load(start_ptr + s + 1)
        t = t0 + gl.arange(0, 64, layout=gl.SliceLayout(1, rows))
        e = gl.arange(0, K, layout=gl.SliceLayout(0, rows))
        inside = (t < end).expand_dims(1)
        t = t.to(gl.int64)
        k = gl.load(k_ptr + key_head * K_HEAD + (t * K_ROW).expand_dims(1) + e.expand_dims(0), mask=inside, other=0.0)
        q = gl.load(q_ptr + key_head * Q_HEAD + (t * Q_ROW).expand_dims(1) + e.expand_dims(0), mask=inside, other=0.0)
        keys.store(k)
        queries.store(q)
        hopper.fence_async_shared()
        of_k = _scales(k, EPS)
        of_q = _scales(q, EPS) * SCALE
        i_row = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
        i_column = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
        j = i_column.expand_dims(0)
        k_row = gl.convert_layout(of_k, gl.SliceLayout(1, layout))
        k_column = gl.convert_layout(of_k, gl.SliceLayout(0, layout)).expand_dims(0)
        q_row = gl.convert_layout(of_q, gl.SliceLayout(1, layout))
        in_row = t0 + i_row < end
        t_row = (t0 + i_row).to(gl.int64)
        g_rows = g_ptr + t_row * G_ROW
        beta_rows = beta_ptr + t_row * BETA_ROW
        for head in range(key_head * SHARE, (key_head + 1) * SHARE):
            i = gl.inline_asm_elementwise(  # else a compiler keeps all comparisons in registers from head to head
                "mov.b32 $0, $1;", "=r,r", [i_row], dtype=gl.int32, is_pure=False, pack=1
            ).expand_dims(1)
            gates = gl.load(g_rows + head * G_HEAD, mask=in_row, other=0.0).to(gl.float32) * _LOG2E
            beta = gl.load(beta_rows + head * BETA_HEAD, mask=in_row, other=0.0).to(gl.float32)
            gates = gl.convert_layout(gates, gl.SliceLayout(0, layout))
            total = gl.sum(gl.where(j <= i, gates.expand_dims(0), 0.0), 1)
            total_column = gl.convert_layout(total, gl.SliceLayout(0, layout)).expand_dims(0)
            decay = gl.exp2(gl.where(i >= j, total.expand_dims(1) - total_column, float("-inf")))
            at = (chunk * H + head).to(gl.int64)
            seen = _product(queries, keys.permute((1, 0)))  # again for each head: registers are what is rare
            _write(seen_ptr + at * 4096, seen * (q_row.expand_dims(1) * k_column) * decay)
            A = _product(keys, keys.permute((1, 0))) * ((k_row * beta).expand_dims(1) * k_column) * decay
            A = gl.where(i > j, A, 0.0)
            same = i // 16 == j // 16
            blocks = gl.sum(gl.where(same, A, 0.0).reshape([4, 16, 4, 16]), 2)
            diagonal.store(blocks.permute((2, 0, 1)).reshape([16, 64]))
            lower.store(gl.where(same, 0.0, A).to(gl.float16))
            inverses.store(_inverses(diagonal))
            hopper.fence_async_shared()
            N = _product(inverses.permute((1, 0)), lower)
            lower.store(N.to(gl.float16))
            hopper.fence_async_shared()
            N2 = _product(_left(N), lower)
            powers = gl.where(i == j, 1.0, 0.0) - N + N2
            powers = hopper.warpgroup_mma(_left(-N2), lower, powers)
            inverse = _product(_left(powers), inverses.permute((1, 0)))
            _write(inverse_ptr + at * 4096, inverse * gl.convert_layout(beta, gl.SliceLayout(0, layout)).expand_dims(0))
            last = gl.sum(gates, 0)
            grown = gl.exp2(total)
            row = factor_ptr + at * 256 + i_row
            gl.store(row, grown * k_row)
            gl.store(row + 64, grown * q_row)
            gl.store(row + 128, gl.exp2(gl.minimum(last - total, 0.0)) * k_row)
            gl.store(row + 192, gl.exp2(last + total * 0.0))


hopper_solve = GluonKernel(
    hopper_solve_kernel,
    "(Tensor q, Tensor k, Tensor g, Tensor beta, Tensor start, Tensor(a!) inverse, Tensor(b!) seen, Tensor(c!) factor,"
    " SymInt S) -> ()",
    warps=4,
)


def launch_solve(
    q_TGK: Tensor, k_TGK: Tensor, g_TH: Tensor, beta_TH: Tensor, starts: Tensor, scale: float, norm_eps: float,
    chunked: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As `triton_chunks.launch_solve`."""
    (T, G, K), H = q_TGK.shape, g_TH.shape[1]
    chunks = (T + CHUNKED - 1) // CHUNKED
    inverse, seen = (q_TGK.new_empty((chunks, H, 64, 64)) for _ in range(2))
    factors = q_TGK.new_empty((chunks, H, 4, 64), dtype=torch.float32)
    tensors = {"Q": q_TGK, "K": k_TGK, "G": g_TH, "BETA": beta_TH}
    hopper_solve(
        chunks * G, q_TGK, k_TGK, g_TH, beta_TH, starts, inverse, seen, factors, starts.shape[0] - 1,
        **{f"{n}_{of}": t.stride(i) for n, t in tensors.items() for i, of in enumerate(("ROW", "HEAD"))},
        H=H, SHARE=H // G, K=K, SCALE=scale, EPS=norm_eps, CHUNKED=chunked,
        maxnreg=168,  # so that three programs fit a processor
    )  # fmt: skip
    return inverse, seen, factors


def solves(site: CallSite) -> bool:
    """Whether the kernel serves a site that `triton_chunks` serves: on Hopper, with norms of keys, which bound A."""
    tensors = (site.args[name] for name in ("q_TGK", "k_TGK", "g", "beta_TH"))
    aligned = all(t.storage_offset() * t.element_size() % 16 == 0 for t in tensors)
    return runs_gluon(site.target) and aligned and site.args["norm_eps"] > 0
