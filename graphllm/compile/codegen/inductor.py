"""The one place that touches Inductor's private interface: from an aten graph to generated source, and to cubins of
the Triton kernels in it.

Inductor is used as a code generator. What it generates is taken apart by `translate` and run by our own loader. No
generated code runs while an artifact is made.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._guards import TracingContext, tracing
from torch._inductor import config as inductor_config
from torch._inductor.codecache import PyCodeCache
from torch._inductor.codegen.common import init_backend_registration
from torch._inductor.compile_fx import view_to_reshape
from torch._inductor.cpp_builder import CppTorchOptions
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import ExternKernel, MultiOutput
from torch._inductor.runtime.triton_heuristics import GridExpr, TritonCompileResult
from torch._inductor.virtualized import V

from graphllm.compile.codegen.cubins import kind_of, launched
from graphllm.ir.exchange import exchange
from graphllm.ir.graph import Shapes
from graphllm.ir.kernels import zeroed

CPP_HEADER = "#include <torch/csrc/inductor/cpp_prefix.h>"  # what every generated C++ kernel begins with


def prepare() -> None:
    """Import what Inductor imports with its first graph."""
    init_backend_registration()


def decompositions() -> dict[Any, Callable[..., Any]]:
    """The decompositions Inductor's lowerings expect to have been applied."""
    return select_decomp_table()


def settings(device: str, one_token: bool = False) -> dict[str, Any]:
    """Inductor options. Those that differ from its defaults say why. one_token: for a step of a single token."""
    common: dict[str, Any] = {
        "fx_graph_cache": False,  # the artifact is the cache
        "allow_buffer_reuse": True,
        "size_asserts": False,  # shapes were checked when the artifact was made
        "alignment_asserts": False,
        "scalar_asserts": False,
        "nan_asserts": False,
        "assert_indirect_indexing": False,  # token and block ids come from the scheduler
        "implicit_fallbacks": True,
        "comment_origin": False,
    }
    if device == "cpu":
        return common | {
            "cpp.dynamic_threads": not one_token,  # the artifact does not fix the number of threads
            "cpp.threads": 1 if one_token else -1,  # a token's norms, rotation and gate are less than a region costs
            "cpp.min_chunk_size": 32768,  # a parallel region costs more than 32k elements of work at batch 1
            "cpp.vec_isa_ok": True,  # do not compile test programs to find out; g++ -march=native knows
            "reorder_for_peak_memory": False,  # torch 2.13 puts readers before the kernel that fills their buffer
        }
    return common | {
        "triton.unique_kernel_names": True,
        "triton.autotune_at_compile_time": False,
        "triton.autotune_pointwise": False,  # one configuration, so that no kernel is run to choose among several
        "compile_threads": 1,  # pieces are built in parallel processes already
        "combo_kernels": False,
        "use_static_triton_launcher": False,  # it drops the cubin once loaded, and we want to keep it
    }


def hidden_sizes(inputs: Sequence[torch.Tensor], shapes: Shapes) -> list[str]:
    """The sizes, of T, S and R, that dimensions of the inputs are made of and that none of them is: S of [S + 1]."""
    dims = [d for t in inputs for d in shapes.spec(t).shape if isinstance(d, str)]
    found = {name for d in dims for name in re.findall(r"[TSR]\b", d)}
    return sorted(found - set(dims))


def generate(graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor], shapes: Shapes) -> str:
    """The Python source Inductor makes for the graph, without compiling any kernel in it. After the inputs it takes the
    `hidden_sizes`."""
    fake = shapes.mode
    hidden = [shapes.symbols[name] for name in hidden_sizes(inputs, shapes)]
    with graph.graph.inserting_before(next(n for n in graph.graph.nodes if n.op != "placeholder")):
        for i, size in enumerate(hidden):
            graph.graph.placeholder(f"hidden_{i}").meta["val"] = size
    inputs = [*inputs, *hidden]
    with (
        inductor_config.patch(settings(shapes.device.type, one_token=str(shapes.symbols["T"]) == "1")),
        tracing(TracingContext(fake)),
        V.set_fake_mode(fake),
        DebugContext(),
        torch.no_grad(),
    ):
        view_to_reshape(graph)
        post_grad_passes(graph, is_inference=True)
        lowering = GraphLowering(
            graph, example_inputs=inputs, shape_env=fake.shape_env, is_inference=True, cpp_wrapper=False, aot_mode=False
        )
        lowering.freeze_runtime_asserts()
        with V.set_graph_handler(lowering), V.set_extern_kernel_nodes([]):
            lowering.run(*inputs)
            _keep_apart(lowering)
            code = lowering.codegen()[0]
    return code if isinstance(code, str) else code.value


def _keep_apart(lowering: GraphLowering) -> None:
    """Have nothing else written where `zeroed` scratch is: the next kernels, of other pieces, count on its zeros; nor
    where the table of `exchange` is."""
    apart = (zeroed._opoverload, exchange._opoverload)
    made = {o.get_name() for o in lowering.operations if isinstance(o, ExternKernel) and o.op_overload in apart}
    outputs = {
        o.get_name()
        for o in lowering.operations
        if isinstance(o, MultiOutput) and any(i.get_name() in made for i in o.inputs if isinstance(i, ExternKernel))
    }
    lowering.never_reuse_buffers.update(made | outputs)


def cubin(name: str, source: str) -> dict[str, Any]:
    """A Triton kernel of generated source, compiled without being run: the first configuration that Inductor offers.

    Returns what `launched` says of it, and: names (of the arguments of ``.run``), args (their kinds; None for what the
    kernel was specialized on), prefix and grid (integer expressions over the names).
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    with inductor_config.patch(settings("cuda")):
        # What it begins with is for a process that runs the kernel.
        kernel = getattr(PyCodeCache.load(source.replace("triton_helpers.set_driver_to_gpu()", "")), name)
        chosen = kernel.configs[0]
        meta = kernel._create_compile_meta(chosen)
        signature = meta["signature"]
        text = ASTSource(kernel.fn, signature, meta["constants"], meta["configs"][0])
        target = GPUTarget("cuda", meta["cc"], kernel.device_props.warp_size)
        binary = triton.compile(text, target=target, options=kernel._create_compile_options(chosen, meta))
    grid = GridExpr.from_meta(kernel.inductor_meta, chosen)
    result = TritonCompileResult(binary, chosen, meta, kernel.inductor_meta)
    _, names, _ = result._get_arg_lists(kernel.fn.arg_names, kernel.fn.constexprs)
    return {
        **launched(binary),
        "names": names,
        "args": [kind_of(signature.get(name, "constexpr")) for name in names],
        "prefix": [[part.strip() for part in line.split("=", 1)] for line in grid.prefix],
        "grid": [int(g) if str(g).isdigit() else str(g) for g in (grid.x_grid, grid.y_grid, grid.z_grid)],
    }


def cpp_compile_command(source: Path, output: Path) -> list[str]:
    """The g++ command for generated C++, with the flags Inductor itself would use on this machine."""
    with inductor_config.patch({"cpp.vec_isa_ok": True}):
        options = CppTorchOptions(vec_isa=pick_vec_isa(), warning_all=False)
    skip = {"shared", "g1", "pedantic"}
    flags = [f"-{f}" for f in options.get_cflags() if f not in skip]
    definitions = [f"-D{d.strip()}" for d in options.get_definitions() if "PRECOMPILE" not in d]
    includes = [f"-I{d}" for d in options.get_include_dirs()]
    extra = [word for text in options.get_passthrough_args() for word in text.split()]
    return ["g++", *flags, "-w", *definitions, *includes, *extra, "-c", str(source), "-o", str(output)]
