"""What was the fastest at sites that were timed before, on GPUs of one kind: tables in the package.

A site of the table is not timed again. At a site that is like some of the table, only what was the fastest there is
compiled and timed, and the first candidate. `python -m bench.training.tuning_table` makes tables.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from graphllm.compile.codegen.jobs import Tunable
from graphllm.config import Target
from graphllm.program.expr import value
from graphllm.rewrite import ImplChoice

TABLES = Path(__file__).parent / "tables"
_NEIGHBOURS = 3  # sites that a new one is compared with


class KnownSite(msgspec.Struct, frozen=True, array_like=True):
    """A site that was timed.

    kind: of `kind_of`.
    sizes: all dimensions of its tensors.
    site: digest of all its arguments.
    choice: the fastest.
    """

    kind: str
    sizes: list[int]
    site: str
    choice: ImplChoice


class Table(NamedTuple):
    """Sites of one kind of GPU, by their digests and by their kinds."""

    exact: Mapping[str, KnownSite]
    alike: Mapping[str, list[KnownSite]]

    @staticmethod
    def of(sites: Iterable[KnownSite]) -> Table:
        """A table of these."""
        exact: dict[str, KnownSite] = {}
        alike: dict[str, list[KnownSite]] = {}
        for known in sites:
            exact[known.site] = known
        for known in exact.values():
            alike.setdefault(known.kind, []).append(known)
        return Table(exact, alike)

    def chosen(self, site: Tunable) -> ImplChoice | None:
        """What was the fastest at this very site; None where it was not timed, and where that is no candidate now."""
        known = self.exact.get(digest_of(site))
        return known.choice if known is not None and known.choice in site.candidates else None

    def likely(self, site: Tunable) -> list[ImplChoice]:
        """The candidates that are worth timing: all where no site is like this one."""
        sizes = sizes_of(site)
        alike = [known for known in self.alike.get(kind_of(site), ()) if len(known.sizes) == len(sizes)]
        nearest = sorted(alike, key=lambda known: _distance(known.sizes, sizes))[:_NEIGHBOURS]
        wanted = [known.choice for known in nearest if known.choice in site.candidates]
        return list(site.candidates) if not wanted else [
            choice for choice in site.candidates if choice in wanted or choice == site.candidates[0]
        ]  # fmt: skip


NOTHING = Table({}, {})


def table_of(target: Target) -> Table:
    """The table of a GPU's kind; empty where the package has none."""
    file = TABLES / file_name(target)
    return Table.of(msgspec.json.decode(file.read_bytes(), type=list[KnownSite])) if file.is_file() else NOTHING


def file_name(target: Target) -> str:
    """Of the table. A kind of GPU is its architecture, the number of its multiprocessors, and its product."""
    product = "".join(c if c.isalnum() else "-" for c in target.name.lower())
    return f"{'-'.join(target.arch)}-{product}.json"


def known_site(site: Tunable, choice: ImplChoice) -> KnownSite:
    """A row of a table."""
    return KnownSite(kind_of(site), sizes_of(site), digest_of(site), choice)


def kind_of(site: Tunable) -> str:
    """What sites that can be compared have in common: the op, types, and what is no number."""
    types = [f"{name} {spec.dtype} {len(spec.shape)}" for name, spec in sorted(site.tensors.items())]
    words = [f"{name} {given}" for name, given in sorted(site.plain.items()) if not _is_number(given)]
    return ", ".join([*_mode(site), site.op, *types, *words])


def sizes_of(site: Tunable) -> list[int]:
    """All dimensions of the tensors, by name."""
    return [value(d, site.sizes) for _, spec in sorted(site.tensors.items()) for d in spec.shape]


def digest_of(site: Tunable) -> str:
    """Equal for sites with equal arguments."""
    tensors = {
        name: [spec.dtype, *([value(d, site.sizes) for d in dims] for dims in (spec.shape, spec.stride))]
        for name, spec in sorted(site.tensors.items())
    }
    text = json.dumps([*_mode(site), site.op, tensors, sorted((k, repr(v)) for k, v in site.plain.items())])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _mode(site: Tunable) -> list[str]:
    return ["deterministic"] if site.deterministic else []


def _is_number(given: object) -> bool:
    return isinstance(given, (int, float)) and not isinstance(given, bool)


def _distance(these: Iterable[int], those: Iterable[int]) -> float:
    return sum(abs(math.log2(max(a, 1) / max(b, 1))) for a, b in zip(these, those, strict=True))
