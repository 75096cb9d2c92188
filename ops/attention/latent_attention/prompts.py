"""Steps with prompts on GPUs: what is done in which order, for `triton_prefill` and `gluon_prefill`.

The latents go to the cache. Then keys and values of the sequences with many query tokens are made of it, chunk by
chunk, and the rows of these sequences attend to each chunk. The other sequences stay in latent space, and those of a
single token are attended for as in decode.

The chunks of a step hold its own tokens and one longest context, so the memory is known and the launches are few. A
step seldom has more: only the first prompt of a step goes on, and only the last one is cut. What is beyond that is
right as well, in latent space, with 3.4 times the products in DeepSeek's models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from graphllm.ir import CallSite
from graphllm.ops.attention.latent_attention.decode import launch_decode, plan_decode
from graphllm.ops.attention.latent_attention.operands import LatentRows, PagedLatents, UpProjections
from graphllm.ops.attention.latent_attention.triton_absorb import is_absorbed
from graphllm.ops.attention.latent_attention.triton_common import problem
from graphllm.ops.attention.latent_attention.triton_expand import expand, new_chunk
from graphllm.ops.attention.latent_attention.triton_latent_flash import latent_flash
from graphllm.ops.attention.latent_attention.triton_write import write_latents

_MOST_NUMBERS = 1 << 27  # keys and values of a chunk
_ALIGNED = 128  # a chunk's rows are a multiple of that


def step_constants(site: CallSite) -> dict[str, Any]:
    """How many rows a chunk has, and how many chunks a step; a step without prompts has none. Then the launch constants
    of what makes keys and values, and of single tokens."""
    (H, N, _), V = site.args["k_up_HNL"].shape, site.args["v_up_HVL"].shape[1]
    single = site.args["q_nope_THN"].dtype == torch.float32
    others: dict[str, Any] = {
        "programs": site.target.multiprocessors, "expand_stages": 2 if single else 3,
        "decode": plan_decode(site, site.largest(site.args["block_table"].shape[0]), 1),
    }  # fmt: skip
    if site.bucket.kind == "decode":
        return {"chunk": 0, "chunks": 0, **others}
    rows = site.rows("q_nope_THN") + site.args["block_table"].shape[1] * site.args["latent_cache"].shape[1]
    most = max(1, _MOST_NUMBERS // (H * (N + V) * _ALIGNED))
    chunk = min(most, -(-rows // _ALIGNED)) * _ALIGNED
    return {"chunk": chunk, "chunks": -(-rows // chunk), **others}


def attend(
    rows: LatentRows, up: UpProjections, paged: PagedLatents, scale: float, ancestors_T: Tensor | None,
    flash: Callable[..., None], chunk: int, chunks: int, programs: int, expand_stages: int,
    decode: Mapping[str, Any], **constants: Any,
) -> Tensor:  # fmt: skip
    """The whole step.

    flash: attends to a chunk, as the kernel of `triton_prefill` does, with ``constants``.
    programs, expand_stages: of the kernel that makes keys and values.
    decode: launch constants for sequences of a single token.
    """
    T, H, V = *rows.q_nope_THN.shape[:2], up.v_up_HVL.shape[1]
    out_THV = rows.q_nope_THN.new_empty((T, H, V))
    begins = write_latents(rows, paged, ancestors_T, chunk * chunks)
    if chunks:
        lse_TH = out_THV.new_empty((T, H) if chunks > 1 else (1, 1), dtype=torch.float32)
        of = new_chunk(rows, up, begins, chunk)
        for start in range(0, chunk * chunks, chunk):
            expand(of, rows, up, paged, start, chunk=chunk, programs=programs, stages=expand_stages)
            flash(rows, of, paged, out_THV, lse_TH, scale, start, chunk=chunk, **constants)
    latent_flash(rows, up, paged, out_THV, begins, scale, ancestors_T, decode["queries"])
    launch_decode(rows, up, paged, out_THV, scale, write=False, **decode)
    return out_THV


def is_mixed(site: CallSite) -> bool:
    """Whether kernels of ragged batches serve the site; steps of few tokens of each sequence have their own."""
    return not problem(site) and not is_absorbed(site)
