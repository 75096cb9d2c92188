"""An outside package's models, which ask of the contracts what no family of graphllm does: each feature alone, and in
pairs, in every way in which requests run, against a plain torch loop."""

from __future__ import annotations

import importlib
import itertools
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from graphllm.config import Bucket, ConfigError
from graphllm.engine.core import EngineCore
from graphllm.engine.parts.snapshots import Snapshots
from graphllm.engine.requests.request import Adapter, EngineRequest, Item
from graphllm.ir.registry import load_ops
from graphllm.loading.checkpoint.source import open_source
from graphllm.loading.core.loaders.make_core import warm_up_host
from graphllm.runtime.commands.command import Command
from graphllm.runtime.commands.items import Encode
from graphllm.runtime.graphs import GraphPrograms
from tests.artifacts import artifact_of
from tests.engine.harness import GREEDY, finish, open_core, request, verify_all_drafts
from tests.strange import expected
from tests.tiers import COMPILED, ON_GPU, thorough

FEATURES = ("recurrent", "latent", "window", "cross", "image", "axes", "adapter", "extern", "encoded", "tables")
COUNT, SEQS = 12, 3
GROWING = (41, 45)  # lengths of prompts that need another block of 16 while they decode
DEVICE = "cuda" if ON_GPU else "cpu"


@pytest.fixture(scope="module", autouse=True)
def site(own_registries: pytest.MonkeyPatch) -> None:
    """The package, installed."""
    own_registries.syspath_prepend(Path(__file__).parent / "site")
    own_registries.syspath_prepend(Path(__file__).parents[2] / "docs" / "examples" / "plugin_encoding")
    load_ops()  # this process may have looked for plugins before, and a kept artifact is not compiled again


class Strange:
    """A checkpoint with some features, and what it is to give. buckets: to compile for; the usual ones if none."""

    def __init__(
        self,
        features: Sequence[str],
        folder: Path,
        seed: int = 5,
        draft: Path | None = None,
        buckets: tuple[Bucket, ...] | None = None,
    ) -> None:
        self.features, self.folder, self.draft, self.buckets = tuple(features), folder, draft, buckets
        self.weights = expected.weights(features, seed)
        items = {"cross", "image"} & set(features)
        architecture = "StrangeEncodedForCausalLM" if items else "StrangeForCausalLM"
        stored = dict(self.weights)
        if "encoded" in features:
            plugin = importlib.import_module("plugin_encoding")
            for name in [n for n in stored if n == "out" or n.startswith("layers.")]:
                parts = plugin.encode(stored[name])
                self.weights[name] = plugin.decode(parts, *stored[name].shape)
                stored |= {name: parts["values"], f"{name}_scale": parts["scales"]}
        folder.mkdir()
        config = {"architectures": [architecture], "features": list(features), "max_position_embeddings": 96}
        (folder / "config.json").write_text(json.dumps(config))
        save_file(stored, folder / "model.safetensors")
        rng = torch.Generator().manual_seed(seed)
        count = len(expected.layers(features))
        self.tables = [{i: torch.randn(expected.D, generator=rng) for i in range(count)} for _ in range(2)]

    def artifact(self, backend: str) -> Path:
        return artifact_of(
            open_source(self.folder, draft=self.draft), target=DEVICE, backend=backend, dtype="float32",
            max_model_len=96, max_num_seqs=SEQS, max_num_batched_tokens=32, block_size=16, num_speculative_tokens=2,
            item_tokens=24, max_loras=2, tune=False, jobs=2 if DEVICE == "cuda" else 0, buckets=self.buckets,
        )  # fmt: skip

    def core(self, backend: str = "eager", pages: int = 150, **options: Any) -> EngineCore:
        core = open_core(self.folder, self.artifact(backend), pages, draft=self.draft, **options)
        if "adapter" in self.features:
            for number, tables in enumerate(self.tables):
                core.write_adapter(f"{number + 1}", {f"layers.{i}.table": t.numpy() for i, t in tables.items()})
        return core

    def request(self, id: str, length: int, rng: random.Random) -> tuple[EngineRequest, list[int]]:
        """One with random tokens, items and adapter as the features have them, and the tokens that it should get."""
        prompt, items, seen, fields = [rng.randrange(1, 90) for _ in range(length)], [], [], {}
        for feature, at in (("cross", -1), ("image", rng.randint(0, 4))):
            # Few different ones, so that their rows are found again and given up.
            number = rng.randrange(5)
            if feature in self.features and length > 10 and number < 4:
                patches = torch.randn(3 + number, expected.PATCH, generator=torch.Generator().manual_seed(number))
                items.append(
                    Item(
                        content_hash=f"{number}", position=at, length=len(patches), data=patches.numpy().tobytes(),
                        dtype="float32", shape=tuple(patches.shape),
                    )
                )  # fmt: skip
                seen.append(expected.Seen(patches, at))
        adapter = rng.randrange(3) if "adapter" in self.features else 0
        if adapter:
            fields = {"adapter": Adapter("a", "", f"{adapter}")}
        tables = self.tables[adapter - 1] if adapter else None
        given = expected.greedy(self.features, self.weights, prompt, COUNT, seen, tables)
        return request(id, prompt, GREEDY, limit=COUNT, items=items, **fields), given

    def many(
        self, count: int, seed: int, lengths: Sequence[int] = (1, 7, 22, 41, 66)
    ) -> list[tuple[EngineRequest, list[int]]]:
        rng = random.Random(seed)
        return [self.request(str(i), rng.choice(lengths), rng) for i in range(count)]


def _check(core: EngineCore, wanted: list[tuple[EngineRequest, list[int]]], right: float = -1) -> dict[str, Any]:
    """Run requests at once. right: how likely a draft is right, negative for none. What each got beside its tokens."""
    rng = random.Random(0)

    def propose(number: int) -> None:
        for state in core.scheduler.requests.by_slot if right >= 0 else ():
            if state is not None:
                known = len(state.output)
                tokens = {r.id: t for r, t in wanted}[state.request.id][known:]
                core.scheduler.requests.propose(state, [t if rng.random() < right else (t + 1) % 90 for t in tokens])

    found = finish(core, [r for r, _ in wanted], propose)
    assert {id: r.tokens for id, r in found.items()} == {r.id: tokens for r, tokens in wanted}
    return found


def _every_way(strange: Strange, backend: str) -> None:
    """Alone; batched, in chunks, in slots used again; found in the prefix cache; with drafts; with too few blocks."""
    core, wanted = strange.core(backend), strange.many(7, 1)
    _check(core, wanted[:1])
    _check(core, wanted[1:])
    again = _check(core, wanted, right=0.7)
    assert any(r.cached for r in again.values())
    core.close()
    core = strange.core(backend, pages=_few(core))
    _check(core, strange.many(6, 2, GROWING), right=0.5)
    assert core.stats().preemptions
    core.close()


def _few(core: EngineCore) -> int:
    """Blocks for two prompts of GROWING and none more, with the null one."""
    return 1 + sum(2 * -(-GROWING[-1] // g.block_size) for g in core.executor.layout.groups)


@pytest.mark.parametrize("feature", FEATURES)
def test_alone(feature: str, tmp_path: Path) -> None:
    _every_way(Strange([feature], tmp_path / "model"), "eager")


@pytest.mark.slow
@pytest.mark.parametrize("pair", list(itertools.combinations(FEATURES, 2)), ids="-".join)
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_pairs(pair: tuple[str, str], backend: str, tmp_path: Path) -> None:
    _every_way(Strange(pair, tmp_path / "model"), backend)


@(pytest.mark.gpu if ON_GPU else pytest.mark.thorough)
def test_all_together_compiled(tmp_path: Path) -> None:
    """For one bucket of each kind, as every one takes a quarter of a minute."""
    buckets = (Bucket("decode", 1, 1), Bucket("decode", 2, SEQS, 3), Bucket("mixed", 2, 32))
    _every_way(Strange(FEATURES, tmp_path / "model", buckets=buckets), "inductor")


@COMPILED
@pytest.mark.parametrize("feature", FEATURES)
def test_alone_compiled(feature: str, tmp_path: Path) -> None:
    _every_way(Strange([feature], tmp_path / "model"), "inductor")


@pytest.fixture(scope="module")
def unlike(site: None, tmp_path_factory: pytest.TempPathFactory) -> Strange:
    """Layers that keep unlike states."""
    return Strange(["recurrent", "latent", "window"], tmp_path_factory.mktemp("unlike") / "model")


@pytest.mark.parametrize("right", [1.0, thorough(0.0)])
def test_unlike_states_are_rolled_back(unlike: Strange, right: float) -> None:
    """After a rejection at every draft position; with right drafts, steps keep all their tokens."""
    core, wanted = unlike.core(), unlike.many(6, 3)
    _check(core, wanted, right)
    steps = core.stats().steps
    _check(core, wanted)
    assert (core.stats().steps - steps > 1.5 * steps) == (right == 1.0)
    core.close()


def test_a_prefix_of_unlike_states_is_found_again(unlike: Strange) -> None:
    """A second prompt that begins as the first goes on from its blocks and a snapshot of its recurrent states."""
    core, prompt = unlike.core(), [1 + i % 90 for i in range(66)]
    for turn, tail in enumerate([[3, 4], [5]]):
        tokens = expected.greedy(unlike.features, unlike.weights, prompt + tail, COUNT)
        found = _check(core, [(request("0", prompt + tail, GREEDY, limit=COUNT), tokens)])["0"]
        assert found.cached == (64 if turn else 0)
    core.close()


def test_unlike_states_go_to_another_engine(unlike: Strange) -> None:
    """Blocks and the snapshot of a sequence, under digests that both know; the second computes only what is behind."""
    first, second = unlike.core(cache_secret="s"), unlike.core(cache_secret="s")
    wanted = request("0", [1 + i % 90 for i in range(66)], GREEDY, limit=COUNT)
    tokens = expected.greedy(unlike.features, unlike.weights, wanted.prompt, COUNT)
    _check(first, [(wanted, tokens)])
    entries = first.part(Snapshots).export_cache(wanted)
    groups = first.executor.layout.groups
    assert len({(g.retention, g.block_size) for g in groups}) > 1
    assert {e.group for e in entries} == {*range(len(groups)), -1}
    assert second.part(Snapshots).import_cache(entries) == len(entries)
    assert _check(second, [(wanted, tokens)])["0"].cached == 64
    first.close()
    second.close()


def test_items_are_encoded_once(tmp_path: Path) -> None:
    """Rows are kept by content, for requests that run together and for later ones."""
    strange = Strange(["cross", "image"], tmp_path / "model")
    core, wanted = strange.core(), strange.many(8, 4)
    encoded: list[bytes] = []
    do = core.executor.do

    def noting(command: Command) -> None:
        if isinstance(command, Encode):
            encoded.append(command.data.tobytes())
        do(command)

    core.executor.do = noting  # type: ignore[method-assign]
    _check(core, wanted)
    brought = [item.data for r, _ in wanted for item in r.items]
    assert len(brought) > len(set(brought)) == len(encoded)
    assert set(encoded) == set(brought)
    core.reset_prefix_cache()
    encoded.clear()
    _check(core, wanted[4:])
    assert set(encoded) == {item.data for r, _ in wanted[4:] for item in r.items}
    core.close()


def test_items_that_cannot_be_encoded(tmp_path: Path) -> None:
    """They are refused with what is wrong, before the encoder meets them, and others go on."""
    strange = Strange(["image"], tmp_path / "model")
    core, wanted = strange.core(), strange.many(3, 6)
    good = Item(
        content_hash="x", position=1, length=3, data=bytes(3 * 4 * expected.PATCH), dtype="float32",
        shape=(3, expected.PATCH),
    )  # fmt: skip
    many = {"data": bytes(33 * 4 * expected.PATCH), "shape": (33, expected.PATCH)}
    wrong: dict[str, dict[str, Any]] = {
        "is nothing (); give float32 (rows, 8)": {"dtype": "", "shape": ()},
        "is float64 (3, 8); give float32": {"dtype": "float64"},
        "is float32 (4, 6); give float32": {"shape": (4, 6)},
        "has 95 bytes, which are not float32 (3, 8)": {"data": bytes(95)},
        "has 3 rows and makes 4: it must make one at least": {"length": 4},
        "has 33 rows and makes 3": many,
        "stands in for 3 tokens from 9 on; the prompt has 10": {"position": 9},
    }
    for told, fields in wrong.items():
        with pytest.raises(ConfigError, match=re.escape(f"request bad: items[0] {told}")):
            core.add(request("bad", range(10), items=[msgspec.structs.replace(good, **fields)]))
    _check(core, wanted)
    core.close()
    core = Strange(["window"], tmp_path / "other").core()
    with pytest.raises(ConfigError, match="is an encoded input: the model has no encoder"):
        core.add(request("bad", range(10), items=[good]))
    core.close()


def test_programs_without_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step in which nobody has an adapter, or an image, runs a program that reads no table."""
    strange = Strange(["adapter", "image"], tmp_path / "model")
    core = strange.core()
    ran: list[str] = []
    bound = GraphPrograms.bound
    monkeypatch.setattr(
        GraphPrograms, "bound", lambda graph, name, size: (ran.append(name), bound(graph, name, size))[1]
    )
    prompt = [5, 6, 7]
    tokens = expected.greedy(strange.features, strange.weights, prompt, COUNT)
    _check(core, [(request("a", prompt, GREEDY, limit=COUNT), tokens)])
    assert set(ran) == {"plain.neutral"}
    program = json.loads((strange.artifact("eager") / "program.json").read_text())["graphs"][0]
    assert program["optional"] == ["item_rows", "adapter_ids"]
    read = {n for calls in program["programs"]["plain.neutral"]["calls"] for n in calls[1]}
    assert not [n for n in read if n.endswith(".table") or n in ("step.adapter_ids", "state.memory")]
    ran.clear()
    tokens = expected.greedy(strange.features, strange.weights, prompt, COUNT, (), strange.tables[1])
    _check(core, [(request("b", prompt, GREEDY, limit=COUNT, adapter=Adapter("a", "", "2")), tokens)])
    assert set(ran) == {"plain"}
    core.write_adapter("other", {"layers.1.table": np.ones(8, np.float32)})
    tables = {0: torch.zeros(1), 1: torch.cat([torch.ones(8), torch.zeros(24)])}
    tokens = expected.greedy(strange.features, strange.weights, prompt, COUNT, (), tables)
    _check(core, [(request("c", prompt, GREEDY, limit=COUNT, adapter=Adapter("a", "", "other")), tokens)])
    for id, values, told in (
        (
            "x",
            {"layers.7.table": np.ones(8)},
            "has a table 'layers.7.table'; the model's are layers.0.table, layers.1.",
        ),
        ("x", {"layers.0.table": np.ones(33)}, r"has shape \(33,\); there is room for \(32,\)"),
    ):
        with pytest.raises(ConfigError, match=told):
            core.write_adapter(id, values)
    core.close()


@pytest.mark.parametrize(
    "backend", ["eager", pytest.param("inductor", marks=pytest.mark.gpu if ON_GPU else pytest.mark.thorough)]
)
def test_pooled(tmp_path: Path, backend: str) -> None:
    """Vectors of prompts, without causality, cache or token; one that no step can hold is refused."""
    w, rng = expected.weights(()), random.Random(3)
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"architectures": ["StrangePooler"], "max_position_embeddings": 96}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({n: w[n] for n in ("embed", "layers.0.mix", "layers.1.mix")}, folder / "model.safetensors")
    source = open_source(folder)
    place = artifact_of(
        source, target=DEVICE, backend=backend, dtype="float32", max_model_len=96, max_num_seqs=SEQS,
        max_num_batched_tokens=32, tune=False,
    )  # fmt: skip
    core = open_core(folder, place)
    warm_up_host(core.executor, 96, 32)
    prompts = [[rng.randrange(1, 90) for _ in range(rng.randint(1, 32))] for _ in range(9)]
    found = {}
    for i, prompt in enumerate(prompts):
        core.add(request(str(i), prompt, GREEDY, limit=0))
    while core.unfinished:
        for news in core.step():
            assert (news.tokens, news.finish_reason) == ([], "stop")
            found[news.id] = torch.from_numpy(np.frombuffer(news.pooled, np.float32).copy())
    for i, prompt in enumerate(prompts):
        torch.testing.assert_close(found[str(i)], expected.pooled(w, prompt), rtol=1e-4, atol=1e-4)
    for length, limit, told in (
        (33, 0, "33 prompt tokens; this model computes a prompt in one step"),
        (3, 1, "limit is 1"),
    ):
        with pytest.raises(ConfigError, match=told):
            core.add(request("long", [1] * length, GREEDY, limit=limit))
    core.close()


def _draft_model(folder: Path) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(9)
    w = expected.weights((), seed=5)
    w = {"embed": w["embed"], "out": w["out"], "layers.0.mix": w["layers.1.mix"]}
    w["join"] = torch.cat([0.3 * torch.eye(expected.D), torch.eye(expected.D)], 1)
    w["join"] += 0.05 * torch.randn(w["join"].shape, generator=g)
    folder.mkdir()
    config = {"architectures": ["StrangeDraft"], "max_position_embeddings": 96}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(w, folder / "model.safetensors")
    return w


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=COMPILED)])
def test_draft_head(backend: str, tmp_path: Path) -> None:
    """A second graph from a second checkpoint, fed on the device by hidden states of a middle layer and run once for
    each draft: its guesses, in every step, and the text, which they do not change."""
    w = _draft_model(tmp_path / "draft")
    strange = Strange(["recurrent", "window"], tmp_path / "model", draft=tmp_path / "draft")
    core = strange.core(backend)
    verify_all_drafts(core)
    rng, states = random.Random(1), core.executor.states.tensors
    alone, tokens = strange.request("a", 50, rng)  # two chunks
    core.add(alone)
    found, kept = [], []
    while core.unfinished:
        found += [t for news in core.step() for t in news.tokens]
        core.executor.synchronize()
        # The last position of which there is a hidden state; the next token is sampled.
        last = int(states["state.draft_position"][0]) - 2
        if not len(alone.prompt) <= last + 1 < len(alone.prompt) + COUNT - 1:
            continue
        known = [*alone.prompt, *tokens][: last + 2]
        middle: list[torch.Tensor] = []
        expected.logits(strange.features, strange.weights, known[:-1], 50, middle=middle)
        assert states["state.drafts"][0].tolist() == expected.drafts(w, known, middle[1], 2)
        kept.append(last)
    assert found == tokens
    assert len(kept) > 3
    assert any(b - a > 1 for a, b in itertools.pairwise(kept))  # some were right
    _check(core, strange.many(7, 1))
    core.close()
    core = strange.core(backend, pages=_few(core))
    _check(core, strange.many(6, 2, GROWING))
    assert core.stats().preemptions
    core.close()


def test_draft_models_that_do_not_fit(checkpoint: Path, tmp_path: Path) -> None:
    """They are refused before anything is compiled, with the field."""
    strange, recurrent = Strange(["window"], tmp_path / "model"), Strange(["recurrent"], tmp_path / "recurrent")
    _draft_model(tmp_path / "draft")
    wrong: list[tuple[Path, Path, dict[str, Any], str]] = [
        (
            strange.folder,
            tmp_path / "draft",
            {"num_speculative_tokens": 0},
            "num_speculative_tokens is 0: say how many",
        ),
        (strange.folder, recurrent.folder, {}, "architecture, StrangeForCausalLM, is none that drafts"),
        (checkpoint, tmp_path / "draft", {}, "the draft model has a vocabulary of 97 tokens, the model one of 311"),
        (
            strange.folder,
            tmp_path / "draft",
            {"tensor_parallel_size": 2},
            "StrangeForCausalLM cannot be divided; use 1",
        ),
    ]
    for folder, draft, fields, told in wrong:
        source = open_source(folder, draft=draft)
        fields = {"num_speculative_tokens": 2, **fields}
        with pytest.raises(ConfigError, match=told):
            artifact_of(source, target=DEVICE, backend="eager", dtype="float32", **fields)


def test_trees_that_a_model_cannot_verify(tmp_path: Path) -> None:
    """A tree needs keys and values that can be moved, and a branch something that drafts it."""
    for feature, told in (
        ("recurrent", "speculative_token_tree: the model has recurrent states, which are rolled back"),
        ("latent", "speculative_token_tree: the model keeps '(latent|scale)', and not only keys and values or latents"),
        ("window", "speculative_token_tree: drafts of a tree come from a draft model; give one"),
    ):
        folder = Strange([feature], tmp_path / feature).folder
        source = open_source(folder)
        tree = {"speculative_token_tree": "[(0,), (0, 0)]"}
        with pytest.raises(ConfigError, match=told):
            artifact_of(source, target=DEVICE, backend="eager", dtype="float32", **tree)
