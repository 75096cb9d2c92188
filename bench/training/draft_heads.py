"""The draft models that `train_drafts` trains, in plain torch: over whole rows of tokens at once, several drafts deep.

Each knows its tensors' names and its config.json in the formats that `model_defs` reads, and gives the logits of draft
j at every position t, which follow tokens up to t + 1 + j.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from transformers import LlamaConfig, LlamaForCausalLM

Seen = tuple[Tensor, tuple[Tensor, ...]]
"""Token ids [B, T], and the model's hidden states [B, T, D]: of its embedding, behind each layer, the last normed."""


class Head(Protocol):
    """offset: the logits of draft j at t are about the token at t + offset + j."""

    offset: int

    def drafts(self, seen: Seen, count: int) -> list[Tensor]:
        """Logits [B, T, draft vocabulary] of each draft."""

    def config(self, count: int) -> dict[str, Any]:
        """Of config.json. count: how many tokens it was trained to draft."""

    def tensors(self) -> dict[str, Tensor]:
        """By their names in checkpoints, but for which tokens it drafts."""


def _norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * w


class Eagle3(nn.Module):
    """Begins as the model's last layer. kept: the tokens that it drafts."""

    offset = 2

    def __init__(self, model: Any, kept: Tensor) -> None:
        super().__init__()
        c = model.config
        self.sizes = {
            "hidden_size": c.hidden_size, "vocab_size": c.vocab_size, "num_attention_heads": c.num_attention_heads,
            "num_key_value_heads": c.num_key_value_heads, "intermediate_size": c.intermediate_size,
            "max_position_embeddings": c.max_position_embeddings, "rms_norm_eps": c.rms_norm_eps,
            "head_dim": getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads,
        }  # fmt: skip
        D, L, E = c.hidden_size, c.num_hidden_layers, self.sizes["head_dim"]
        self.read = [min(max(i, 1), L) for i in (2, L // 2, L - 3)]
        self.embedding = model.get_input_embeddings().weight.detach().float()
        self.angles: Tensor = 10000.0 ** (-torch.arange(0, E, 2, device=self.embedding.device).float() / E)
        last = {n: w.detach().float() for n, w in model.model.layers[-1].named_parameters()}
        made = {n: w for n, w in last.items() if "_proj" in n and not n.endswith("bias")}
        for n in "qkv":
            name = f"self_attn.{n}_proj.weight"
            made[name] = torch.cat([last[name], last[name]], 1) / 2
        made |= {f"{n}.weight": torch.ones(D) for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
        made = {f"midlayer.{n}": w for n, w in made.items()}
        made["fc.weight"] = torch.cat([torch.zeros(D, 2 * D), torch.eye(D)], 1)
        made["norm.weight"] = torch.ones(D)
        made["lm_head.weight"] = model.get_output_embeddings().weight.detach().float()[kept]
        self.w = nn.ParameterDict(
            {n.replace(".", "/"): nn.Parameter(w.to(self.embedding.device).clone()) for n, w in made.items()}
        )

    def _of(self, name: str) -> Tensor:
        found: Tensor = self.w[name.replace(".", "/")]
        return found

    def drafts(self, seen: Seen, count: int) -> list[Tensor]:
        """As it runs when it serves: further drafts read its own hidden states (the method's training-time test)."""
        ids, states = seen
        eps = self.sizes["rms_norm_eps"]
        rows = linear(torch.cat([states[i] for i in self.read], -1).float(), self._of("fc.weight"))
        found, keys, values = [], [], []
        T, heads = ids.shape[1], (self.sizes["num_attention_heads"], self.sizes["num_key_value_heads"])
        at = torch.arange(T, device=ids.device)
        for j in range(count):
            # Row t of draft j stands at position t + j, behind the rows of position t of all drafts before.
            tokens = self.embedding[torch.roll(ids, -1 - j, 1)]
            hidden = _norm(rows, self._of("midlayer.hidden_norm.weight"), eps)
            joint = torch.cat([_norm(tokens, self._of("midlayer.input_layernorm.weight"), eps), hidden], -1)
            q, k, v = (
                linear(joint, self._of(f"midlayer.self_attn.{n}_proj.weight")).unflatten(-1, (h, -1)).transpose(1, 2)
                for n, h in (("q", heads[0]), ("k", heads[1]), ("v", heads[1]))
            )
            groups = heads[0] // heads[1]
            keys.append(k.repeat_interleave(groups, 1))
            values.append(v.repeat_interleave(groups, 1))
            turned = self._turned(q, j)
            scores = [turned @ self._turned(keys[0], 0).transpose(-1, -2)]
            scores[0] = scores[0].masked_fill(at[None, :] > at[:, None], -math.inf)
            scores += [(turned * self._turned(keys[i], i)).sum(-1, keepdim=True) for i in range(1, j + 1)]
            weights = torch.softmax(torch.cat(scores, -1) / math.sqrt(q.shape[-1]), -1)
            out = weights[..., :T] @ values[0]
            for i in range(1, j + 1):
                out = out + weights[..., T + i - 1 : T + i] * values[i]
            x = rows + linear(out.transpose(1, 2).flatten(2), self._of("midlayer.self_attn.o_proj.weight"))
            h = _norm(x, self._of("midlayer.post_attention_layernorm.weight"), eps)
            gate, up = (linear(h, self._of(f"midlayer.mlp.{n}_proj.weight")) for n in ("gate", "up"))
            rows = x + linear(silu(gate) * up, self._of("midlayer.mlp.down_proj.weight"))
            found.append(linear(_norm(rows, self._of("norm.weight"), eps), self._of("lm_head.weight")))
        return found

    def _turned(self, x_BHTE: Tensor, ahead: int) -> Tensor:
        """Rotated for positions that lie so far ahead of the rows'."""
        at = (torch.arange(x_BHTE.shape[-2], device=x_BHTE.device) + ahead)[:, None] * self.angles
        cos, sin = at.cos().repeat(1, 2), at.sin().repeat(1, 2)
        low, high = x_BHTE.chunk(2, -1)
        return x_BHTE * cos + torch.cat([-high, low], -1) * sin

    def config(self, count: int) -> dict[str, Any]:
        own = self._of("lm_head.weight").shape[0]
        more = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
        layers = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": self.read}}
        return {**self.sizes, **more, **layers, "draft_vocab_size": own, "num_speculative_tokens": count}

    def tensors(self) -> dict[str, Tensor]:
        return {n.replace("/", "."): w.detach() for n, w in self.w.items()}


class Medusa(nn.Module):
    """Heads that begin as the model's own. kept: the tokens that they draft."""

    offset = 2

    def __init__(self, model: Any, kept: Tensor, count: int) -> None:
        super().__init__()
        head = model.get_output_embeddings().weight.detach().float()
        self.sizes = {"hidden_size": head.shape[1], "vocab_size": head.shape[0]}
        D = head.shape[1]
        self.blocks = nn.ParameterList(nn.Parameter(torch.zeros(D, D, device=head.device)) for _ in range(count))
        self.heads = nn.ParameterList(nn.Parameter(head[kept].clone()) for _ in range(count))

    def drafts(self, seen: Seen, count: int) -> list[Tensor]:
        x = seen[1][-1].float()
        return [linear(x + silu(linear(x, b)), h) for b, h in zip(self.blocks, self.heads, strict=True)][:count]

    def config(self, count: int) -> dict[str, Any]:
        kept = self.heads[0].shape[0]
        told = {"architectures": ["MedusaModel"], "model_type": "medusa", "num_heads": count, "num_hidden_layers": 1}
        return {**self.sizes, **told, "truncated_vocab_size": kept}

    def tensors(self) -> dict[str, Tensor]:
        found = {f"blocks.{i}.layers.0.weight": w.detach() for i, w in enumerate(self.blocks)}
        return found | {f"lm_heads.{i}.weight": w.detach() for i, w in enumerate(self.heads)}


class DraftModel(nn.Module):
    """A Llama of a quarter of the layers and half of the width."""

    offset = 1

    def __init__(self, model: Any) -> None:
        super().__init__()
        c, width = model.config, model.config.hidden_size // 2
        config = LlamaConfig(
            vocab_size=c.vocab_size, hidden_size=width, intermediate_size=width * 11 // 4,
            num_hidden_layers=max(c.num_hidden_layers // 4, 1), num_attention_heads=max(width // 64, 1),
            num_key_value_heads=1, head_dim=64, max_position_embeddings=c.max_position_embeddings, rms_norm_eps=1e-6,
            tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config).to(model.device)
        # The widest directions of the model's embedding are a better beginning than random ones.
        U, S, _ = torch.linalg.svd(model.get_input_embeddings().weight.detach().float(), full_matrices=False)
        self.model.model.embed_tokens.weight.data.copy_(U[:, :width] * S[:width])

    def drafts(self, seen: Seen, count: int) -> list[Tensor]:
        """All alike: it reads the tokens alone, so draft j at t is draft 0 at t + j."""
        logits = self.model(seen[0]).logits
        return [torch.roll(logits, -j, 1) for j in range(count)]

    def config(self, count: int) -> dict[str, Any]:
        return {**self.model.config.to_dict(), "architectures": ["LlamaForCausalLM"], "num_speculative_tokens": count}

    def tensors(self) -> dict[str, Tensor]:
        return {n: w.detach() for n, w in self.model.state_dict().items() if n != "lm_head.weight"}
