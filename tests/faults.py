"""Does the suite find faults? Forty small ones, each put into a copy of this repository, before its tests run there.

`python tests/faults.py run [--tier test|all] [NUMBER ...]`: for each fault, the test files of a tier whose imports
reach the changed file, the nearest first, up to the first failure. "all" runs what `make test` missed. Results go to
build/faults.json as they come, so that a run that was stopped goes on where it was; `show` prints them.

`python tests/faults.py draw SEED ...` proposes faults: a folder, a file in it by its size, a place in it, all by
chance. Half of the table below was drawn that way. A drawn fault is left out only where it changes nothing that can be
observed on a CPU; SKIPPED says why.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.reach import Graph  # noqa: E402

RESULTS = ROOT / "build" / "faults.json"
COPY = ROOT / "build" / "faulty"


class Fault(NamedTuple):
    """file: of the repository. right, wrong: its text, that stands there once, and what it becomes. what: in words.
    seed: of `draw`, for a drawn one."""

    file: str
    right: str
    wrong: str
    what: str
    seed: int | None = None

    def apply(self, root: Path) -> None:
        """Write it into the repository at ``root``."""
        path = root / self.file
        text = path.read_text()
        assert text.count(self.right) == 1, f"{self.file} has {text.count(self.right)} times {self.right!r}"
        path.write_text(text.replace(self.right, self.wrong))


FAULTS: tuple[Fault, ...] = (
    # chosen
    Fault(
        "ops/process_logits/cpu.cpp",
        "  return y - (times > 0 ? presence : 0.0f);",
        "  return y - (count > 0 ? presence : 0.0f);",
        "the presence penalty also hits tokens that only the prompt has",
    ),
    Fault(
        "ops/cpu_int_rows.h",
        "        std::memcpy(padded, x, inside * sizeof(T));",
        "        std::memcpy(padded, x, (inside - 1) * sizeof(T));",
        "int8 and int4 products leave out the last input where the width is no multiple of the group",
    ),
    Fault(
        "ops/cpu_gguf_formats.h",
        "    const Numbers n = g < 4 ? packed(tile, half, g + 4) & 63 : (packed(tile, half, g + 4) >> 4) | "
        "(packed(tile, half, g) >> 6 << 4);",
        "    const Numbers n = g < 4 ? packed(tile, half, g + 4) & 63 : (packed(tile, half, g + 4) >> 4) | "
        "(packed(tile, half, g - 4) >> 6 << 4);",
        "GGUF's Q4_K and Q5_K: the minima of groups 4 to 7 get the upper bits of the scales",
    ),
    Fault(
        "ops/paged_attention/worker.h",
        "      spans[r].oldest = std::int32_t(a_.window > 0 ? position - a_.window : -1);",
        "      spans[r].oldest = std::int32_t(a_.window > 0 ? position - a_.window - 1 : -1);",
        "decode with a sliding window sees one token too many",
    ),
    Fault(
        "ops/paged_attention/triton_verify.py",
        "            there = at < before",
        "            there = at <= before",
        "verification: the mask of the last tile lets in the first new token a second time",
    ),
    Fault(
        "ops/rejection_sample/triton_rejection_sample.py",
        "                    accepted = coin * tl.load(q_ptr + draft) < p",
        "                    accepted = coin * p < tl.load(q_ptr + draft)",
        "rejection sampling accepts drafts by the inverted ratio",
    ),
    Fault(
        "ops/rope/op.py",
        "    first, second = x_THE[..., :F], x_THE[..., F : 2 * F]",
        "    first, second = x_THE[..., :F], x_THE[..., -F:]",
        "heads that rotate in part pair their first entries with the last ones of the head",
    ),
    Fault(
        "passes/add_adapters.py",
        '    plain = not config.lora_target_modules and found[0].kind == "linear" and bool(unit.layers)',
        '    plain = found[0].kind == "linear" and bool(unit.layers)',
        "--lora-target-modules leaves out nothing: every linear layer gets adapters",
    ),
    Fault(
        "model_defs/gemma.py",
        '        scale=whole(hf, "query_pre_attn_scalar", 256) ** -0.5,',
        "        scale=E**-0.5,",
        "Gemma's attention is scaled by the head's width, not by query_pre_attn_scalar (27B)",
    ),
    Fault(
        "graphllm/weights/formats/gptq.py",
        '        return numbers, unpacked(parts["qzeros"], bits, 1, rows) + more, of',
        '        return numbers, unpacked(parts["qzeros"], bits, 1, rows), of',
        "zero points of GPTQ checkpoints are one too low",
    ),
    Fault(
        "graphllm/weights/adapters.py",
        "    a, b = a.to(kind), (b * pair.scale).to(kind)",
        "    a, b = a.to(kind), b.to(kind)",
        "LoRA adapters are served without their scale, alpha / r",
    ),
    Fault(
        "graphllm/engine/digests.py",
        "        return hashlib.sha256(self._key + repr((request.cache_salt, adapter, seen_by_all)).encode()).digest()",
        "        return hashlib.sha256(self._key + repr((adapter, seen_by_all)).encode()).digest()",
        "requests with different cache_salt share prefixes in the cache",
    ),
    Fault(
        "graphllm/engine/outputs.py",
        "                if (at := text.find(stop, max(self.safe, old + 1 - len(stop)))) >= 0",
        "                if (at := text.find(stop, max(self.safe, old))) >= 0",
        "a stop string that spans two tokens is not found",
    ),
    Fault(
        "graphllm/engine/batch.py",
        "            target[row] = prompt[len(prompt) + sample_index[row]]",
        "            target[row] = prompt[len(prompt) + sample_index[row] - 1]",
        "prompt_logprobs are of the token before, not of the one that follows",
    ),
    Fault(
        "graphllm/runtime/staging.py",
        "        self._copy(buffer, f.offset, f.offset + rows * (f.bytes // f.shape[0]))",
        "        self._copy(buffer, f.offset, f.offset + (rows - 1) * (f.bytes // f.shape[0]))",
        "the last row of the grammar masks of a step never reaches the kernels",
    ),
    Fault(
        "graphllm/compile/sampling.py",
        '    index_R = v["step.sample_index"] + torch.index_select(moved_T, 0, v["step.logits_indices"])',
        '    index_R = v["step.sample_index"]',
        "with a seed, the text depends on which drafts were rejected: random numbers are of another place",
    ),
    Fault(
        "graphllm/entrypoints/llm.py",
        "    return [finished[request.request_id] for request in parsed]",
        "    return list(finished.values())",
        "LLM.generate gives outputs in the order in which they ended, not in that of the prompts",
    ),
    Fault(
        "graphllm/server/openai/answers.py",
        "            completion=before.completion + (0 if self._call.alone else tokens), "
        "cached=output.num_cached_tokens",
        "            completion=0 if self._call.alone else tokens, cached=output.num_cached_tokens",
        "the usage at the end of a stream counts the tokens of its last chunk alone",
    ),
    Fault(
        "graphllm/cli/results.py",
        '        state: _State = "failed" if status >= 500 else "answered" if status < 400 else "refused"',
        '        state: _State = "failed" if status > 500 else "answered" if status < 400 else "refused"',
        "a batch that is continued does not run again what failed before with status 500",
    ),
    Fault(
        "graphllm/config/sampling.py",
        '        normal=lambda value: None if value == -1 else value, column=("int64", 0, "request"),',
        '        normal=lambda value: None if value in (-1, 0) else value, column=("int64", 0, "request"),',
        "seed 0 counts as none: the same request gives another text each time",
    ),
    # drawn
    Fault(
        "graphllm/engine/proofs.py",
        "            return False",
        "            return True",
        "schemas too deep to look into count as excluding each other, so oneOf lets documents of two branches pass",
        1,
    ),
    Fault(
        "graphllm/program/stages.py",
        '        bundle = call.bundle if own else {**call.bundle, "code": [c for c in call.bundle["code"] if '
        "c[0] in _GEOMETRY]}",
        '        bundle = call.bundle if own else {**call.bundle, "code": [c for c in call.bundle["code"] if '
        "c[1] in _GEOMETRY]}",
        "pipelines: the places of what other stages make are dropped, and a model in stages cannot be linked",
        3,
    ),
    Fault(
        "graphllm/program/schema.py",
        "        return min((g.block_size for g in self.groups), default=16)",
        "        return min((g.block_size for g in self.groups), default=17)",
        "recurrent models without a cache of blocks: reused prefixes end at multiples of 17, not of 16",
        4,
    ),
    Fault(
        "graphllm/quantize/run.py",
        "    return Fit(perplexity[0], perplexity[1], same / count, count, text)",
        "    return Fit(perplexity[0], perplexity[1], same * count, count, text)",
        "`graphllm quantize` tells a share of equal tokens in the thousands",
        5,
    ),
    Fault(
        "graphllm/runtime/states.py",
        "                kept[snapshot].copy_(valid)",
        "                ...",
        "snapshots of recurrent states stay empty: a prefix hit goes on from zeros",
        7,
    ),
    Fault(
        "graphllm/program/schema.py",
        "        return query_len if self.tree is None or query_len == 1 else self.tree.levels + 1",
        "        return query_len if self.tree is not None or query_len == 1 else self.tree.levels + 1",
        "speculation without a tree fails as steps are planned; with a tree, sequences count on too many tokens",
        8,
    ),
    Fault(
        "ops/paged_attention/triton_common.py",
        "            part = (tl.abs(rows) + 16384.0) - 16384.0",
        "            part = (tl.abs(rows) - 16384.0) - 16384.0",
        "Triton's interpreter: small keys and values become huge in a cache of fp8",
        9,
    ),
    Fault(
        "graphllm/cli/bench/startup.py",
        "    seconds = {name: _spread([getattr(start, name) for start in starts]) for name in Start._fields "
        'if name != "phases"}',
        "    seconds = {name: _spread([getattr(start, name) for start in starts]) for name in Start._fields "
        'if name == "phases"}',
        "`graphllm bench startup` fails, or tells the phases in place of the seconds",
        10,
    ),
    Fault(
        "passes/fuse_linear.py",
        "    if add is None or add.target is not torch.ops.aten.add.Tensor or add.kwargs:",
        "    if add is None and add.target is not torch.ops.aten.add.Tensor or add.kwargs:",
        "a linear layer whose result is read twice, as in EAGLE heads, cannot be compiled; other operations "
        "pass for sums",
        12,
    ),
    Fault(
        "graphllm/quantize/merge.py",
        "        factors.append((a, b * (pair.scale * weight), magnitude))",
        "        ...",
        "`graphllm merge` leaves the adapter out",
        13,
    ),
    Fault(
        "graphllm/config/sampling.py",
        "        fields = greedy | {ours: config[theirs] for theirs, ours in _FROM_GENERATION_CONFIG.items() "
        "if theirs in config}",
        "        fields = greedy | {ours: config[theirs] for theirs, ours in _FROM_GENERATION_CONFIG.items() "
        "if theirs not in config}",
        "no model can be opened: sampling defaults that generation_config.json lacks are looked up in it",
        14,
    ),
    Fault(
        "model_defs/moe.py",
        '        renormalize=mixtral or switch(hf, "norm_topk_prob", False),',
        '        renormalize=mixtral and switch(hf, "norm_topk_prob", False),',
        "Mixtral's expert weights are not renormalized, nor those of models with norm_topk_prob",
        17,
    ),
    Fault(
        "graphllm/entrypoints/async_llm.py",
        "            entries = 1 + max(self.parsed.params.logprobs or 0, 0)",
        "            entries = 1 + max(self.parsed.params.logprobs and 0, 0)",
        "streams of deltas without logprobs fail at their first token",
        18,
    ),
    Fault(
        "graphllm/cli/run.py",
        "    completions, more = 0, True",
        "    completions, more = 0, False",
        "`graphllm run` runs nothing and ends as if all were done",
        19,
    ),
    Fault(
        "graphllm/engine/expert_placement.py",
        "        slot, wanted = rest[0], new[rest[0]]",
        "        slot, wanted = rest[0], new[rest[1]]",
        "experts that change places between ranks: the plan of copies puts one into a slot of another, or never ends",
        20,
    ),
    Fault(
        "graphllm/rewrite/unit.py",
        '        owners = tuple(f"{self.prefix}layers.{i}" for i in self.layers) or (self.name,)',
        '        owners = tuple(f"{self.prefix}layers.{i}" for i in self.layers) and (self.name,)',
        "embeddings, heads and the layers' weights are looked up in the plan by wrong names: nothing compiles",
        23,
    ),
    Fault(
        "graphllm/weights/schemes.py",
        "        if not (source.endswith(_SUFFIX) and len(read.stored) == 2) and not (own_name and "
        "len(read.stored) == 3):",
        "        if not (source.endswith(_SUFFIX) and len(read.stored) == 2) and not (own_name or "
        "len(read.stored) == 3):",
        "random weights: biases and stacks of experts that no such checkpoint has encoded are taken as encoded",
        24,
    ),
    Fault(
        "graphllm/weights/random.py",
        "            part.copy_(made[name].narrow(where[0], 0, part.shape[where[0]]))",
        "            part.copy_(made[name].narrow(where[0], 1, part.shape[where[0]]))",
        "random weights of large quantized matrices cannot be made: rows are taken from beyond the end",
        25,
    ),
    Fault(
        "passes/scale_cache.py",
        "        return PassReport(0)",
        "        return PassReport(1)",
        "the artifact and `graphllm inspect` say that scale_cache changed units that it left alone",
        27,
    ),
    Fault(
        "graphllm/config/structured_outputs.py",
        "                if n not in known",
        "                if n in known",
        "structured_outputs: every field that exists is refused, and unknown ones are not",
        28,
    ),
)
SKIPPED: dict[int, str] = {
    2: "tensor_parallel_size is a checked whole number from 1, never None or 0",
    6: "all units of a trace have the same Shapes",
    11: "a case of tests and benchmarks alone",
    15: "where a word lies in a table; all who read or write it take the place from here, and words 1 and 2 are free",
    16: "the process ends, or the last reference to the socket goes, just behind; both close it",
    21: "these requests are never queued, only their prompts are read",
    22: "a range in steps of whole tokens: the end moves by less than a step",
    26: "waits for a GPU; benchmarks of GPUs alone",
}

# ---- drawing ----

_NOT_HERE = re.compile(r"gluon|cuda|cubin|embedded/|vendor/|symmetric_memory|ray_nodes|/__init__\.py|_trial|stub_")
_SWAPS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in", ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*",
    ast.Div: "*", ast.Mod: "//", ast.And: "or", ast.Or: "and",
}  # fmt: skip
_CPP_SWAPS = {
    " < ": " <= ", " <= ": " < ", " > ": " >= ", " >= ": " > ", " + ": " - ", " - ": " + ", " * ": " + ",
    " += ": " -= ",
    " && ": " || ", " || ": " && ", " == ": " != ", " != ": " == ",
}  # fmt: skip


def draw(seed: int) -> Fault:
    """A fault by chance, the same for the same seed and sources."""
    chance = random.Random(seed)
    folders: dict[str, list[Path]] = {}
    for top in ("graphllm", "ops", "passes", "model_defs"):
        for path in sorted((ROOT / top).rglob("*")):
            name = path.relative_to(ROOT).as_posix()
            if path.suffix not in (".py", ".cpp", ".h", ".js") or _NOT_HERE.search(name) or path.is_symlink():
                continue
            if top == "graphllm" and name.split("/")[1] in ("ops", "passes", "model_defs"):
                continue
            folders.setdefault("/".join(name.split("/")[: 2 if top == "graphllm" else 1]), []).append(path)
    folders["graphllm"] = [p for f in [f for f in folders if f.endswith(".py")] for p in folders.pop(f)]
    while True:
        files = folders[chance.choice(sorted(folders))]
        path = chance.choices(files, [p.stat().st_size for p in files])[0]
        text = path.read_text()
        places = list(_places(text) if path.suffix == ".py" else _cpp_places(text))
        if not places:
            continue
        start, end, wrong = chance.choice(places)
        first, last = start, end  # widened until it stands there once
        while text.count(text[first:last]) != 1:
            first, last = max(0, first - 1), min(len(text), last + 1)
        first, last = text.rfind("\n", 0, first) + 1, (text.find("\n", last) + len(text) + 1) % (len(text) + 1)
        right = text[first:last]
        if text.count(right) != 1 or right.count("\n") > 3:
            continue
        return Fault(
            path.relative_to(ROOT).as_posix(), right, text[first:start] + wrong + text[end:last], "drawn", seed
        )


def _places(text: str) -> Iterator[tuple[int, int, str]]:
    """Of Python: start and end of what may change, and what it becomes."""
    tree = ast.parse(text)
    lines = [0, *(m.end() for m in re.finditer("\n", text))]

    def at(line: int, column: int) -> int:
        return lines[line - 1] + len(text[lines[line - 1] :].encode()[:column].decode(errors="ignore"))

    def between(left: ast.expr, right: ast.expr, wrong: str) -> Iterator[tuple[int, int, str]]:
        a, b = at(left.end_lineno, left.end_col_offset), at(right.lineno, right.col_offset)  # type: ignore[arg-type]
        if found := re.search(r"not in|is not|[<>=!]=|//|[<>+\-*/%]|\b(?:in|is|and|or)\b", text[a:b]):
            yield a + found.start(), a + found.end(), wrong

    for node in _code(tree):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield from between(node.left, node.comparators[0], _SWAPS[type(node.ops[0])])
        elif isinstance(node, ast.BinOp) and type(node.op) in _SWAPS:
            yield from between(node.left, node.right, _SWAPS[type(node.op)])
        elif isinstance(node, ast.BoolOp):
            yield from between(node.values[0], node.values[1], _SWAPS[type(node.op)])
        elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
            wrong = str(not node.value) if isinstance(node.value, bool) else str(node.value + 1)
            yield at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset), wrong  # type: ignore[arg-type]
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset), "..."  # type: ignore[arg-type]
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield at(node.lineno, node.col_offset), at(node.operand.lineno, node.operand.col_offset), ""


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """What runs: no annotations, no errors' texts, no asserts, no logging."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Raise, ast.Assert, ast.JoinedStr, ast.AnnAssign)):
            continue
        if isinstance(child, ast.Expr) and "log." in ast.unparse(child)[:12]:
            continue
        yield child
        yield from _code(child)


def _cpp_places(text: str) -> Iterator[tuple[int, int, str]]:
    clean = re.sub(r'//[^\n]*|/\*.*?\*/|"[^"\n]*"|^#[^\n]*', lambda m: "~" * len(m[0]), text, flags=re.S | re.M)
    for right, wrong in _CPP_SWAPS.items():
        for found in re.finditer(re.escape(right), clean):
            yield found.start(), found.end(), wrong


# ---- running ----

_OWN = "tests/test_suite.py"  # compares this table with the sources, so it would find each of them
_PATIENCE = 1800.0  # seconds for the tests of one fault; what hangs longer is found


def _copy() -> None:
    """This checkout as it is, with its environment; what its tests have compiled stays from fault to fault."""
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for top in {f.partition("/")[0] for f in files}:
        shutil.rmtree(COPY / top, ignore_errors=True)
    for file in files:
        if (ROOT / file).exists():
            (COPY / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, COPY / file, follow_symlinks=False)
    if not (COPY / ".venv").exists():
        (COPY / ".venv").symlink_to(ROOT / ".venv")
        subprocess.run(["git", "init", "-q", COPY], check=True)  # so that it can be asked for its files


def _tried(fault: Fault, graph: Graph, tier: str) -> dict[str, object]:
    """What the tests of a tier say to a fault: some files after the other, as collecting all takes most of a minute."""
    files = [f for f in graph.reached([fault.file]) if f != _OWN]
    fault.apply(COPY)
    begun, found = time.monotonic(), ""
    for part in (files[:10], files[10:50], files[50:]):
        if part and not found:
            found = _first_failure(part, tier)
    shutil.copy2(ROOT / fault.file, COPY / fault.file)
    return {"found by": found[:400], "files": len(files), "seconds": round(time.monotonic() - begun)}


def _first_failure(files: list[str], tier: str) -> str:
    """Of these tests in the copy; empty if they pass."""
    chosen = {"test": "not slow and not thorough", "all": "not slow"}[tier]
    command = [
        *(".venv/bin/python", "-m", "pytest", "-x", "-n", "auto", "--dist", "loadfile", "--as-given", "-m", chosen),
        *("-p", "no:cacheprovider", "--tb=line", "-rf"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(COPY)}
    run = subprocess.Popen(
        [*command, *files], cwd=COPY, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = run.communicate(timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        return "hangs"
    if run.returncode in (0, 5):  # 5: none of these files has a test of the tier
        return ""
    return next(iter(re.findall(r"^(?:FAILED|ERROR) (.*)", said, re.M)), said[-400:])


def _results() -> dict[str, dict[str, dict[str, object]]]:
    """By fault, then by tier."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def _key(fault: Fault) -> str:
    return f"{fault.file}: {fault.what}"


def run(tier: str, numbers: list[int]) -> None:
    """Those of the table that have no result yet; with numbers, these again."""
    _copy()
    graph = Graph()
    for number, fault in enumerate(FAULTS):
        done = _results()
        known = done.setdefault(_key(fault), {})
        missed = known.get("test", {}).get("found by") == ""
        if number in numbers or (not numbers and tier not in known and (tier == "test" or missed)):
            known[tier] = _tried(fault, graph, tier)
            RESULTS.write_text(json.dumps(done, indent=1))
            print(number, fault.file, known[tier], flush=True)


def show() -> None:
    """How many were found, and by what."""
    done = _results()
    for tier in ("test", "all"):
        rows = [(n, f, done[_key(f)][tier]) for n, f in enumerate(FAULTS) if tier in done.get(_key(f), {})]
        print(f"{tier}: {sum(bool(row['found by']) for *_, row in rows)} of {len(rows)} found")
        for number, fault, row in rows:
            print(f"  {number:2} {fault.file}: {fault.what}: {row['found by'] or 'MISSED'} ({row['seconds']} s)")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--tier", choices=("test", "all"), default="test")
    running.add_argument("numbers", nargs="*", type=int)
    commands.add_parser("show")
    drawing = commands.add_parser("draw")
    drawing.add_argument("seeds", nargs="+", type=int)
    asked = parser.parse_args()
    if asked.command == "run":
        run(asked.tier, asked.numbers)
    elif asked.command == "show":
        show()
    else:
        for fault in map(draw, asked.seeds):
            print(f"{fault.seed} {fault.file}\n- {fault.right}\n+ {fault.wrong}")


if __name__ == "__main__":
    main()
