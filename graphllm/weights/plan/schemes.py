"""What a checkpoint's ``quantization_config`` says: in which encoding each of its matrices is stored.

`as_quantized` rewrites the weight plan by it: where the checkpoint has the parts of an encoded matrix in place of the
matrix, the plan decodes them. A method is one function, from the config to the encoding of a tensor's module; which
modules are not encoded, the tensors themselves show. No torch.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from graphllm.config import CompileConfig, ConfigError
from graphllm.config.compilation import Quantization
from graphllm.config.fields import section
from graphllm.weights.checkpoint.checkpoint import TensorInfo
from graphllm.weights.dtypes import BY_TAG, DTYPES, PLAIN
from graphllm.weights.encodings import Encoding, Part, encoding_of, is_encoding
from graphllm.weights.plan.expr import ANY, Decode, Expr, Permute, Read, Reshape, map_parts, walk
from graphllm.weights.plan.gguf_steps import as_stored, changed, without_inverses
from graphllm.weights.plan.plan import WeightPlan
from graphllm.weights.plan.simplify import simplify

Scheme = Callable[[str], str | None]  # the encoding of a module's weight, by the module's name; None: plain numbers
Stored = Mapping[str, TensorInfo]
_CONFIG = "config.json: quantization_config"
_SUFFIX = ".weight"
_OPTIONAL = ("static", "zeros", "index")  # endings of encodings with a last part that may be there
# Names of vLLM's for kernels of a method.
_SAME = {"awq_marlin": "awq", "gptq_marlin": "gptq", "modelopt_fp4": "modelopt", "inc": "auto-round"}


_FLOATS = {"fp8": "float8-0", "mxfp4": "e2m1-32", "nf4": "nf4_rows"}
_ONLINE = {  # the encodings that plain numbers are rounded to
    "cpu": {"int8": "int8", "int4": "int4", **_FLOATS},
    "cuda": {"int8": "byte_bf16-64", "int4": "nibble_bf16-32", **_FLOATS},
}


def wanted_encoding(plan: WeightPlan, entry: str, config: CompileConfig) -> str | None:
    """The encoding that the plain numbers of an entry are to be rounded to, by the first rule that fits one of its
    names; None for those that stay."""
    if plan[entry].exact:
        return None
    rules = (rule.rpartition("=")[::2] for rule in config.quantization_rules)
    said = next((to for pattern, to in rules if is_named(plan, entry, pattern)), config.quantization)
    return None if said in (None, "none") else _ONLINE[config.target.device][str(said)]


def is_read(encoding: Encoding, op: str | None, config: CompileConfig) -> bool:
    """Whether there is an op that reads an encoding, of its ops that one, where the artifact will run."""
    return op is not None and (config.backend == "eager" or config.target.device in encoding.devices)


def is_named(plan: WeightPlan, entry: str, pattern: str) -> bool:
    """Whether a pattern with * and ? fits an entry's own name, or that of a module of the checkpoint in it, with or
    without what stands before."""
    reads = (e for e in walk(plan.expr_of(entry)) if isinstance(e, Read))
    names = (entry, *(source.removesuffix(_SUFFIX) for read in reads for source in read.sources))
    return any(fnmatch.fnmatchcase(f".{name}", f"*.{pattern}") for name in names)


def scheme_of(config: Mapping[str, Any]) -> Scheme | None:
    """What a ``config.json`` says; None for a checkpoint of plain numbers. Raises ConfigError for a method, or settings
    of one, that cannot be read."""
    if config.get("quantization_config") is None:
        return None
    found = section(config, "quantization_config")
    method = found.get("quant_method", "compressed-tensors" if "config_groups" in found else None)
    if method not in METHODS:
        raise ConfigError(
            f"{_CONFIG}: quant_method is {method!r:.80}, which cannot be read; use a checkpoint of "
            f"{', '.join(METHODS)}, or an unquantized one"
        )
    return METHODS[method](found)


def unread_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a ``quantization_config`` that its method does not ask for."""
    if config.get("quantization_config") is None:
        return {}
    found = _Noted(section(config, "quantization_config"))
    if (method := found.get("quant_method")) in METHODS:
        METHODS[method](found)("")  # some are asked for with the first module
    return {n: v for n, v in found.items() if n not in found.used}


class _Noted(dict[str, Any]):
    """Knows which fields were asked for."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self.used: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.used.add(name)
        return super().get(name, default)

    def __getitem__(self, name: str) -> Any:
        self.used.add(name)
        return super().__getitem__(name)


def is_own_method(config: Mapping[str, Any], said: str) -> bool:
    """Whether what a user gave as ``quantization`` is how the checkpoint is quantized."""
    return _SAME.get(said, said) == section(config, "quantization_config").get("quant_method")


def check_method(config: Mapping[str, Any], said: str) -> None:
    """Raises ConfigError unless what a user gave as ``quantization`` is the checkpoint's own method."""
    if is_own_method(config, said):
        return
    method = section(config, "quantization_config").get("quant_method")
    if _SAME.get(said, said) not in METHODS:
        raise ConfigError(f"quantization is {said!r:.80}: use {' or '.join(get_args(Quantization))}, or leave it out")
    stored = f"this checkpoint is of {method}" if method else "this checkpoint is not quantized"
    raise ConfigError(
        f"quantization is {said!r:.80}: {stored}; leave it out, or give {' or '.join(get_args(Quantization))} to round "
        "its weights while they are loaded"
    )


def as_quantized(plan: WeightPlan, config: Mapping[str, Any], stored: Stored | None) -> WeightPlan:
    """The plan of the same parameters, read as the checkpoint stores them. stored: its tensors; None where there are
    none (random weights): all matrices of layers are then as the config says. Raises ConfigError as `scheme_of`."""
    scheme = scheme_of(config)
    if scheme is None:
        return plan
    found = section(config, "quantization_config")
    changes = section(found, "changes", _CONFIG) if found.get("quant_method") == "gguf" else None
    entries = []
    for entry in plan:
        if entry.tie or (stored is None and (entry.exact or ".layers." not in f".{entry.name}")):
            entries.append(entry)
            continue
        expr = changed(entry.expr, changes, stored) if stored is not None and changes is not None else entry.expr
        expr = _rewritten(expr, scheme, stored)
        if stored is not None and changes is not None:
            expr = simplify(as_stored(without_inverses(expr), stored))
        entries.append(dataclasses.replace(entry, expr=expr))
    return WeightPlan(tuple(entries))


def _rewritten(expr: Expr, scheme: Scheme, stored: Stored | None) -> Expr:
    if not isinstance(expr, Read):
        return map_parts(expr, lambda part: _rewritten(part, scheme, stored))
    if len(expr.stored) not in (2, 3) or expr.dtype is not None:
        return expr
    for source in expr.sources:
        name = scheme(source.removesuffix(_SUFFIX))
        if name is not None and (made := _decoded(expr, source, _variant(name, source, stored), stored)) is not None:
            return made
    return expr


def _variant(name: str, source: str, stored: Stored | None) -> str:
    """The encoding as the checkpoint has it: with the scale of the activations, or zero points, if they are stored with
    this matrix, and with scales of the dtype that they are stored in."""
    if stored is None:
        return name

    def known(ending: str) -> str | None:
        family, *numbers = name.split("-")
        other = "-".join((f"{family}_{ending}", *numbers))
        return other if is_encoding(other) else None

    for ending in _OPTIONAL:
        more = known(ending)
        if more is not None and encoding_of(more).parts[-1].source(source) in stored:
            name = more
            break
    for part in encoding_of(name).parts:
        there = stored.get(part.source(source))
        if part.name == "scales" and there is not None and there.dtype != DTYPES[part.dtype].tag:
            return known(BY_TAG[there.dtype].name) or name
    return name


def _decoded(read: Read, source: str, name: str, stored: Stored | None) -> Expr | None:
    """What a read of plain numbers becomes; None where the checkpoint has plain numbers."""
    parts = encoding_of(name).parts
    first = parts[0].source(source)
    if stored is None:
        if any(ANY in p.shape(*read.stored[-2:]) for p in parts):
            return None
        own_name = parts[0].stored.startswith("{source}")  # next to it, as encodings of stacks have
        if not (source.endswith(_SUFFIX) and len(read.stored) == 2) and not (own_name and len(read.stored) == 3):
            return None
    elif first not in stored or stored[first].dtype != DTYPES[parts[0].dtype].tag:
        return None
    if len(read.stored) == 3:
        return _stack(read, source, name, stored)
    matrix = (read.stored[0], read.stored[1])
    if matrix[0] == ANY:
        matrix = (_rows(name, matrix[1], stored[first].shape) if stored else 0, matrix[1])
    # Adapters may know it by its other names.
    sources = (source, *(other for other in read.sources if other != source))
    return Decode(name, tuple(_part(p, sources, p.shape(*matrix), stored) for p in parts), matrix)


def _rows(name: str, inner: int, shape: Sequence[int]) -> int:
    """Rows of a matrix, by the shape of its first part."""
    part = encoding_of(name).parts[0]
    for unit in (1, 8, 32):
        one, two = part.shape(unit, inner), part.shape(2 * unit, inner)
        moved = [d for d in range(len(one)) if one[d] != two[d]]
        if moved:
            return shape[moved[0]] * unit // one[moved[0]]
    raise ValueError(f"{name}: {part.name} does not tell the rows")


def _part(part: Part, sources: Sequence[str], wanted: tuple[int, ...], stored: Stored | None) -> Expr:
    """One part, of any shape with as many numbers; floats are read whatever their format. sources: of the matrix, the
    one that is there first."""
    names = tuple(map(part.source, sources))
    there = stored.get(names[0]) if stored else None
    dtype = None if part.dtype in PLAIN else part.dtype
    if there is None or there.shape == wanted or math.prod(there.shape) != math.prod(wanted):
        return Read(names, wanted, dtype)
    return Reshape(Read(names, there.shape, dtype), wanted)


def _stack(read: Read, source: str, name: str, stored: Stored | None) -> Expr | None:
    """Stacked matrices [N, inner, rows]; their encoded rows are stored as [N, rows, ..], as in GPT-OSS."""
    count, inner, rows = read.stored
    matrix = (count * rows, inner)
    parts = encoding_of(name).parts
    decoded = Decode(name, tuple(_part(p, (source,), p.shape(*matrix), stored) for p in parts), matrix)
    return Permute(Reshape(decoded, (count, rows, inner)), (0, 2, 1))


# --- methods


def _gptq(config: Mapping[str, Any]) -> Scheme:
    bits, group = _number(config, "bits", (2, 3, 4, 8)), _group(config)
    field = "checkpoint_format" if "checkpoint_format" in config else "format"
    written = config.get(field) or "gptq"
    if written not in ("gptq", "gptq_v2"):
        raise _unreadable(field, written, "gptq, gptq_v2")
    by_module = _dynamic(config)

    def scheme(module: str) -> str | None:
        own = by_module(module)
        if own is None:
            return None

        def said(field: str, default: Any = None) -> Any:
            return own.get(field, config.get(field, default))

        width = max(said("group_size", group), 0)
        family = "gptq_sym" if said("sym") is True else "gptqv2" if written == "gptq_v2" else "gptq"
        # All of a row is in one group, whatever order it was quantized in.
        return f"{family}{'' if said('desc_act') and width else '_ordered'}-{said('bits', bits)}-{width}"

    return scheme


def _dynamic(config: Mapping[str, Any]) -> Callable[[str], Mapping[str, Any] | None]:
    """GPTQModel's settings of single modules: regular expressions after "+:", or "-:" for modules that are not
    encoded."""
    rules = section(config, "dynamic", _CONFIG) if config.get("dynamic") else {}

    def of(module: str) -> Mapping[str, Any] | None:
        for pattern, own in rules.items():
            if re.match(pattern.removeprefix("-:").removeprefix("+:"), module):
                return None if pattern.startswith("-:") else own
        return {}

    return of


def _awq(config: Mapping[str, Any]) -> Scheme:
    _number(config, "bits", (4,))
    if (version := str(config.get("version", "gemm")).lower()) != "gemm":
        raise _unreadable("version", version, "gemm")
    group = _group(config)
    return lambda module: f"awq-{group}"


def _auto_round(config: Mapping[str, Any]) -> Scheme:
    packing = str(config.get("packing_format", "auto_round:auto_gptq"))
    bits, group = _number(config, "bits", (2, 3, 4, 8)), _group(config)
    if "awq" in packing:
        return _awq(config)
    if "gptq" not in packing and packing != "auto_round":
        raise _unreadable("packing_format", packing, "auto_round:auto_gptq, auto_round:auto_awq")
    family = "gptq_sym_ordered" if config.get("sym") is True else "gptq_ordered"
    return lambda module: f"{family}-{bits}-{group}"


def _fp8(config: Mapping[str, Any]) -> Scheme:
    block = config.get("weight_block_size")
    if block is None:
        return lambda module: "fp8-0-0"
    if not (isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)):
        raise _unreadable("weight_block_size", block, "two whole numbers, such as [128, 128]")
    return lambda module: f"fp8_inv-{block[0]}-{block[1]}"


def _mxfp4(config: Mapping[str, Any]) -> Scheme:
    return lambda module: "mxfp4" if ".experts." in f".{module}." else None


def _modelopt(config: Mapping[str, Any]) -> Scheme:
    settings = section(config, "quantization", _CONFIG) if "quantization" in config else config
    algorithm = settings.get("quant_algo")
    if algorithm not in ("FP8", "NVFP4"):
        raise _unreadable("quant_algo", algorithm, "FP8, NVFP4")
    return lambda module: "fp8-0-0" if algorithm == "FP8" else "nvfp4_modelopt"


def _compressed(config: Mapping[str, Any]) -> Scheme:
    sparsity = config.get("sparsity_config") or {}
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        raise ConfigError(
            f"{_CONFIG}: sparsity_config.format is {sparsity.get('format')!r:.80}: sparse weights cannot be read; save "
            "the model without compressing them (save_pretrained(..., save_compressed=False))"
        )
    groups = section(config, "config_groups", _CONFIG)
    found = {name: section(groups, name, f"{_CONFIG}.config_groups") for name in groups}
    made = [(tuple(g.get("targets", ())), _of_group(name, g, config)) for name, g in found.items()]
    ignored = tuple(config.get("ignore") or ())

    def scheme(module: str) -> str | None:
        if _is_named(module, ignored):
            return None
        named = [encoding for targets, encoding in made if _is_named(module, targets)]
        linear = [encoding for targets, encoding in made if "Linear" in targets]
        return next(iter((*named, *linear)), None)

    return scheme


def _is_named(module: str, names: Sequence[str]) -> bool:
    """Whether one of the names, or of the regular expressions after "re:", is that of a module."""
    return any(re.match(n[3:], module) if n.startswith("re:") else n == module for n in names)


def _of_group(name: str, group: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """The encoding of one of compressed-tensors' groups of modules."""
    where = f"config_groups.{name}.weights"
    weights = section(group, "weights", f"{_CONFIG}.config_groups.{name}")
    kind, bits, strategy = weights.get("type", "int"), weights.get("num_bits"), weights.get("strategy", "tensor")
    size = weights.get("group_size") or 0
    if kind == "float" and bits == 4:
        return "mxfp4_packed" if size == 32 else "nvfp4"
    block = weights.get("block_structure") or (0, 0)
    extents = {"tensor": (0, 0), "channel": (1, 0), "group": (1, size), "block": block}
    if strategy not in extents or (kind, bits) not in (("float", 8), *(("int", n) for n in range(2, 9))):
        raise _unreadable(where, f"{kind} of {bits} bits, {strategy}", "integers of 2 to 8 bits and float8 of tensors, "
                          "channels, groups or blocks, and float4 of groups")  # fmt: skip
    rows, inner = extents[strategy]
    if kind == "float":
        return f"fp8-{rows}-{inner}"
    if (group.get("format") or config.get("format")) == "pack-quantized":
        zeros, order = not weights.get("symmetric", True), weights.get("actorder") in ("group", True)
        return f"packed{'_zeros' * zeros}{'_order' * order}-{bits}-{max(inner, 0)}"
    return f"ints-{rows}-{inner}"


def _bitsandbytes(config: Mapping[str, Any]) -> Scheme:
    if config.get("load_in_8bit"):
        return lambda module: "llm_int8"
    if not config.get("load_in_4bit"):
        raise _unreadable("load_in_4bit", config.get("load_in_4bit"), "true, or load_in_8bit true")
    kind, storage = config.get("bnb_4bit_quant_type", "fp4"), config.get("bnb_4bit_quant_storage", "uint8")
    if kind not in ("nf4", "fp4"):
        raise _unreadable("bnb_4bit_quant_type", kind, "nf4, fp4")
    if storage != "uint8":
        raise _unreadable("bnb_4bit_quant_storage", storage, "uint8")
    return lambda module: f"{kind}_nested" if config.get("bnb_4bit_use_double_quant") else kind


_TORCHAO = {
    "Int8WeightOnlyConfig": "ao_ints", "Int8DynamicActivationInt8WeightConfig": "ao_ints",
    "IntxWeightOnlyConfig": "ao_ints", "Int8DynamicActivationIntxWeightConfig": "ao_ints",
    "Float8WeightOnlyConfig": "ao_fp8", "Float8DynamicActivationFloat8WeightConfig": "ao_fp8",
    "Int4WeightOnlyConfig": "ao_int4",
}  # fmt: skip
_DEFAULT_GRAIN = {"Float8DynamicActivationFloat8WeightConfig": "PerTensor"}


def _gguf(config: Mapping[str, Any]) -> Scheme:
    """What `graphllm.weights.checkpoint.gguf.config` writes: the type of each matrix."""
    types = section(config, "types", _CONFIG)
    section(config, "changes", _CONFIG)  # which `as_quantized` makes
    return lambda module: f"gguf_{types[module]}" if module in types else None


def _torchao(config: Mapping[str, Any]) -> Scheme:
    """TorchAO's config of all modules, under "default", as it writes its classes: _type, and the fields in _data."""
    found = section(section(config, "quant_type", _CONFIG), "default", f"{_CONFIG}.quant_type")
    where, kind, fields = f"{_CONFIG}.quant_type.default", found.get("_type"), section(found, "_data", _CONFIG)
    if kind not in _TORCHAO:
        raise _unreadable("quant_type.default._type", kind, ", ".join(_TORCHAO))
    for name, packing in (("int4_packing_format", "PLAIN"), ("intx_packing_format", "UNPACKED_TO_INT8")):
        given = fields.get(name)
        said = str(given.get("_data") if isinstance(given, Mapping) else given or packing).upper()
        if said != packing:
            raise ConfigError(
                f"{where}: {name} is {said!r:.80}, the layout of one kernel; save the model again with "
                f"{packing.lower()}, or use another checkpoint"
            )
    if kind == "Int4WeightOnlyConfig":
        return lambda module: f"ao_int4-{_group({'group_size': fields.get('group_size', 128)})}"
    grain = fields.get("weight_granularity") or fields.get("granularity")
    grain = grain[-1] if isinstance(grain, list) else grain  # of activations, then of weights
    of = (
        section({"granularity": grain}, "granularity", where)
        if grain
        else {"_type": _DEFAULT_GRAIN.get(kind, "PerRow")}
    )
    extents = {"PerTensor": "0-0", "PerRow": "1-0", "PerAxis": "1-0"}
    if of.get("_type") == "PerGroup":
        return lambda module: f"{_TORCHAO[kind]}-1-{_group(section(of, '_data', where))}"
    if of.get("_type") not in extents:
        raise _unreadable("granularity", of.get("_type"), f"PerGroup, {', '.join(extents)}")
    return lambda module: f"{_TORCHAO[kind]}-{extents[of['_type']]}"


METHODS: dict[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "fp8": _fp8,
    "fbgemm_fp8": lambda config: lambda module: "fp8-1-0",
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
    "mxfp4": _mxfp4,
    "modelopt": _modelopt,
    "bitsandbytes": _bitsandbytes,
    "torchao": _torchao,
    "gguf": _gguf,
}
"""By ``quant_method``."""


def _number(config: Mapping[str, Any], field: str, known: Sequence[int]) -> int:
    found: Any = config.get(field)
    if found not in known:
        raise _unreadable(field, found, ", ".join(map(str, known)))
    return int(found)


def _group(config: Mapping[str, Any]) -> int:
    """Inner entries of a group; 0 for all of a row."""
    found = config.get("group_size", 128)
    if type(found) is not int or found == 0 or found < -1:
        raise _unreadable("group_size", found, "whole numbers from 1, and -1 for all of a row")
    return max(found, 0)


def _unreadable(field: str, found: object, known: str) -> ConfigError:
    return ConfigError(f"{_CONFIG}: {field} is {found!r:.80}; what can be read is {known}; use another checkpoint")
