"""Op and Impl: one reference body is the specification, faster implementations are tested against it.

`op` turns a typed function into a ``graphllm::<name>`` operator of torch's library: the signature is the schema, the
body the reference semantics, the docstring the documentation. Facts the compiler needs live on the `Op` itself. The
signature is written once: cost formulas, fakes and implementations take the arguments that they name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch.utils._pytree import tree_leaves, tree_map_only

from graphllm.config import Bucket, Target
from graphllm.ir.operands import Operands

NAMESPACE = "graphllm"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_ops: dict[str, Op] = {}
Struct = TypeVar("Struct", bound=tuple[Any, ...])


class Cost(NamedTuple):
    """What one call must move and do at least: bytes read and written once each, floating-point operations."""

    bytes: int
    flops: int


Neutral = tuple[str, str | tuple[str, ...]]
"""Of `op`: an argument, and another one or those that only it uses."""


class CallSite(NamedTuple):
    """One place where an op is called in a graph: what an implementation may look at to say whether it applies.

    args: the op's arguments by parameter name (fake tensors for tensors). bucket: the token counts the piece serves.
    largest: what a size of these tensors is at most; sizes are symbolic where a bucket serves several. deterministic:
    whether each row must come out the same in every batch.
    """

    args: Mapping[str, Any]
    target: Target
    bucket: Bucket
    largest: Callable[[int | torch.SymInt], int] = int
    deterministic: bool = False

    def struct(self, kind: type[Struct]) -> Struct:
        """The arguments that a struct of the op has as its fields, together."""
        return kind(**{name: self.args[name] for name in kind._fields})  # type: ignore[attr-defined]

    def rows(self, name: str) -> int:
        """The most rows that a tensor may have: of tokens as many as the bucket, of sampled rows often far fewer."""
        return self.largest(self.args[name].shape[0])


def _always(site: CallSite) -> bool:
    return True


def _nothing(site: CallSite) -> str:
    return ""


def _unknown(site: CallSite, constants: Mapping[str, Any]) -> str:
    return ""


def each_alone(site: CallSite, constants: Mapping[str, Any]) -> str:
    """`Impl.row_order` of an implementation that computes every row independently of the others, with any constants."""
    return "independent"


def by_site(site: CallSite) -> Sequence[Mapping[str, Any]]:
    """`Impl.configs` of an implementation that computes each row independently where the site asks for that, else the
    fastest way for their number."""
    return ({"invariant": site.deterministic},)


@dataclass(frozen=True)
class Impl:
    """A faster body of an op. ``fn`` is called with all arguments of the op by name; tracing it must yield the kernel
    calls.

    device: where it runs. supports: whether it computes the op exactly as specified at a `CallSite`. configs: the
    launch constants it may run with there, passed to ``fn`` by keyword: the first where nothing was tuned, the fastest
    where something was. row_order: a name for how a row is computed at a deterministic site with some launch constants;
    where an op has equal names at sites of one weight or state, rows are bitwise equal, in whatever batches they are.
    Empty, the default: a row may depend on others, and deterministic mode passes the implementation over. remedy: what
    a user can do where ``supports`` does not hold, "block_size 8: use ..."; empty where nothing is known.
    """

    op: str
    name: str
    fn: Callable[..., Any]
    device: str
    supports: Callable[[CallSite], bool] = _always
    configs: Callable[[CallSite], Sequence[Mapping[str, Any]]] = lambda site: ({},)
    row_order: Callable[[CallSite, Mapping[str, Any]], str] = _unknown
    remedy: Callable[[CallSite], str] = _nothing

    def at(self, site: CallSite) -> Callable[..., Any]:
        """``fn`` with the launch constants it has at a site where nothing was tuned."""
        return functools.partial(self.fn, **self.configs(site)[0])


@dataclass
class Op:
    """A registered operator. Calling it dispatches ``torch.ops.graphllm.<name>``, so every tracer sees one node. cost
    is called with all arguments by name."""

    name: str
    reference: Callable[..., Any]
    boundary: bool
    mutates: tuple[str, ...]
    collective: bool
    cost: Callable[..., Cost]
    rowwise: bool = False
    neutral: Neutral | None = None
    impls: dict[str, Impl] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.operands = Operands(self.reference)
        self.reference = self.operands.flattened(self.reference)
        schema = torch.library.infer_schema(self.reference, mutates_args=self.mutates)
        _library.define(self.name + schema)
        _library.impl(self.name, self.reference, "CompositeExplicitAutograd")
        self.overload: torch._ops.OpOverload = getattr(getattr(torch.ops, NAMESPACE), self.name).default
        self.signature = self.operands.flat
        self.cost = self._by_name(self.cost)
        self._fake: Callable[..., Any] | None = None
        self._traceable = False
        self._tuning: Callable[..., Mapping[str, torch.Tensor]] | None = None
        torch.library.register_fake(self.overload.name(), self._describe, lib=_library)
        self.__doc__ = self.reference.__doc__
        self.__wrapped__ = self.reference

    @property
    def folder(self) -> Path:
        """Where the op and its kernels are."""
        return Path(inspect.unwrap(self.reference).__code__.co_filename).parent

    @property
    def untraceable(self) -> bool:
        """Whether the reference may be impossible to trace."""
        return self._fake is not None and not self._traceable

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.overload(**self.bind(args, kwargs)) if self.operands.structs else self.overload(*args, **kwargs)

    def fake(self, fn: Callable[..., Any] | None = None, *, traceable: bool = False) -> Callable[..., Any]:
        """Describe the results without data: same shapes, dtypes *and strides* as the reference. For a reference that
        cannot run on tensors without data, or talks to other processes; and, ``traceable``, to save the time of tracing
        it. ``fn`` takes the arguments that it names."""
        if fn is None:
            return functools.partial(self.fake, traceable=traceable)
        self._fake, self._traceable = self._by_name(fn), traceable
        return fn

    def tuning_inputs(self, fn: Callable[..., Mapping[str, torch.Tensor]]) -> Callable[..., Any]:
        """What implementations are timed on, where the work depends on values or the op writes in place: from the
        arguments that it names, tensors of a site's shapes and dtypes, ``fn`` makes those with values that matter."""
        self._tuning = self._by_name(fn)
        return fn

    @property
    def tunable(self) -> bool:
        """Whether random numbers, and zeros for integers, are an input like any other, or `tuning_inputs` are known,
        and no other process is needed."""
        return (self._tuning is not None or not self.mutates) and not self.collective

    def with_tuning_inputs(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """All arguments of a call to time, from tensors of its shapes and dtypes, with what `tuning_inputs` gives in
        their places."""
        return {**arguments, **(self._tuning(**arguments) if self._tuning else {})}

    def _describe(self, *args: Any, **kwargs: Any) -> Any:
        if self._fake is not None:
            return self._fake(**self.bind(args, kwargs))
        # On meta tensors: a machine without a GPU cannot index fake ones of a GPU.
        tensors = (v for v in tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor))
        device = next((t.device for t in tensors), torch.device("cpu"))
        args, kwargs = _moved((args, kwargs), torch.device("meta"))
        return _moved(self.traced(*args, **kwargs), device)

    def traced(self, *args: Any, **kwargs: Any) -> Any:
        """What the reference does, for tracers: by torch's Python kernels, since some of the others take a dynamic size
        for a constant."""
        with enable_python_dispatcher():
            return self.reference(*args, **kwargs)

    def _by_name(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """``fn``, called with all arguments of the op, takes those that it names. Raises TypeError for other names."""
        own, arguments = inspect.signature(fn).parameters, [*self.signature.parameters, *self.operands.structs]
        if unknown := [n for n, p in own.items() if p.kind is not p.VAR_KEYWORD and n not in arguments]:
            known = ", ".join(arguments)
            raise TypeError(f"op {self.name}: {', '.join(unknown)} of a cost or fake is none of its arguments, {known}")
        return self.operands.taking(fn)

    def impl(
        self,
        name: str,
        *,
        device: str,
        supports: Callable[[CallSite], bool] = _always,
        configs: Callable[[CallSite], Sequence[Mapping[str, Any]]] = Impl.configs,
        row_order: Callable[[CallSite, Mapping[str, Any]], str] = _unknown,
        remedy: Callable[[CallSite], str] = _nothing,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register a faster implementation, which takes the arguments and launch constants that it names. Where nothing
        was tuned, the first registered one is chosen for which ``supports`` holds."""

        def register(fn: Callable[..., Any]) -> Callable[..., Any]:
            if name in self.impls:
                raise ValueError(f"op {self.name} already has an implementation named {name!r}; choose another name")
            taking = self.operands.taking(fn)
            self.impls[name] = Impl(self.name, name, taking, device, supports, configs, row_order, remedy)
            return fn

        return register

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The call's arguments by parameter name, defaults filled in."""
        return self.operands.bind(args, kwargs)


def _moved(values: Any, device: torch.device) -> Any:
    """Tensors of the same shapes, dtypes and strides on another device, with whatever is in its memory."""

    def move(t: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)

    return tree_map_only(torch.Tensor, move, values)


def op(
    *,
    cost: Callable[..., Cost],
    boundary: bool = False,
    mutates: tuple[str, ...] = (),
    collective: bool = False,
    rowwise: bool = False,
    neutral: Neutral | None = None,
) -> Callable[[Callable[..., Any]], Op]:
    """Declare an op; the decorated function's signature is the schema and its body the specification.

    boundary: a graph may be cut here (attention, collectives). mutates: the tensor parameters written in place.
    rowwise: the result's row t depends on row t of the arguments that have a row for each token, and on all of the
    others. neutral: an argument and what is left where it is an input that is neutral throughout a step: another one,
    which then is the result, or the op without the arguments of a tuple; such steps run a program with that in the
    op's place. cost: bytes and flops from the op's own arguments, those that
    it names, for rooflines. Raises ValueError when the name is taken.
    """

    def register(fn: Callable[..., Any]) -> Op:
        if fn.__name__ in _ops:
            raise ValueError(f"an op named {fn.__name__!r} is already registered; op names are global, choose another")
        made = Op(fn.__name__, fn, boundary, mutates, collective, cost, rowwise, neutral)
        _ops[fn.__name__] = made
        return made

    return register


def all_ops() -> dict[str, Op]:
    """The ops registered so far, by name. `graphllm.ir.registry.load_ops` imports them all."""
    return dict(_ops)


def op_of(target: object) -> Op | None:
    """The `Op` of an FX node's target, or None for aten and Python operators."""
    if isinstance(target, torch._ops.OpOverload) and target.namespace == NAMESPACE:
        return _ops.get(target._schema.name.split("::")[1])
    return None


def nbytes(*tensors: torch.Tensor | None) -> int:
    """Bytes of the given tensors, None counting nothing: a helper for `cost` formulas."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
