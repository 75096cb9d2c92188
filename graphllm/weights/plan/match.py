"""Does a checkpoint fit a weight plan? Names, shapes and dtypes, from nothing but the files' headers, in milliseconds.

`check_checkpoint` is called before anything is compiled, and again by the loader. No torch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Set

from graphllm.weights.checkpoint.checkpoint import FURTHER, Checkpoint, TensorInfo, WeightError
from graphllm.weights.checkpoint.files import opened, read_into
from graphllm.weights.dtypes import BY_TAG, DTYPES, PLAIN
from graphllm.weights.encodings import encoding_of
from graphllm.weights.plan.expr import ANY, Encode, Expr, Read, parts_of, walk
from graphllm.weights.plan.plan import WeightPlan
from graphllm.weights.plan.simplify import Region, at_rank, region_of, simplify

# Left in checkpoints by older transformers versions; constants that are computed, not parameters. In checkpoints of
# draft models, which tokens they draft, as "d2t" says as well.
_BUFFERS = re.compile(
    r"(^|\.)(rotary_emb\.(inv_freq|cos_cached|sin_cached)|(attn|attention)\.(bias|masked_bias|causal_mask)|position_ids)$"
    r"|(^|:)t2d$"
)
# What encoders were pretrained with, and models that make vectors have no use for: BERT's pooler, heads for words.
_PRETRAINING = re.compile(
    r"^(\w+\.)?pooler\.dense\.|^cls\.(predictions|seq_relationship)\.|^lm_head\.(dense|layer_norm|decoder)\.|^lm_head\.bias$"
    r"|^vocab_(transform|layer_norm|projector)\.|^head\.(dense|norm)\.|^decoder\.(weight|bias)$"
)
_TIED = "lm_head.weight"  # saved by some although it is tied; and not read where vectors are wanted


def check_checkpoint(plan: WeightPlan, checkpoint: Checkpoint) -> None:
    """Raise WeightError, with all problems at once, unless every tensor that the plan reads is there as it must be, and
    the plan reads every tensor that is there."""
    problems: dict[tuple[str, str], None] = {}  # in order, each once
    known: set[str] = set()
    used: Counter[Region] = Counter()
    for entry in plan:
        expr = simplify(at_rank(entry.expr, 0))
        again = any(isinstance(e, Encode) and e.part != encoding_of(e.encoding).parts[0].name for e in walk(expr))
        taken = regions_of(expr)
        used.update(() if again else taken)  # the other parts of an encoded matrix are made of the same reads
        regions: dict[Read, list[Region]] = {}
        for region in taken:
            regions.setdefault(region.read, []).append(region)
        for read in (e for e in walk(entry.expr) if isinstance(e, Read)):  # also what only other ranks take
            known.update(read.sources)
            name = tensor_of(read, checkpoint)
            if name is None:
                problems[" or ".join(read.sources), "missing"] = None
                continue
            for problem in _misfits(read, regions.get(read, []), checkpoint.tensors[name]):
                problems[name, problem] = None
    heads = {e.name for e in plan if e.name.startswith("head.")}
    tied = any(e.tie for e in plan) or any(n > 1 for n in used.values()) or (heads and "head.lm_head" not in heads)
    for name in checkpoint.tensors:
        unread = _BUFFERS.search(name) or FURTHER.match(name) or _PRETRAINING.search(name) or (tied and name == _TIED)
        if name not in known and not unread and not _adds_nothing(name, checkpoint.tensors[name], known):
            problems[name, "not used by the model; is the config.json of another one?"] = None
    if problems:
        raise WeightError(checkpoint.folder, _grouped(list(problems)))


def _adds_nothing(name: str, info: TensorInfo, known: Set[str]) -> bool:
    """Whether a tensor is the bias of a module that is read without one, and all zeros, as older programs wrote it."""
    module, _, leaf = name.rpartition(".")
    if leaf != "bias" or not any(other.rpartition(".")[0] == module for other in known):
        return False
    stored = memoryview(bytearray(info.nbytes))
    with opened([info.file]) as fds:
        read_into(stored, info.file, fds[info.file], info.offset)
    return not bytes(stored).strip(b"\0")


def regions_of(expr: Expr) -> list[Region]:
    """The boxes of checkpoint tensors that a simplified expression reads."""
    region = region_of(expr)
    return [region] if region else [found for part in parts_of(expr) for found in regions_of(part)]


def tensor_of(read: Read, checkpoint: Checkpoint) -> str | None:
    """The name under which the checkpoint has what a read wants."""
    return next((n for n in read.sources if n in checkpoint.tensors), None)


def _misfits(read: Read, regions: list[Region], info: TensorInfo) -> Iterator[str]:
    """What is wrong with the tensor that a read finds. regions: what is taken of it."""
    if read.dtype is None and (info.dtype not in BY_TAG or BY_TAG[info.dtype].name not in PLAIN):
        yield f"dtype {info.dtype} is not supported; use a checkpoint in {', '.join(DTYPES[d].tag for d in PLAIN)}"
        return
    if read.dtype is not None and info.dtype != DTYPES[read.dtype].tag:
        yield f"dtype {info.dtype}, the model needs {DTYPES[read.dtype].tag}"
        return
    wanted = tuple("*" if n == ANY else n for n in read.stored)
    if len(info.shape) != len(wanted) or any(w not in ("*", n) for w, n in zip(wanted, info.shape, strict=True)):
        yield f"shape {info.shape}, the model needs {_entries(regions[0]) if regions else ''}{wanted}"
        return
    for region in regions:
        if any(stop is not None and stop > n for stop, n in zip(region.stops, info.shape, strict=True)):
            yield f"shape {info.shape}, the model needs {_entries(region)}{wanted}"


def _entries(region: Region) -> str:
    """Which entries are read of the dimensions that may have any extent."""
    found = []
    for dim, extent in enumerate(region.read.stored):
        if extent == ANY:
            of = "rows" if dim == 0 else f"entries of dimension {dim}:"
            found.append(f"{of} {region.starts[dim]} to {region.stops[dim]} of ")
    return "".join(found)


def _grouped(problems: list[tuple[str, str]]) -> list[str]:
    """One line each, but many names that differ only in numbers, such as the layer's, share one."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, problem in problems:
        groups.setdefault((re.sub(r"\d+", "*", name), problem), []).append(name)
    lines = []
    for (pattern, problem), names in groups.items():
        many = len(names) > 8
        lines.append(f"{pattern} ({len(names)} tensors, first {names[0]})" if many else ", ".join(names))
        lines[-1] += f": {problem}"
    return lines
