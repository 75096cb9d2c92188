"""shard: what tensor-parallel ranks compute apart is put together. The weights were divided with the plan.

Products over divided inputs and the share of experts that a rank has are parts of a sum, `all_reduce`. Of a divided
vocabulary, a rank looks up the tokens that it has, and its logits are concatenated with the other ranks'.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from graphllm.config import CompileConfig
from graphllm.ir.graph import TensorSpec
from graphllm.ir.groups import EXPERTS, TENSOR
from graphllm.ir.op import op_of
from graphllm.ops.collectives.all_gather import all_gather
from graphllm.ops.collectives.all_reduce import all_reduce
from graphllm.ops.collectives.gather_rows import gather_rows
from graphllm.ops.collectives.sum_rows import sum_rows
from graphllm.ops.embeddings.embedding import embedding
from graphllm.ops.gemm.linear import linear
from graphllm.ops.moe.fused_moe import fused_moe
from graphllm.ops.moe.place_experts import place_experts
from graphllm.ops.norms.gated_rms_norm import gated_rms_norm
from graphllm.ops.norms.rms_norm import rms_norm
from graphllm.rewrite import PassReport, Unit, fake_values, register_pass
from graphllm.weights.plan.expert_slots import ROUTING_TABLES, first_placement, routing_tables
from graphllm.weights.plan.expr import Expr, Slice, Values
from graphllm.weights.plan.plan import Entry, WeightPlan
from graphllm.weights.plan.shard import on_first_rank

aten = torch.ops.aten


@register_pass(numerics="reorders")
def shard(unit: Unit, plan: WeightPlan, config: CompileConfig) -> PassReport:
    """Put collectives after the ops that read divided weights. A bias that is added to a part of a sum is kept only by
    the first rank."""
    if config.tensor_parallel_size == config.data_parallel_experts == 1:
        return PassReport(0)
    work = _Sharding(unit, plan, config)
    if config.data_parallel_experts > 1:
        work.run_shared()
    else:
        work.run()
    return PassReport(len(work.notes), tuple(work.notes), work.plan)


class _Sharding:
    """One unit. plan: with the entries that the unit needs in addition to its weights."""

    def __init__(self, unit: Unit, plan: WeightPlan, config: CompileConfig) -> None:
        self.unit, self.plan = unit, plan
        self.ranks = max(config.tensor_parallel_size, config.data_parallel_experts)
        # Experts of a draft graph, which nobody counts, stay where they are.
        self._moving = config.enable_eplb and not unit.prefix
        self._redundant = config.num_redundant_experts
        self.notes: list[str] = []
        self._reductions: dict[Node, None] = {}  # in the order of the graph

    def run(self) -> None:
        labels = {n: n.meta["label"] for n in self.unit.graph.find_nodes(op="placeholder")}
        weights = {n: label.removeprefix("w.") for n, label in labels.items() if label.startswith("w.")}
        shards = {n: self._entry(name).shard for n, name in weights.items()}
        for node, name in weights.items():  # the trace knows the whole vocabulary and all experts
            self._resize(node, self._entry(name).shape)
        for node in list(self.unit.graph.nodes):
            op = op_of(node.target)
            if op is None:
                continue
            given = op.bind(node.args, node.kwargs)
            divided = {n: shards[v] for n, v in given.items() if isinstance(v, Node) and shards.get(v) is not None}
            if op is embedding and divided:
                self._look_up(node, given)
            elif op is linear and divided.get("weight_OI") == "vocab":
                self._gather(node, given)
            elif op is rms_norm and divided:
                self._normalize(node, given)
            elif op is gated_rms_norm and divided and given["parts"] > 1:
                self._normalize_gated(node, given)
            elif op is fused_moe and divided:
                self._experts(node, given, divided)
            elif "input" in divided.values():
                self._sum(node, given, "bias_O")
        self._merge()

    def run_shared(self) -> None:
        """Of a core that has some of the experts: they compute the tokens of all cores, and every core gets the sum for
        its own."""
        for node in list(self.unit.graph.nodes):
            if op_of(node.target) is not fused_moe:
                continue
            given = fused_moe.bind(node.args, node.kwargs)
            for value in given.values():
                if isinstance(value, Node) and value.op == "placeholder" and value.meta["label"].startswith("w."):
                    self._resize(value, self._entry(value.meta["label"].removeprefix("w.")).shape)
            rows = {
                name: self.unit.insert(node, gather_rows.overload, given[name], EXPERTS, self.ranks)
                for name in ("x_TD", "weights_TA", "experts_TA")
            }
            count = given["down_NDF"].meta["val"].shape[0]
            local, inside = self._from_first(node, rows["experts_TA"], count, "first_expert")
            chosen = self.unit.insert(node, aten.where.ScalarOther, inside, local, -1)
            parts = self.unit.insert(node, fused_moe.overload, **{**given, **rows, "experts_TA": chosen})
            node.replace_all_uses_with(self.unit.insert(node, sum_rows.overload, parts, EXPERTS, self.ranks))
            self.unit.graph.erase_node(node)
            self._note(parts, given, "tokens of all cores, and their sum")

    def _entry(self, weight: str) -> Entry:
        return self.plan[self.unit.entries(weight)[0]]

    def _resize(self, node: Node, shape: tuple[int, ...]) -> None:
        value = node.meta["val"]
        if tuple(value.shape) != shape:
            with self.unit.shapes.mode:
                node.meta["val"] = value.new_empty(shape)

    def _note(self, node: Node, given: dict[str, Any], what: str) -> None:
        names = [v.meta["label"] for v in given.values() if isinstance(v, Node) and v.op == "placeholder"]
        self.notes.append(f"{next(n.removeprefix('w.') for n in names if n.startswith('w.'))}: {what}")

    def _sum(self, node: Node, given: dict[str, Any], bias: str | None) -> None:
        """The sum of what the node gives on all ranks, in its place."""
        if bias is not None and given.get(bias) is not None:
            self._keep_on_first(given[bias])
        self._reduce(node)
        self._note(node, given, "all_reduce")

    def _reduce(self, node: Node) -> None:
        total = self.unit.insert(node.next, all_reduce.overload, node, TENSOR, self.ranks)
        node.replace_all_uses_with(total, delete_user_cb=lambda user: user is not total)
        self._reductions[total] = None

    def _keep_on_first(self, bias: Node) -> None:
        label = bias.meta.get("label", "")
        if bias.op != "placeholder" or not label.startswith("w.") or len(bias.users) != 1:
            raise ValueError(f"{bias.name}: what is added to a sum over ranks must be a weight that nothing else reads")
        for name in self.unit.entries(label.removeprefix("w.")):
            own = replace(self.plan[name], expr=self.plan.expr_of(name))  # also of what was tied to another bias
            changed = on_first_rank(own, self.ranks)
            self.plan = WeightPlan(tuple(changed if e.name == name else e for e in self.plan))

    def _experts(self, node: Node, given: dict[str, Any], divided: dict[str, Any]) -> None:
        """The part of a layer that is this rank's: of all experts some of the width, or some of the experts."""
        if divided["down_NDF"] != "expert":
            self._sum(node, given, "down_bias_ND")
            return
        count = given["down_NDF"].meta["val"].shape[0]
        if self._moving:
            chosen = self._placed(node, given["experts_TA"], count)
        else:
            local, inside = self._from_first(node, given["experts_TA"], count, "first_expert")
            chosen = self.unit.insert(node, aten.where.ScalarOther, inside, local, -1)
        node.args, node.kwargs = (), {**given, "experts_TA": chosen}
        self._sum(node, given, None)

    def _placed(self, before: Node, experts: Node, count: int) -> Node:
        """The rank's slots of chosen experts, by tables that are written while serving."""
        N = self.ranks * count - self._redundant
        tables = routing_tables(first_placement(N, self._redundant), N)
        starts, slots = (self._numbers(n, t, per_rank=0) for n, t in zip(ROUTING_TABLES, tables, strict=True))
        first = self._numbers("first_slot", [rank * count for rank in range(self.ranks)], per_rank=1)
        return self.unit.insert(before, place_experts.overload, experts, starts, slots, first, count)

    def _look_up(self, node: Node, given: dict[str, Any]) -> None:
        """Rows of the tokens that this rank has, zeros for the others."""
        count = given["table_VD"].meta["val"].shape[0]
        local, inside = self._from_first(node, given["token_ids_T"], count, "first_token")
        within = self.unit.insert(node, aten.clamp.default, local, 0, count - 1)
        node.args, node.kwargs = (), {**given, "token_ids_T": within}
        column = self.unit.insert(node.next, aten.unsqueeze.default, inside, 1)
        kept = self.unit.insert(column.next, aten.where.ScalarOther, column, node, 0.0)
        node.replace_all_uses_with(kept, delete_user_cb=lambda user: user is not kept)
        self._sum(kept, given, None)

    def _from_first(self, before: Node, ids: Node, count: int, name: str) -> tuple[Node, Node]:
        """Numbers of tokens or experts less that of the first one that the rank has, of ``count``, and which of them it
        has."""
        first = self._numbers(name, [rank * count for rank in range(self.ranks)], per_rank=1)
        local = self.unit.insert(before, aten.sub.Tensor, ids, first)
        reached = self.unit.insert(before, aten.ge.Scalar, local, 0)
        inside = self.unit.insert(before, aten.lt.Scalar, local, count)
        return local, self.unit.insert(before, aten.logical_and.default, reached, inside)

    def _numbers(self, name: str, numbers: list[int], per_rank: int) -> Node:
        """An input of the unit with these numbers, int32: ``per_rank`` on each rank, or all of them for 0."""
        count = per_rank or len(numbers)
        node = self.unit.input(f"w.{name}", TensorSpec.contiguous("int32", count))
        whole: Expr = Values(tuple(map(float, numbers)), (len(numbers),))
        expr = Slice(whole, 0, 0, per_rank, per_rank) if per_rank else whole
        for entry in self.unit.entries(name):
            made = Entry(entry, (count,), "int32", expr, exact=True)
            owner = entry.removesuffix(name)
            at = next(i for i, e in enumerate(self.plan) if e.name.startswith(owner))
            self.plan = WeightPlan((*self.plan.entries[:at], made, *self.plan.entries[at:]))
        return node

    def _gather(self, node: Node, given: dict[str, Any]) -> None:
        """The logits of the whole vocabulary, of those that the rank has."""
        width = node.meta["val"].shape[1]
        with self.unit.shapes.mode, torch.no_grad():
            node.meta["val"] = node.target(*fake_values(node.args), **fake_values(node.kwargs))  # type: ignore[operator]
        whole = self.unit.insert(node.next, all_gather.overload, node, TENSOR, self.ranks, width)
        node.replace_all_uses_with(whole, delete_user_cb=lambda user: user is not whole)
        self._note(node, given, "all_gather")

    def _normalize(self, node: Node, given: dict[str, Any]) -> None:
        """The norm of rows that the rank has a part of: their mean squares are of all parts. Heads that several ranks
        have count as often in the sum as in the number of entries."""
        x, weight, offset = given["x"], given["weight"], given["offset"]
        value, add = x.meta["val"], self.unit.insert
        wide = torch.promote_types(value.dtype, torch.float32)
        normed = self._at_unit(node, add(node, aten._to_copy.default, x, dtype=wide), given["eps"], self.ranks)
        if offset:
            scale = add(node, aten.add.Scalar, add(node, aten._to_copy.default, weight, dtype=wide), offset)
            last = add(node, aten._to_copy.default, add(node, aten.mul.Tensor, normed, scale), dtype=value.dtype)
        else:
            last = add(node, aten.mul.Tensor, add(node, aten._to_copy.default, normed, dtype=value.dtype), weight)
        node.replace_all_uses_with(last)
        self.unit.graph.erase_node(node)
        self._note(node, given, "all_reduce of mean squares")

    def _normalize_gated(self, node: Node, given: dict[str, Any]) -> None:
        """The same of a recurrent layer's heads, of which several ranks have some of one group."""
        x, add = given["x_TD"], self.unit.insert
        dtype = x.meta["val"].dtype
        wide = torch.promote_types(dtype, torch.float32)
        normed, gate = (add(node, aten._to_copy.default, v, dtype=wide) for v in (x, given["gate_TD"]))
        gate = add(node, aten.silu.default, gate)
        if given["gate_first"]:
            normed = add(node, aten.mul.Tensor, normed, gate)
        normed = add(
            node, aten._to_copy.default, self._at_unit(node, normed, given["eps"], given["parts"]), dtype=dtype
        )
        last = add(node, aten.mul.Tensor, normed, given["weight_E"])
        if not given["gate_first"]:
            last = add(node, aten._to_copy.default, add(node, aten.mul.Tensor, last, gate), dtype=dtype)
        node.replace_all_uses_with(last)
        self.unit.graph.erase_node(node)
        self._note(node, given, "all_reduce of mean squares")

    def _at_unit(self, node: Node, x: Node, eps: float, parts: int) -> Node:
        """Rows with a root mean square of 1 over what so many neighbouring ranks have of them."""
        add, groups = self.unit.insert, self.ranks // parts
        sums = add(node, aten.sum.dim_IntList, add(node, aten.mul.Tensor, x, x), [-1], True)
        if groups > 1:  # a column for each; a rank writes and reads its own
            columns = [int(rank // parts == group) for rank in range(self.ranks) for group in range(groups)]
            own = self._numbers("norm_group", columns, per_rank=groups)
            sums = add(node, aten.mul.Tensor, sums, own)
        sums = add(node, all_reduce.overload, sums, TENSOR, self.ranks)
        if groups > 1:
            sums = add(node, aten.sum.dim_IntList, add(node, aten.mul.Tensor, sums, own), [-1], True)
        mean = add(node, aten.div.Scalar, sums, float(x.meta["val"].shape[-1] * parts))
        factor = add(node, aten.rsqrt.default, add(node, aten.add.Scalar, mean, eps))
        return add(node, aten.mul.Tensor, x, factor)

    def _merge(self) -> None:
        """One reduction in place of two, where their results, times something that all ranks have, are added."""
        for node in list(self.unit.graph.find_nodes(op="call_function", target=aten.add.Tensor)):
            if len(node.args) != 2 or node.kwargs:
                continue
            under = [self._reduction_under(a) for a in node.args]
            if None in under or under[0] is under[1]:
                continue
            for reduction in under:
                assert reduction is not None
                reduction.replace_all_uses_with(reduction.args[0])  # type: ignore[arg-type]
                del self._reductions[reduction]
                self.unit.graph.erase_node(reduction)
            self._reduce(node)
            self.notes.append(f"{node.name}: one all_reduce of two")

    def _reduction_under(self, value: Any) -> Node | None:
        """The reduction that makes a value, which nothing else reads, directly or times something that does not depend
        on another one."""
        if not isinstance(value, Node) or len(value.users) != 1:
            return None
        if value in self._reductions:
            return value
        if value.target is not aten.mul.Tensor:
            return None
        found = [r for a in value.args if (r := self._reduction_under(a)) is not None]
        return found[0] if len(found) == 1 else None
