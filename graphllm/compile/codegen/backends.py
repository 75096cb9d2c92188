"""The codegen backends with one interface: `build` makes one piece for one bucket, `assemble` writes what they share.

eager: the piece stays IR, run with the reference ops. cpu: Inductor's C++ and our own kernels, one shared library for
the whole artifact. cuda: Inductor's Triton and our own kernels as cubins (`compile.codegen.cuda`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from graphllm.compile.codegen import inductor
from graphllm.compile.codegen.calls import call_source, has_calls
from graphllm.compile.codegen.jobs import Built
from graphllm.compile.codegen.lower import lower_piece
from graphllm.compile.codegen.objects import Objects
from graphllm.compile.codegen.translate import Bundle, translate
from graphllm.config import Bucket, CompileConfig
from graphllm.host.kernel_sources import OPS
from graphllm.ir.graph_form import digest
from graphllm.ir.kernels import c_kernel
from graphllm.rewrite import ImplChoice


class Backend(Protocol):
    """Makes code of pieces.

    prepare: import what building needs.
    build: compile a piece, given by its canonical JSON, with the ``choices`` that were measured.
    assemble: write the files all pieces share into ``folder``; the names of prebuilt libraries that they need.
    """

    def prepare(self) -> None: ...

    def build(
        self, piece: Mapping[str, Any], bucket: Bucket, config: CompileConfig, choices: Mapping[str, ImplChoice]
    ) -> Built: ...

    def assemble(self, built: Iterable[Built], folder: Path) -> tuple[str, ...]: ...


class Generated(NamedTuple):
    """A piece for one bucket as Inductor wrote it, taken apart. The rest is `Built`'s."""

    bundle: Bundle
    chosen: tuple[str, ...]
    text: str
    reports: list[dict[str, Any]]

    def built(self, kernels: Mapping[str, Any], sources: dict[str, str], blobs: dict[str, bytes]) -> Built:
        """With its kernels compiled, or still to be."""
        taken = self.bundle
        plain = {"inputs": taken.inputs, "outputs": taken.outputs, "code": taken.code, "kernels": kernels}
        return Built(plain, sources, blobs, self.chosen, self.text, self.reports)


def generate(
    piece: Mapping[str, Any],
    bucket: Bucket,
    config: CompileConfig,
    choices: Mapping[str, ImplChoice],
    known: MutableMapping[str, Generated],
) -> Generated:
    """Specialize, lower and generate.

    known: what was generated so far. Buckets for which a piece is lowered to the same graph, over sizes with the same
    names, share what is generated.
    """
    lowered, reports = lower_piece(piece, bucket, config, choices, inductor.decompositions())
    text = lowered.graph.print_readable(print_output=False)  # before Inductor rewrites the graph
    key = digest(piece) + text + str([lowered.shapes.spec(t) for t in lowered.inputs])
    if key not in known:
        source = inductor.generate(lowered.graph, lowered.inputs, lowered.shapes)
        bundle = translate(source, lowered.inputs, lowered.shapes)
        known[key] = Generated(bundle, lowered.chosen, text, reports)
    return known[key]._replace(chosen=lowered.chosen, reports=reports)


class Eager:
    """Keeps the IR: always available, and the numerical oracle of the others."""

    def prepare(self) -> None:
        """Nothing more is needed."""

    def build(
        self, piece: Mapping[str, Any], bucket: Bucket, config: CompileConfig, choices: Mapping[str, ImplChoice]
    ) -> Built:
        count = len(piece["made"])
        inputs, outputs = [f"p{i}" for i in range(len(piece["inputs"]))], [f"o{i}" for i in range(count)]
        code = [
            ["empty", name, shape, stride, dtype]
            for name, (dtype, shape, stride) in zip(outputs, piece["made"], strict=True)
        ]
        plain = {"inputs": inputs, "outputs": outputs, "code": [*code, ["ir", inputs, outputs]], "kernels": {}}
        return Built(plain | {"ir": piece}, {}, {}, ("all: reference",), "")

    def assemble(self, built: Iterable[Built], folder: Path) -> tuple[str, ...]:
        """Nothing is shared."""
        return ()


class Cpu:
    """Inductor's generated C++ and the hand-written kernels, in one library compiled by g++ for this machine."""

    def __init__(self, objects: Objects | None) -> None:
        """objects: compiles what pieces need; None where they are only generated, in a build process."""
        self._objects = objects
        self._known: dict[str, Generated] = {}

    def prepare(self) -> None:
        """This file has imported it."""

    def build(
        self, piece: Mapping[str, Any], bucket: Bucket, config: CompileConfig, choices: Mapping[str, ImplChoice]
    ) -> Built:
        """Compilers of the hand-written kernels of a piece start at once and run during the next piece."""
        made = generate(piece, bucket, config, choices, self._known)
        kernels = made.bundle.kernels
        if self._objects is not None:
            for source in _own(kernels):
                self._objects.add(source)
        sources = {name: k["cpp"] for name, k in kernels.items() if "cpp" in k}
        described = {name: {part: v for part, v in k.items() if part != "cpp"} for name, k in kernels.items()}
        return made.built(described, sources, {})

    def assemble(self, built: Iterable[Built], folder: Path) -> tuple[str, ...]:
        """Compile the generated kernels and how they are called, and link ``kernels.so``."""
        bodies: dict[str, str] = {}
        own = {OPS / "cpu" / "elementary.cpp"}
        arguments: dict[str, Sequence[str]] = {}
        for b in built:
            bodies |= {name: text.replace(inductor.CPP_HEADER, "") for name, text in b.sources.items()}
            own |= _own(b.bundle["kernels"])
            arguments |= {
                name: kernel["args"]
                for name, kernel in b.bundle["kernels"].items()
                if "c" not in kernel or not has_calls(c_kernel(kernel["c"]).source)
            }
        library, header = folder / "kernels.so", inductor.CPP_HEADER
        calls = call_source(arguments)
        assert self._objects is not None
        self._objects.link(own, bodies.values(), header, inductor.cpp_compile_command, calls, library)
        return ()


def _own(kernels: Mapping[str, Any]) -> set[Path]:
    """The sources of the hand-written ones among a bundle's kernels."""
    return {c_kernel(k["c"]).source for k in kernels.values() if "c" in k}
