"""transformers, eager, with its own cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.cpu.peer import Peer, Runner, Steps, Times, Workload


class _Transformers(Peer):
    name = "transformers eager bf16"
    bits = 16
    packages = ("transformers", "torch")
    modules = ("transformers",)

    def prepare(self, model: Workload) -> None:
        """It reads the checkpoint as it is."""

    def files(self, model: Workload) -> Sequence[Path]:
        return [model.checkpoint]

    def load(self, model: Workload) -> Runner:
        return _Loaded(model)


class _Loaded(Runner):
    def __init__(self, model: Workload) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(model.threads)
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(model.checkpoint, dtype=torch.bfloat16).eval()

    def run(self, prompts: Sequence[list[int]], count: int) -> Times:
        steps, tokens, cache = Steps(len(prompts)), self._torch.tensor(prompts), None
        with self._torch.inference_mode():
            for _ in range(count):
                out = self._model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache, tokens = out.past_key_values, out.logits[:, -1:].argmax(-1)
                steps.tick()
        return steps.times


PEERS = (_Transformers(),)
