"""Tracing: a model's outer forward with each decoder layer as one opaque call, then one layer of each kind.

What is before the first layer is embed, what is after the last one is head; what the calls of layers take besides x is
shared. Graphs are those of `make_fx` over [1, T, D], before `unbatched` takes the batch dimension away.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from graphllm.compile.transformers_model import leaves, rotary
from graphllm.compile.transformers_model.recipe import MODEL_DTYPE
from graphllm.compile.transformers_model.refusal import refused
from graphllm.compile.transformers_model.source import Source
from graphllm.config import ConfigError
from graphllm.ir.graph import Shapes

_library = torch.library.Library("graphllm_leaf", "FRAGMENT")
_library.define("layer(Tensor x, Tensor[] shared, int index) -> Tensor")
torch.library.register_fake("graphllm_leaf::layer", lambda x, shared, index: torch.empty_like(x), lib=_library)
layer_call = torch.ops.graphllm_leaf.layer.default
_INDEX_NAMES = ("layer_idx", "layer_id", "layer_index", "layer_number", "idx", "block_idx")


class Call(NamedTuple):
    """What a layer is called with. spec: of (args, kwargs). constants: its leaves, None in the places of tensors.
    tensors: the places of x and of what else is a tensor."""

    spec: TreeSpec
    constants: tuple[Any, ...]
    tensors: tuple[int, ...]


class Outer(NamedTuple):
    """The traced forward around the layers. graph: its placeholders' targets are "w.<parameter>", "in.token_ids" and
    "in.positions"; layers are calls of `layer_call`. values: real numbers of buffers, by name. unread: shapes of the
    parameters that nothing reads, by name."""

    graph: Graph
    values: dict[str, Tensor]
    unread: dict[str, tuple[int, ...]]


class Traced(NamedTuple):
    """A layer's graph: placeholders "w.<parameter of the layer>", "x" and "given.<i>", the i-th further tensor of its
    call. values, unread: as of `Outer`."""

    graph: Graph
    values: dict[str, Tensor]
    unread: dict[str, tuple[int, ...]]


class Tracer:
    """Traces a source. shapes: the symbols of all its graphs."""

    def __init__(self, source: Source) -> None:
        self.source, self.shapes = source, Shapes("cpu")
        self.calls: dict[int, Call] = {}
        self._returns: dict[type, Callable[[Tensor], Any]] = {}
        rotary.make_leaves(source.model, source.longest)

    def outer(self, counts: bool = False) -> Outer:
        """The forward around the layers. counts: it is given no positions. Raises ConfigError for what cannot be
        traced."""
        model, prefix, before = self.source.model, self.source.path + ".", dict(self.calls)
        T = self.shapes.symbols["T"]
        with self.shapes.mode, torch.no_grad():
            ids = [torch.zeros(1, T, dtype=torch.int32) for _ in range(2)]
        fakes, values = self._fakes(model, lambda name: not name.startswith(prefix))

        def run(*given: Tensor) -> Tensor:
            own, (token_ids, positions) = dict(zip(fakes, given[:-2], strict=True)), given[-2:]
            named = {"input_ids": token_ids, "position_ids": positions, "past_key_values": leaves.NoCache()}
            taken = inspect.signature(type(model).forward).parameters
            named = {n: v for n, v in named.items() if n in taken and not (counts and n == "position_ids")}
            extra = {"use_cache": True} if "past_key_values" in named else {}
            return functional_call(model, own, (), named | extra).logits

        with self._stubs(), self.shapes.mode, torch.no_grad():
            self._guarded(type(model).__name__, lambda: run(*fakes.values(), *ids))
        with self._stubs():
            graph = self._traced(type(model).__name__, run, [*fakes.values(), *ids])
        _label(graph, [*(f"w.{n}" for n in fakes), "in.token_ids", "in.positions"])
        if counts:
            self.calls = before
        else:
            _count_from_positions(graph, str(T))
        return Outer(graph, values, _unread(graph, model))

    def layer(self, index: int, given: Sequence[Tensor]) -> Traced:
        """A decoder layer. given: fake values of x and of what else it is called with."""
        layer, call = self.source.layers[index], self.calls[index]
        fakes, values = self._fakes(layer, lambda name: True)

        def run(*tensors: Tensor) -> Tensor:
            own = dict(zip(fakes, tensors, strict=False))
            args, kwargs = _filled(call, tensors[len(own) :])
            made = functional_call(layer, own, args, kwargs)
            return made if isinstance(made, Tensor) else made[0]

        graph = self._traced(type(layer).__name__, run, [*fakes.values(), *given])
        _label(graph, [*(f"w.{n}" for n in fakes), "x", *(f"given.{i}" for i in range(len(given) - 1))])
        return Traced(graph, values, _unread(graph, layer))

    def fingerprint(self, index: int) -> Any:
        """What a layer's computation depends on, apart from its parameters' values and its index."""
        layer, call = self.source.layers[index], self.calls[index]
        modules = []
        for name, module in layer.named_modules():
            plain = {
                n: repr(v) for n, v in vars(module).items()
                if isinstance(v, bool | int | float | str | None | tuple | list)
                and n not in _INDEX_NAMES and n != "training"
            }  # fmt: skip
            own = [(n, tuple(p.shape), str(p.dtype)) for n, p in module.named_parameters(recurse=False)]
            buffers = [
                (n, tuple(b.shape), "" if b.is_meta else str(b.double().sum().item()))
                for n, b in module.named_buffers(recurse=False)
            ]
            modules.append((name, type(module).__qualname__, tuple(plain.items()), tuple(own), tuple(buffers)))
        return tuple(modules), repr(call.spec), tuple(map(_constant, call.constants)), call.tensors

    def _fakes(self, module: nn.Module, wanted: Callable[[str], bool]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Fake values of a module's parameters and buffers; the numbers of the computed ones."""
        buffers = dict(module.named_buffers())
        fakes, values = dict[str, Tensor](), dict[str, Tensor]()
        for name, tensor in (*module.named_parameters(), *buffers.items()):
            if not wanted(name):
                continue
            if name in buffers and not tensor.is_meta:
                values[name] = tensor
            with self.shapes.mode:
                rounded = id(tensor) in self.source.rounded
                fakes[name] = torch.empty(tuple(tensor.shape), dtype=MODEL_DTYPE if rounded else tensor.dtype)
        return fakes, values

    @contextlib.contextmanager
    def _stubs(self) -> Iterator[None]:
        """Within it each layer is one call."""
        for i, layer in enumerate(self.source.layers):
            layer.forward = self._stub(i, layer)
        try:
            yield
        finally:
            for layer in self.source.layers:
                vars(layer).pop("forward", None)

    def _stub(self, index: int, layer: nn.Module) -> Callable[..., Any]:
        forward = layer.forward
        first = next(iter(inspect.signature(forward).parameters))

        def stub(*args: Any, **kwargs: Any) -> Any:
            flat, spec = tree_flatten((args, kwargs))
            x = args[0] if args else kwargs[first]
            places = [i for i, v in enumerate(flat) if isinstance(v, Tensor) and v is not x]
            here = next(i for i, v in enumerate(flat) if v is x)
            constants = tuple(None if isinstance(v, Tensor) else v for v in flat)
            self.calls[index] = Call(spec, constants, (here, *places))
            if type(layer) not in self._returns:
                own, _ = self._fakes(layer, lambda name: True)
                vars(layer).pop("forward")
                made = functional_call(layer, own, args, kwargs)
                layer.forward = stub
                self._returns[type(layer)] = _returning(made, type(layer).__name__)
            return self._returns[type(layer)](layer_call(x, [flat[i] for i in places], index))

        return stub

    def _traced(self, name: str, run: Callable[..., Any], given: Sequence[Tensor]) -> Graph:
        before = self._guards()
        with self.shapes.mode, torch.no_grad():
            made = self._guarded(name, lambda: make_fx(run, pre_dispatch=True)(*given))
        if fixed := self.shapes.fixed():
            raise refused(name, f"code that serves one number of tokens only ({fixed})")
        if branches := self._guards() - before:
            raise refused(name, f"code that branches on the number of tokens ({', '.join(sorted(branches))})")
        graph = made.graph
        _constants_to_numbers(made)
        return graph

    def _guards(self) -> set[str]:
        env = self.shapes.mode.shape_env
        found = {self.shapes.rename(str(g.expr)) for g in env.guards} if env is not None else set()
        return found - {"Eq(T, T)"}

    def _guarded(self, name: str, run: Callable[[], Any]) -> Any:
        """What ``run`` makes. Raises ConfigError for whatever is raised."""
        try:
            return run()
        except ConfigError:
            raise
        except leaves.MaskReadError as problem:
            raise refused(name, "attention of its own, which reads its mask", problem) from problem
        except leaves.StateReadError as problem:
            raise refused(name, "layers with states other than keys and values", problem) from problem
        except Exception as problem:  # transformers' code raises of every kind
            said = str(problem).strip().split("\n")[0][:200]
            raise refused(name, f"code that cannot be traced: {type(problem).__name__}: {said}", problem) from problem


def _filled(call: Call, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    flat = list(call.constants)
    for place, tensor in zip(call.tensors, tensors, strict=True):
        flat[place] = tensor
    return tree_unflatten(flat, call.spec)


def _returning(made: Any, name: str) -> Callable[[Tensor], Any]:
    """What makes of x the structure that a layer returns, from one that it has returned."""
    if isinstance(made, Tensor):
        return lambda x: x
    if isinstance(made, tuple) and made and isinstance(made[0], Tensor):
        return lambda x: (x, *[None] * (len(made) - 1))
    raise refused(name, f"results of type {type(made).__name__}, not one hidden state")


def _constant(value: Any) -> Any:
    """A constant argument in a form that can be compared."""
    return value if isinstance(value, bool | int | float | str | None | leaves.Mask) else type(value).__qualname__


def _label(graph: Graph, names: Sequence[str]) -> None:
    for node, name in zip(list(graph.find_nodes(op="placeholder")), names, strict=True):
        node.target = name


def _unread(graph: Graph, module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of what a checkpoint has of a module and a graph has as an input that nothing reads."""
    idle = {n.target.removeprefix("w.") for n in graph.find_nodes(op="placeholder") if not n.users}
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items() if name in idle}


def _count_from_positions(graph: Graph, T: str) -> None:
    """Where the code around the layers counts the tokens of a whole sequence, it means their positions."""
    aten = torch.ops.aten
    positions = graph.find_nodes(op="placeholder")[-1]
    for node in list(graph.nodes):
        if getattr(node.target, "overloadpacket", None) is not aten.arange or node.meta["val"].dim() != 1:
            continue
        start = 0 if node.target is aten.arange.default else node.args[0]
        if str(node.meta["val"].shape[0]) != T or start != 0:
            continue
        with graph.inserting_before(node):
            row = graph.call_function(aten.squeeze.dim, (positions, 0))
            counted = graph.call_function(aten.to.dtype, (row, node.meta["val"].dtype))
        row.meta["val"], counted.meta["val"] = positions.meta["val"][0], node.meta["val"]
        node.replace_all_uses_with(counted)
        graph.erase_node(node)


def _constants_to_numbers(made: torch.fx.GraphModule) -> None:
    """Put the numbers of tensors of no dimensions, which a module's code makes, in the places of these."""
    for node in list(made.graph.find_nodes(op="get_attr")):
        value = getattr(made, node.target)
        if value.dim():
            continue
        with leaves.real_tensors():
            number = value.item()
        for user in list(node.users):
            _replace(user, node, number)
        made.graph.erase_node(node)


def _replace(user: Node, node: Node, number: float) -> None:
    if user.target in (torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.lift_fresh.default):
        for further in list(user.users):
            _replace(further, user, number)
        user.graph.erase_node(user)
        return
    swapped = torch.fx.map_arg((user.args, user.kwargs), lambda n: number if n is node else n)
    user.args, user.kwargs = swapped
