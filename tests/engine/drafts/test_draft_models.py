"""What each kind of draft model guesses, in every step of an engine, against plain torch after the method's paper or
published code; and the text, which drafts must not change."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import gelu, linear, scaled_dot_product_attention, silu
from transformers import LlamaConfig, LlamaForCausalLM

from bench.training.draft_heads import Eagle3
from graphllm.compile.families import find_model
from graphllm.config import ConfigError
from graphllm.config.token_tree import DynamicTree, TokenTree, token_tree
from graphllm.engine.core import EngineCore
from graphllm.engine.parts.drafts import Drafts
from graphllm.loading.checkpoint.source import open_source
from graphllm.runtime.memory.staging import StepInput
from tests.artifacts import artifact_of
from tests.engine.harness import GREEDY, finish, open_core, request
from tests.tiers import thorough

D, V, H, K, E, F, L, LEN, DRAFTS, COUNT = 32, 97, 4, 2, 8, 48, 6, 96, 3, 14
EPS = 1e-5
Weights = Mapping[str, Tensor]


class Known(NamedTuple):
    """What a reference starts from: tokens, of all but the last of which there are hidden states of the model: behind
    its last norm, and by layer, that of the embedding first."""

    tokens: list[int]
    last: Tensor
    layers: list[Tensor]


def _normal(seed: int, by: float = 1.0) -> Callable[..., Tensor]:
    g = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=g) * by * shape[-1] ** -0.5


def _norm(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * w


def _rotated(x_HTE: Tensor) -> Tensor:
    T, width = x_HTE.shape[-2:]
    angle = torch.arange(T)[:, None] * 10000.0 ** (-torch.arange(0, width, 2) / width)
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
    low, high = x_HTE.chunk(2, -1)
    return x_HTE * cos + torch.cat([-high, low], -1) * sin


def _attention(w: Weights, at: str, x_TD: Tensor) -> Tensor:
    q, k, v = (
        linear(x_TD, w[f"{at}{n}_proj.weight"], w.get(f"{at}{n}_proj.bias")).unflatten(-1, (-1, E)).transpose(0, 1)
        for n in "qkv"
    )
    k, v = _rotated(k).repeat_interleave(H // K, 0), v.repeat_interleave(H // K, 0)
    out = scaled_dot_product_attention(_rotated(q), k, v, is_causal=True)
    return linear(out.transpose(0, 1).flatten(1), w[f"{at}o_proj.weight"])


def _mlp(w: Weights, at: str, x: Tensor) -> Tensor:
    gated = silu(linear(x, w[f"{at}gate_proj.weight"])) * linear(x, w[f"{at}up_proj.weight"])
    return linear(gated, w[f"{at}down_proj.weight"])


def _layer_weights(at: str, normal: Callable[..., Tensor], width: int = D) -> dict[str, Tensor]:
    w = {f"{at}self_attn.{n}_proj.weight": normal(h * E, width) for n, h in (("q", H), ("k", K), ("v", K))}
    w |= {f"{at}self_attn.o_proj.weight": normal(D, H * E), f"{at}mlp.down_proj.weight": normal(D, F)}
    w |= {f"{at}mlp.{n}_proj.weight": normal(F, D) for n in ("gate", "up")}
    return w | {f"{at}{n}_layernorm.weight": 1 + normal(D) for n in ("input", "post_attention")}


Ranked = list[tuple[int, float]]  # the likeliest tokens in their order, with their log-probabilities
Run = Callable[[list[int], Tensor], tuple[Tensor, Ranked]]  # hidden states, and what comes next


def _again(known: Known, count: int, hidden: Tensor, run: Run) -> list[int]:
    """Drafts of a head that reads, at each position, a hidden state and the token behind it, and then its own."""
    path: list[int] = []
    for _ in range(count):
        path.append(_behind(known, path, hidden, run)[0][0])
    return path


def _behind(known: Known, path: Sequence[int], hidden: Tensor, run: Run) -> Ranked:
    """The likeliest tokens behind drafts."""
    ids, rows = known.tokens[1:], hidden
    for token in path:
        own, _ = run(ids, rows)
        ids, rows = [*ids, token], torch.cat([rows, own[-1:]])
    return run(ids, rows)[1]


def ranked(logits: Tensor) -> Ranked:
    found = logits.log_softmax(-1).topk(4)
    return list(zip(found.indices.tolist(), found.values.tolist(), strict=True))


class Method(NamedTuple):
    """config: fields of the draft model's config.json, w: its tensors, drafts: what it guesses. first: the logits [V]
    of its first draft, for tests that draw. behind: the likeliest tokens behind drafts, where it may branch."""

    name: str
    config: dict[str, Any]
    w: dict[str, Tensor]
    drafts: Callable[[LlamaForCausalLM, Known, int], list[int]]
    first: Callable[[LlamaForCausalLM, Known], Tensor] | None = None
    behind: Callable[[LlamaForCausalLM, Known, Sequence[int]], Ranked] | None = None


_SIZES = {"hidden_size": D, "vocab_size": V, "num_attention_heads": H, "num_key_value_heads": K, "intermediate_size": F,
          "max_position_embeddings": LEN, "rms_norm_eps": EPS, "num_hidden_layers": 1,
          "model_type": "llama"}  # fmt: skip


def eagle(model: LlamaForCausalLM) -> Method:
    """Its fc passes the token on, so that the head is often right about a model that mostly does so as well."""
    w = _layer_weights("layers.0.", _normal(1, 0.8))
    del w["layers.0.input_layernorm.weight"]
    w["fc.weight"] = torch.cat([torch.eye(D), 0.05 * _normal(2)(D, D)], 1)
    w["fc.bias"] = 0.01 * _normal(3)(D)

    def rows_of(model: LlamaForCausalLM, ids: list[int], rows: Tensor) -> Tensor:
        x = linear(torch.cat([model.model.embed_tokens.weight[ids], rows], -1), w["fc.weight"], w["fc.bias"])
        x = x + _attention(w, "layers.0.self_attn.", x)
        return x + _mlp(w, "layers.0.mlp.", _norm(x, w["layers.0.post_attention_layernorm.weight"]))

    def run(ids: list[int], rows: Tensor) -> tuple[Tensor, Ranked]:
        x = rows_of(model, ids, rows)
        return x, ranked(model.lm_head.weight @ x[-1])

    def drafts(model: LlamaForCausalLM, known: Known, count: int) -> list[int]:
        return _again(known, count, known.last, run)

    def behind(model: LlamaForCausalLM, known: Known, path: Sequence[int]) -> Ranked:
        return _behind(known, path, known.last, run)

    def first(model: LlamaForCausalLM, known: Known) -> Tensor:
        return model.lm_head.weight @ rows_of(model, known.tokens[1:], known.last)[-1]

    return Method("eagle", {**_SIZES, "architectures": ["LlamaForCausalLM"]}, w, drafts, first, behind)


def eagle3(model: LlamaForCausalLM, before: bool = False, small: bool = True, norms: Sequence[str] = ()) -> Method:
    """norms: further ones that its config.json asks for."""
    w = _layer_weights("midlayer.", _normal(4)) | {"midlayer.hidden_norm.weight": 1 + _normal(5)(D)}
    w |= {f"midlayer.self_attn.{n}_proj.weight": _normal(6, 2)(h * E, 2 * D) for n, h in (("q", H), ("k", K), ("v", K))}
    w["midlayer.self_attn.o_proj.weight"] *= 6  # so that what is seen of other tokens decides
    own = 40 if small else V
    w |= {"fc.weight": _normal(7)(D, 3 * D), "norm.weight": 1 + _normal(8)(D), "lm_head.weight": _normal(9)(own, D)}
    kept = torch.randperm(V, generator=torch.Generator().manual_seed(1))[:own].sort().values
    if small:
        w |= {"d2t": kept - torch.arange(own), "t2d": torch.isin(torch.arange(V), kept)}
    else:
        w["embed_tokens.weight"] = _normal(10)(V, D)

    if "fc_norm" in norms:
        w |= {f"fc_norm.{i}.weight": 1 + _normal(20 + i)(D) for i in range(3)}
    if "norm_before_fc" in norms:
        w["input_norm.weight"] = 1 + _normal(24)(3 * D)
    embedding = model.model.embed_tokens.weight if small else w["embed_tokens.weight"]

    def run(ids: list[int], rows: Tensor) -> tuple[Tensor, Ranked]:
        hidden = _norm(rows, w["midlayer.hidden_norm.weight"])
        joint = torch.cat([_norm(embedding[ids], w["midlayer.input_layernorm.weight"]), hidden], -1)
        x = (hidden if before else rows) + _attention(w, "midlayer.self_attn.", joint)
        x = x + _mlp(w, "midlayer.mlp.", _norm(x, w["midlayer.post_attention_layernorm.weight"]))
        normed = _norm(x, w["norm.weight"])
        best = ranked(w["lm_head.weight"] @ normed[-1])
        x = normed if "norm_output" in norms else x
        return x, [(int(kept[token]), told) for token, told in best] if small else best

    def read(known: Known) -> Tensor:
        # Inputs of the layers 2, L // 2 and L - 3, counted from 0: what lies behind so many layers.
        read = [known.layers[i] for i in (2, L // 2, L - 3)]
        if "fc_norm" in norms:
            read = [_norm(x, w[f"fc_norm.{i}.weight"]) for i, x in enumerate(read)]
        joint = torch.cat(read, -1)
        return linear(_norm(joint, w["input_norm.weight"]) if "norm_before_fc" in norms else joint, w["fc.weight"])

    def drafts(model: LlamaForCausalLM, known: Known, count: int) -> list[int]:
        return _again(known, count, read(known), run)

    def behind(model: LlamaForCausalLM, known: Known, path: Sequence[int]) -> Ranked:
        return _behind(known, path, read(known), run)

    config = {**_SIZES, "architectures": ["LlamaForCausalLMEagle3"], "norm_before_residual": before, "pad_token_id": 0}
    config |= dict.fromkeys(norms, True)
    return Method("eagle3", {**config, **({"draft_vocab_size": own} if small else {})}, w, drafts, None, behind)


def medusa(model: LlamaForCausalLM) -> Method:
    normal = _normal(11)
    w = {f"blocks.{i}.layers.{j}.weight": normal(D, D) for i in range(4) for j in range(2)}
    w |= {f"lm_heads.{i}.weight": model.lm_head.weight.detach() + 0.1 * normal(V, D) for i in range(4)}

    def logits(known: Known, i: int) -> Tensor:
        x = known.last[-1]
        for j in range(2):
            x = x + silu(w[f"blocks.{i}.layers.{j}.weight"] @ x)
        return w[f"lm_heads.{i}.weight"] @ x

    def drafts(model: LlamaForCausalLM, known: Known, count: int) -> list[int]:
        return [int(logits(known, i).argmax()) for i in range(count)]

    config = {"architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": D, "vocab_size": V}
    config |= {"num_heads": 4, "num_hidden_layers": 2}

    def behind(model: LlamaForCausalLM, known: Known, path: Sequence[int]) -> Ranked:
        return ranked(logits(known, len(path)))

    return Method("medusa", config, w, drafts, lambda model, known: logits(known, 0), behind)


def mlp_speculator(model: LlamaForCausalLM, tied: bool = False) -> Method:
    normal, inner, made = _normal(12), 24, 4
    parts = {"emb": 1, "proj": 2, "ln": 1, "head": 1} if tied else dict.fromkeys(("emb", "proj", "ln", "head"), made)
    shapes = {"emb": (V, inner), "proj": (inner, inner), "head": (V, inner), "ln": (inner,)}
    w = {f"speculator.{n}.{i}.weight": 3 * normal(*shapes[n]) for n, count in parts.items() for i in range(count)}
    w["speculator.proj.0.weight"] = 3 * normal(inner, D)
    w |= {f"speculator.ln.{i}.bias": normal(inner) for i in range(parts["ln"])}

    def drafts(model: LlamaForCausalLM, known: Known, count: int) -> list[int]:
        def normed(x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.pow(2).mean() + 1e-6)

        kept = 0.5 ** (0.5 / made)
        weight = math.sqrt((1 - kept**2) * (inner / 2)) / kept
        state = normed(known.last[-1]) / 2**0.5 if tied else known.last[-1]
        token, found = known.tokens[-1], []
        for i in range(count):
            emb, proj, ln, head = (min(i, parts[n] - 1) for n in ("emb", "proj", "ln", "head"))
            state = w[f"speculator.proj.{proj}.weight"] @ state + weight * w[f"speculator.emb.{emb}.weight"][token]
            state = gelu(normed(state) * w[f"speculator.ln.{ln}.weight"] + w[f"speculator.ln.{ln}.bias"])
            token = int((w[f"speculator.head.{head}.weight"] @ state).argmax())
            found.append(token)
        return found

    config = {"architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator", "emb_dim": D}
    more = {"inner_dim": inner, "n_predict": made, "vocab_size": V, "tie_weights": tied, "scale_input": tied}
    return Method("mlp_speculator", {**config, **more}, w, drafts)


def draft_model(model: LlamaForCausalLM) -> Method:
    """The model itself with other last layers, so that it is often right."""
    small = LlamaForCausalLM(LlamaConfig(**{**model.config.to_dict(), "num_hidden_layers": 2})).eval()
    small.load_state_dict({n: w for n, w in model.state_dict().items() if n in small.state_dict()})

    def drafts(model: LlamaForCausalLM, known: Known, count: int) -> list[int]:
        ids = list(known.tokens)
        for _ in range(count):
            ids.append(int(small(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[-count:]

    config = {**small.config.to_dict(), "architectures": ["LlamaForCausalLM"]}

    def first(model: LlamaForCausalLM, known: Known) -> Tensor:
        return small(torch.tensor([known.tokens])).logits[0, -1]

    return Method("draft_model", config, dict(small.state_dict()), drafts, first)


def mtp(model: LlamaForCausalLM) -> Method:
    """In the model's own checkpoint."""
    at = "model.mtp_layers.0."
    w = _layer_weights(at, _normal(13, 2.0))
    w |= {f"{at}{n}_layernorm.weight": 1 + _normal(14)(D) for n in ("token", "hidden", "final")}
    w[f"{at}input_proj.weight"] = torch.cat([0.1 * _normal(15)(D, D), torch.eye(D)], 1)
    w |= {f"{at}self_attn.{n}_proj.bias": _normal(16)(h * E) for n, h in (("q", H), ("k", K), ("v", K))}

    def run(ids: list[int], rows: Tensor) -> tuple[Tensor, Ranked]:
        tokens = _norm(model.model.embed_tokens.weight[ids], w[f"{at}token_layernorm.weight"])
        joint = torch.cat([_norm(rows, w[f"{at}hidden_layernorm.weight"]), tokens], -1)
        x = linear(joint, w[f"{at}input_proj.weight"])
        x = x + _attention(w, f"{at}self_attn.", _norm(x, w[f"{at}input_layernorm.weight"]))
        x = x + _mlp(w, f"{at}mlp.", _norm(x, w[f"{at}post_attention_layernorm.weight"]))
        x = _norm(x, w[f"{at}final_layernorm.weight"])
        return x, ranked(model.lm_head.weight @ x[-1])

    def drafts(model: LlamaForCausalLM, known: Known, count: int) -> list[int]:
        return _again(known, count, known.last, run)

    def behind(model: LlamaForCausalLM, known: Known, path: Sequence[int]) -> Ranked:
        return _behind(known, path, known.last, run)

    return Method("mtp", {}, w, drafts, None, behind)


def trained_eagle3(model: LlamaForCausalLM) -> Method:
    """As `train_drafts` begins and saves one: what it learns by is what serves."""
    kept = torch.arange(0, V, 2)
    head = Eagle3(model, kept)
    w = head.tensors()
    w["midlayer.self_attn.o_proj.weight"] *= 4
    w["fc.weight"] += _normal(17)(D, 3 * D)

    def drafts(model: LlamaForCausalLM, known: Known, count: int) -> list[int]:
        ids = torch.tensor([known.tokens])
        states = tuple(torch.cat([s, s[-1:]])[None] for s in (*known.layers[:-1], known.last))
        found: list[int] = []
        for j in range(count):  # those at the last place that has a hidden state, given the drafts before
            more = torch.tensor([[*found, *[0] * (count - j)]])
            rows = tuple(torch.cat([s[:, :-1], s[:, -1:].expand(-1, count + 1, -1)], 1) for s in states)
            logits = head.drafts((torch.cat([ids, more], 1), rows), j + 1)[j]
            found.append(int(kept[logits[0, len(known.tokens) - 2].argmax()]))
        return found

    offsets = {"d2t": kept - torch.arange(len(kept))}
    return Method("eagle3", head.config(DRAFTS), {**w, **offsets}, drafts)


METHODS: dict[str, Callable[[LlamaForCausalLM], Method]] = {
    "draft_model": draft_model,
    "eagle": eagle,
    "eagle3": eagle3,
    "eagle3, another norm, whole vocabulary": lambda model: eagle3(model, before=True, small=False),
    "eagle3, normalized output": lambda model: eagle3(model, norms=("norm_output", "fc_norm")),
    "eagle3, normalized input": lambda model: eagle3(model, norms=("norm_before_fc",)),
    "eagle3, as it is trained": trained_eagle3,
    "medusa": medusa,
    "mlp_speculator": mlp_speculator,
    "mlp_speculator, tied": lambda model: mlp_speculator(model, tied=True),
    "mtp": mtp,
}


EVERY_CHANGE = ("draft_model", "eagle3", "mtp")  # one of each kind of state


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return made_model()


def made_model() -> LlamaForCausalLM:
    """Random, and mostly one circle of all tokens, as its layers add little."""
    torch.manual_seed(3)
    config = LlamaConfig(**{**_SIZES, "num_hidden_layers": L, "tie_word_embeddings": False, "head_dim": E})
    made = LlamaForCausalLM(config).eval().requires_grad_(False)
    made.model.embed_tokens.weight.normal_()
    circle = torch.randperm(V)
    made.lm_head.weight[circle.roll(-1)] = made.model.embed_tokens.weight[circle]
    for layer in made.model.layers:
        for name, matrix in layer.named_parameters():
            if matrix.dim() == 2:
                matrix.normal_(std=0.1 if "o_proj" in name or "down_proj" in name else 0.2)
    made.model.norm.weight.add_(0.1 * torch.randn(D))
    return made


def _save(folder: Path, config: Mapping[str, Any], w: Weights) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({n: t.contiguous() for n, t in w.items()}, folder / "model.safetensors")
    return folder


class Opened(NamedTuple):
    """An engine with a draft model, and what it is to give."""

    core: EngineCore
    method: Method
    folder: Path
    draft: Path
    place: Path


def saved(model: LlamaForCausalLM, method: Method, at: Path) -> tuple[Path, Path]:
    """Checkpoints of the model and of what drafts."""
    config = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    w = dict(model.state_dict())
    if method.name == "mtp":  # Qwen2's layers have biases
        config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
        sizes = {"q": H * E, "k": K * E, "v": K * E}
        attns = [f"model.layers.{i}.self_attn." for i in range(L)]
        w |= method.w | {f"{at}{n}_proj.bias": torch.zeros(size) for at in attns for n, size in sizes.items()}
    folder = _save(at / "model", config, w)
    return folder, folder if method.name == "mtp" else _save(at / "draft", method.config, method.w)


def _open(
    model: LlamaForCausalLM, method: Method, at: Path, backend: Any = "eager", pages: int = 150, **fields: Any
) -> Opened:
    folder, draft = saved(model, method, at)
    place = artifact_of(
        open_source(folder, draft=draft, method=method.name),
        **{"backend": backend, "dtype": "float32", "max_model_len": LEN, "max_num_seqs": 4,
           "max_num_batched_tokens": 32, "block_size": 8, "num_speculative_tokens": DRAFTS, **fields}
    )  # fmt: skip
    return Opened(open_core(folder, place, pages, draft=draft), method, folder, draft, place)


class Text(NamedTuple):
    """A prompt and what the model says to it, and its hidden states there."""

    prompt: list[int]
    answer: list[int]
    states: list[Tensor]

    def known(self, last: int) -> Known | None:
        """What is known when hidden states end at a position."""
        tokens = [*self.prompt, *self.answer][: last + 2]
        if len(tokens) < last + 2:
            return None
        return Known(tokens, self.states[-1][: last + 1], [s[: last + 1] for s in self.states])


def _texts(model: LlamaForCausalLM, seed: int, lengths: Sequence[int], count: int = COUNT) -> list[Text]:
    rng, found = random.Random(seed), []
    same = [rng.randrange(1, V) for _ in range(24)]
    for number, length in enumerate(lengths):
        alike = min(length - 1, 24) if number % 2 else 0
        prompt = same[:alike] + [rng.randrange(1, V) for _ in range(length - alike)]
        given = torch.tensor([prompt])
        whole = model.generate(given, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
        states = model.model(whole, output_hidden_states=True).hidden_states
        found.append(Text(prompt, whole[0, len(prompt) :].tolist(), [s[0] for s in states]))
    return found


def tree_drafts(method: Method, model: LlamaForCausalLM, known: Known, tree: TokenTree | None) -> list[int]:
    """The drafts of its nodes; of one run of them without a tree."""
    if tree is None:
        return method.drafts(model, known, DRAFTS)
    assert method.behind is not None
    found: dict[tuple[int, ...], int] = {}
    for path in tree.paths:
        before = [found[path[:i]] for i in range(1, len(path))]
        found[path] = method.behind(model, known, before)[path[-1]][0]
    return list(found.values())


def grown(method: Method, model: LlamaForCausalLM, known: Known, tree: DynamicTree) -> tuple[list[int], list[int]]:
    """EAGLE-2's tree as its paper has it: its drafts, and of each node, the root first, the one before it."""
    assert method.behind is not None
    found: list[tuple[tuple[int, ...], float]] = []
    best: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for _ in range(tree.levels):  # behind the best of the last depth
        new = [
            ((*path, token), score + told)
            for path, score in best
            for token, told in method.behind(model, known, path)[: tree.top_k]
        ]
        found += new
        best = sorted(new, key=lambda draft: -draft[1])[: tree.top_k]
    kept = sorted(sorted(range(len(found)), key=lambda i: -found[i][1])[: tree.drafts])
    paths = [(), *(found[i][0] for i in kept)]
    return [path[-1] for path in paths[1:]], [0, *(paths.index(path[:-1]) for path in paths[1:])]


def _run(
    opened: Opened,
    model: LlamaForCausalLM,
    texts: Sequence[Text],
    tree: TokenTree | DynamicTree | None = None,
    **params_of: Any,
) -> int:
    """Answer them at once, and compare drafts and texts; how many steps' drafts were compared."""
    core, count = opened.core, 0
    tensors, one = core.executor.states.tensors, opened.method.name in ("medusa", "mlp_speculator", "dflash")

    def compare(number: int) -> None:
        nonlocal count
        core.executor.synchronize()
        for slot, state in enumerate(core.scheduler.requests.by_slot):
            if state is None:
                continue
            made = int(core.scheduler.requests.num_made[slot])
            behind = 1 if one else max(made, 1) + (opened.method.name == "draft_model")
            behind = behind if tree is None else 1
            text, position = texts[int(state.request.id)], int(tensors["state.draft_position"][slot])
            known = text.known(position - behind) if position >= behind else None
            if known is None or position + 1 >= LEN:
                continue
            parents = None
            if isinstance(tree, DynamicTree):
                expected, parents = grown(opened.method, model, known, tree)
            else:
                expected = tree_drafts(opened.method, model, known, tree)
            assert tensors["state.drafts"][slot].tolist()[:made] == expected[:made], (state.request.id, position)
            if made and parents is not None:
                assert tensors["state.tree_parents"][slot].tolist() == parents
            count += made > 0

    params = GREEDY.__class__(**{"temperature": 0.0, "max_tokens": COUNT, "ignore_eos": True, **params_of})
    found = finish(core, [request(str(i), t.prompt, params) for i, t in enumerate(texts)], compare)
    assert [found[str(i)].tokens for i in range(len(texts))] == [t.answer for t in texts]
    return count


def check_with_few_blocks(opened: Opened, texts: Sequence[Text], pages: int = 12) -> None:
    """The text alone, where requests are preempted."""
    scarce = open_core(opened.folder, opened.place, pages, draft=opened.draft)
    params = GREEDY.__class__(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
    found = finish(scarce, [request(str(i), t.prompt, params) for i, t in enumerate(texts)])
    assert [found[str(i)].tokens for i in range(len(texts))] == [t.answer for t in texts]
    assert scarce.stats().preemptions
    scarce.close()


@pytest.mark.parametrize("name", [n if n in EVERY_CHANGE else thorough(n) for n in METHODS])
def test_drafts(model: LlamaForCausalLM, name: str, tmp_path: Path) -> None:
    """Prompts in chunks, of many at once, over the ends of blocks, in slots used again; those that begin alike are
    found in the prefix cache. Then the text alone, with too few blocks."""
    opened = _open(model, METHODS[name](model), tmp_path)
    texts = _texts(model, 1, (40, 31, 8, 39, 16, 52, 1))
    assert _run(opened, model, texts) > 20
    assert _run(opened, model, texts[3:] + texts[:2]) > 10
    stats = opened.core.stats()
    assert stats.prefix_hits > 0
    assert stats.drafts > 20
    if name in ("draft_model", "eagle"):
        assert 0.1 * stats.draft_tokens < sum(stats.accepted_tokens) < 0.95 * stats.draft_tokens
    opened.core.close()
    check_with_few_blocks(opened, texts)


TREE = "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 1)]"


@pytest.mark.parametrize(
    "name",
    [thorough("medusa"), thorough("eagle3"), *(pytest.param(n, marks=pytest.mark.slow) for n in ("eagle", "mtp"))],
)
def test_trees(model: LlamaForCausalLM, name: str, tmp_path: Path) -> None:
    _check_tree(model, name, TREE, tmp_path)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        thorough("eagle3", (3, 4, 9)),
        *(pytest.param(*given, marks=pytest.mark.slow) for given in (("eagle", (4, 3, 14)), ("mtp", (2, 2, 6)))),
    ],
)
def test_trees_that_grow(model: LlamaForCausalLM, name: str, sizes: tuple[int, int, int], tmp_path: Path) -> None:
    """Each step's own tree, after the paper."""
    _check_tree(model, name, _growing(*sizes), tmp_path)


@pytest.mark.slow
def test_compiled_trees_that_grow(model: LlamaForCausalLM, tmp_path: Path) -> None:
    _check_tree(model, "eagle3", _growing(3, 4, 9), tmp_path, "inductor")


def _growing(top_k: int, depth: int, drafts: int) -> str:
    return str({"top_k": top_k, "depth": depth, "drafts": drafts})


def _check_tree(model: LlamaForCausalLM, name: str, tree: str, tmp_path: Path, backend: str = "eager") -> None:
    """Every node's draft, whatever was kept before; and the text, which is that of plain decoding, in chunks, over the
    ends of blocks, with prefixes found in the cache and with too few blocks."""
    fields = {"speculative_token_tree": tree, "num_speculative_tokens": 0}
    opened = _open(model, METHODS[name](model), tmp_path, backend, **fields)
    texts = _texts(model, 1, (40, 31, 8, 39, 16, 52, 1))
    assert _run(opened, model, texts, token_tree(tree)) > 10
    assert _run(opened, model, texts[3:] + texts[:2], token_tree(tree)) > 5
    stats = opened.core.stats()
    assert stats.prefix_hits > 0
    assert stats.drafts > 10
    opened.core.close()
    check_with_few_blocks(opened, texts)


@pytest.mark.parametrize("name", [thorough("draft_model"), thorough("eagle3"), "medusa"])
@pytest.mark.thorough
def test_no_more_drafts_than_are_verified(model: LlamaForCausalLM, name: str, tmp_path: Path) -> None:
    """Whatever the acceptance asks for: as many runs draft behind a step, and the next step verifies no more."""
    opened, rng = _open(model, METHODS[name](model), tmp_path, dynamic_speculative_tokens=True), random.Random(2)
    core, made, verified, runs = opened.core, [0] * 5, [], []

    def best(sequences: int, lengths: Sequence[int], share: float | None = None) -> int:
        return rng.choice([1, *lengths])

    def start(step: StepInput, program: str = "plain", drafts: bool = False) -> Any:
        slots = step.arrays["slots"].tolist()
        verified.append((max(step.query_len - 1, 0), min(made[s] for s in slots)))
        handle = begin(step, program, drafts)
        runs.append((len(handle.drafts.buffers), step.num_drafts))
        for slot in slots:
            made[slot] = step.num_drafts
        return handle

    begin = core.executor.start
    core.part(Drafts).planner.acceptance.best, core.executor.start = best, start  # type: ignore[method-assign]
    assert _run(opened, model, _texts(model, 1, (40, 31, 8, 39, 16, 52, 1))) > 10
    assert all(drafts <= most for drafts, most in verified)
    assert {drafts for drafts, _ in verified} == {0, 1, 2, 3}
    assert all(buffers == (1 if name == "medusa" or drafts < 2 else 2) for buffers, drafts in runs)
    opened.core.close()


@pytest.mark.slow
def test_compiled_drafts(model: LlamaForCausalLM, tmp_path: Path) -> None:
    opened = _open(model, eagle3(model), tmp_path, "inductor")
    assert _run(opened, model, _texts(model, 1, (40, 31, 8, 39, 16, 52, 1))) > 20
    opened.core.close()


def test_draft_models_that_do_not_fit(model: LlamaForCausalLM, tmp_path: Path) -> None:
    """They are refused before anything is compiled, with what is wrong."""
    other = {"draft_model": draft_model, "medusa": medusa, "eagle": eagle}
    wrong: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
        ("draft_model", {"vocab_size": 90}, {}, "the draft model has a vocabulary of 90 tokens, the model one of 97"),
        ("medusa", {"hidden_size": 16}, {}, "reads hidden states of 16 numbers, the model's have 32"),
        ("medusa", {}, {"num_speculative_tokens": 5}, "num_speculative_tokens is 5: the draft model has 4 heads"),
        ("draft_model", {}, {"speculative_token_tree": TREE, "num_speculative_tokens": 0}, "use method eagle3"),
        (
            "medusa",
            {},
            {"speculative_token_tree": str([(0,) * n for n in range(1, 6)]), "num_speculative_tokens": 0},
            "speculative_token_tree has paths of 5: the draft model has 4 heads",
        ),
        (
            "medusa",
            {},
            {"speculative_token_tree": "{'top_k': 2, 'depth': 2, 'drafts': 4}", "num_speculative_tokens": 0},
            "a tree grows by what is likely after each draft",
        ),
        ("eagle", {"hidden_size": 64}, {}, "shares the model's embed.tokens as .97, 64., it is .97, 32."),
    ]
    for i, (name, config, fields, told) in enumerate(wrong):
        made = other[name](model)
        with pytest.raises(ConfigError, match=told):
            _open(model, made._replace(config=made.config | config), _made(tmp_path / str(i)), **fields)
    folder = _save(tmp_path / "m", {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]}, {})
    source = open_source(folder, "dummy", draft=folder, method="mtp")
    with pytest.raises(ConfigError, match=r"speculative_method is 'mtp': that is for .*MiMoForCausalLM"):
        find_model(source.config)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
