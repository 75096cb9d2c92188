"""Where a checkpoint has the parameters of a module of transformers: under which names, and made of which tensors.

transformers renames and converts checkpoint tensors while it loads them. Its rules are data (`conversion_mapping`);
they are read backwards here, from a parameter to expressions over tensors. No rule is run on a tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    GroupWeightRename,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    rename_source_key,
)

from graphllm.compile.transformers_model.checkpoint.converted import ConversionError, Convert
from graphllm.compile.transformers_model.recipe import Recipe
from graphllm.config import ConfigError
from graphllm.ir import Weight
from graphllm.weights.plan.expr import ANY, Expr, Read, map_parts, walk
from graphllm.weights.plan.plan import expr_of_sources
from graphllm.weights.plan.simplify import simplify

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LAYER = "{layer}"
_NUMBER = "90071"  # stands for the layer's index while names are changed: no other number in a name is like it


class StoredWeights:
    """What checkpoints of a model hold. model: an instance of the class, which may lie on the device meta."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self._ties: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
        every = get_model_conversion_mapping(model)
        own = len(get_model_conversion_mapping(model, add_legacy=False))
        self._renamings = [t for t in every if isinstance(t, WeightRenaming)]
        self._converters = [t for t in every if isinstance(t, WeightConverter)]
        self._backwards = [_backwards(t) for t in every[:own] if isinstance(t, WeightRenaming)][::-1]
        self._legacy = [_backwards(t) for t in every[own:] if isinstance(t, WeightRenaming)][::-1]

    def of_recipe(self, recipe: Recipe, layer: int | None = None) -> Recipe:
        """A recipe with the weights that `replaced` gives."""
        return recipe._replace(weights=self.replaced(recipe.weights, layer))

    def replaced(self, weights: Mapping[str, Weight], layer: int | None = None) -> dict[str, Weight]:
        """Weights whose sources name parameters of the module, with sources or an expression that name tensors of the
        checkpoint. layer: the index of a layer that has these weights, for ``{layer}`` in names. Raises ConfigError,
        naming the parameter, for one that no expression can say."""
        found: dict[str, Expr] = {}
        for weight in weights.values():
            for name in _parameters(weight):
                if name not in found:
                    found[name] = self.of(name, layer)
        return {name: with_stored(name, weight, found) for name, weight in weights.items()}

    def of(self, name: str, layer: int | None = None) -> Expr:
        """What makes a parameter, by its name in the module; a `Read` where a tensor is it. The parameters that are
        tied to it are read where it is missing. Raises ConfigError."""
        root = self._ties.get(name, name)
        tied = [other for other, to in self._ties.items() if to == root]
        expr = self._of_one(root, layer)
        if not isinstance(expr, Read):
            return expr
        others = [part for other in tied if isinstance(part := self._of_one(other, layer), Read)]
        sources = dict.fromkeys(source for read in (expr, *others) for source in read.sources)
        return dataclasses.replace(expr, sources=tuple(sources))

    def _of_one(self, name: str, layer: int | None) -> Expr:
        """What makes a parameter, apart from ties."""
        marked = name.replace(_LAYER, _NUMBER)
        shape = self._shapes.get(_at(marked, layer))
        if shape is None:
            raise self._refused(f"{_at(marked, layer)} is no parameter, nor a buffer that is saved")
        try:
            for converter in self._converters:
                if (made := self._converted(converter, marked, shape, layer)) is not None:
                    return _unmarked(made)
            sources = self._names(marked, marked, None, layer)
        except ConversionError as problem:
            raise self._refused(f"{name} is converted by {problem}, which no expression says") from problem
        if not sources:
            raise self._refused(f"no name of a tensor leads to {name}")
        return _unmarked(Read(sources, shape))

    def _refused(self, why: str) -> ConfigError:
        return ConfigError(
            f"{type(self._model).__name__}: what its checkpoints hold cannot be told: {why}; add a file for the model "
            "(docs/adding-a-model.md)"
        )

    def _converted(
        self, converter: WeightConverter, name: str, shape: tuple[int, ...], layer: int | None
    ) -> Expr | None:
        """What a parameter is if this converter makes it."""
        targets = converter._original_target_patterns
        for place, target in enumerate(targets):
            # The stored names, and the name of the first parameter that the converter makes of them.
            stored = [_rename(converter, target, source, name) for source in converter._original_source_patterns]
            first = _rename(converter, target, targets[0], name)
            if None in stored or first is None:
                continue

            def names(source: int, number: int | None, stored: Any = stored, first: str = first) -> tuple[str, ...]:
                single = stored[source] if number is None else stored[source].replace("*", str(number))
                found = self._names(single, first, converter.source_patterns[source], layer)
                if not found:
                    raise LookupError(single)
                return found

            def of_target(number: int, target: str = target) -> tuple[int, ...]:
                return self._shapes[_at(_rename(converter, target, targets[number], name) or "", layer)]

            try:
                return simplify(Convert(converter, self._model.config, names, of_target).expr(place, shape))
            except LookupError:  # no name of a tensor leads there
                continue
        return None

    def _names(self, name: str, parameter: str, pattern: str | None, layer: int | None) -> tuple[str, ...]:
        """The names of a tensor in checkpoints, the usual one first. name: after renaming. parameter, pattern: what it
        becomes the parameter of, by which pattern of a converter; names that do not lead there are left out."""
        prefixed = list(_with_and_without(name, self._model.base_model_prefix))
        usual = _before(self._backwards, prefixed[:1])
        legacy = _before(self._legacy, prefixed[:1])
        older = _before(self._backwards, [*prefixed[1:], *legacy, *_before(self._legacy, prefixed[1:])])
        found = dict.fromkeys((*usual, *older))
        wanted = (_at(parameter, layer), pattern)
        alike = (n for n in found if (_NUMBER in n) == (_NUMBER in parameter))
        return tuple(n for n in alike if self._leads_to(_at(n, layer)) == wanted)

    def _leads_to(self, name: str) -> tuple[str, str | None]:
        """The parameter that a checkpoint tensor is read for, and the pattern of the converter that makes it."""
        prefix, shapes = self._model.base_model_prefix, self._shapes
        renamed, pattern = rename_source_key(name, self._renamings, self._converters, prefix, shapes)
        if renamed not in shapes and name in shapes:
            renamed, pattern = rename_source_key(name, [], [], prefix, shapes)
        return renamed, pattern


def with_stored(name: str, weight: Weight, stored: Mapping[str, Expr]) -> Weight:
    """A weight whose sources name parameters, made of what the checkpoint stores of each. name: of the weight, for
    errors. stored: by name of the parameter. Raises ValueError where shapes contradict each other."""
    if not _parameters(weight):
        return weight
    expr = cast(Expr, weight.expr) if weight.expr is not None else expr_of_sources(name, weight, None)
    for read in (e for e in walk(expr) if isinstance(e, Read)):
        shape = stored[read.sources[0]].shape
        if len(read.stored) != len(shape) or any(n not in (ANY, m) for n, m in zip(read.stored, shape, strict=True)):
            raise ValueError(f"{name}: {read.sources[0]} is {shape}, not {read.stored}")
    if weight.expr is None and all(isinstance(stored[parameter], Read) for parameter in _parameters(weight)):
        reads = [cast(Read, stored[parameter]) for parameter in _parameters(weight)]
        sources = tuple(read.sources[0] if len(read.sources) == 1 else read.sources for read in reads)
        return dataclasses.replace(weight, sources=sources)
    made = simplify(_substituted(expr, stored))
    return dataclasses.replace(weight, sources=(), slice_rows=None, transpose=False, encoding=None, expr=made)


def _parameters(weight: Weight) -> tuple[str, ...]:
    """The parameters that a weight names, in order."""
    if weight.expr is not None:
        return tuple(e.sources[0] for e in walk(cast(Expr, weight.expr)) if isinstance(e, Read))
    return tuple(source if isinstance(source, str) else source[0] for source in weight.sources)


def _substituted(expr: Expr, stored: Mapping[str, Expr]) -> Expr:
    if isinstance(expr, Read):
        return stored[expr.sources[0]]
    return map_parts(expr, lambda part: _substituted(part, stored))


def _unmarked(expr: Expr) -> Expr:
    """The expression with the layer's index open again in all names."""
    if isinstance(expr, Read):
        return dataclasses.replace(expr, sources=tuple(source.replace(_NUMBER, _LAYER) for source in expr.sources))
    return map_parts(expr, _unmarked)


def _at(name: str, layer: int | None) -> str:
    """The name in one layer."""
    return name if layer is None else name.replace(_NUMBER, str(layer))


def _with_and_without(name: str, prefix: str) -> Iterable[str]:
    """A name as it is, then with the prefix of the model without its head, or without if it has that."""
    yield name
    if prefix:
        yield name.removeprefix(f"{prefix}.") if name.startswith(f"{prefix}.") else f"{prefix}.{name}"


class _Backwards(NamedTuple):
    """A renaming, from new names to old ones.

    steps: for each pattern of old names, one that makes such names.
    optional: files of today may have names that it leaves alone.
    is_stateful: old names depend on which others a file has.
    """

    steps: tuple[WeightRenaming, ...]
    optional: bool = False
    is_stateful: bool = False

    def before(self, name: str) -> list[str]:
        """The names that may have been before, the likeliest first. Raises ConversionError."""
        old = [step.rename_source_key(name)[0] for step in self.steps]
        if self.is_stateful and old != [name]:
            raise ConversionError("a renaming that depends on other names")
        return [name, *old] if self.optional else [*old, name]


def _backwards(renaming: WeightRenaming) -> _Backwards:
    if type(renaming) is not WeightRenaming:
        step = cast(WeightRenaming, renaming.reverse_transform())
        return _Backwards((step,), isinstance(renaming, PrefixChange), isinstance(renaming, GroupWeightRename))
    target = renaming._original_target_patterns[0]  # every pattern of old names becomes the first one
    steps = (_step(renaming, target, source) for source in renaming._original_source_patterns)
    return _Backwards(tuple(step for step in steps if step is not None))


def _step(like: WeightTransform, before: str, after: str) -> WeightRenaming | None:
    """A renaming where another one applies; None for patterns that have no way back."""
    try:
        step = WeightRenaming([before], [after])
    except ValueError:
        return None
    step.scope_prefix, step.base_model_prefix = like.scope_prefix, like.base_model_prefix
    return step


def _rename(like: WeightTransform, before: str, after: str, name: str) -> str | None:
    """The name with one pattern in place of another one; None where it does not have it."""
    step = _step(like, before, after)
    renamed, matched = step.rename_source_key(name) if step else ("", None)
    return None if matched is None else renamed


def _before(renamings: list[_Backwards], names: Iterable[str]) -> list[str]:
    """All names that may have become one of these, the likeliest first."""
    found = list(names)
    for renaming in renamings:
        found = list(dict.fromkeys(old for name in found for old in renaming.before(name)))
    return found
