"""A class that edits the logits of the whole batch: requests with a `target_token` get no other."""

from graphllm import LLM, BatchUpdate, LogitsProcessor, MoveDirectionality, SamplingParams


class OnlyOneToken(LogitsProcessor):
    @classmethod
    def validate_params(cls, params):
        target = (params.extra_args or {}).get("target_token")
        if target is not None and not isinstance(target, int):
            raise ValueError(f"target_token is {target!r}: give a token id")

    def __init__(self, vllm_config, device, is_pin_memory):
        self.targets = {}

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update: BatchUpdate | None):
        if batch_update is None:
            return
        for index in batch_update.removed:
            self.targets.pop(index, None)
        for index, params, _, _ in batch_update.added:
            self.targets.pop(index, None)
            if (target := (params.extra_args or {}).get("target_token")) is not None:
                self.targets[index] = target
        for a, b, direction in batch_update.moved:
            first, second = self.targets.pop(a, None), self.targets.pop(b, None)
            if first is not None:
                self.targets[b] = first
            if second is not None and direction == MoveDirectionality.SWAP:
                self.targets[a] = second

    def apply(self, logits):
        for index, target in self.targets.items():
            kept = logits[index, target].clone()
            logits[index] = float("-inf")
            logits[index, target] = kept
        return logits


def main(**options):
    llm = LLM(logits_processors=[OnlyOneToken], **options)
    each = [
        SamplingParams(temperature=0.0, max_tokens=2),
        SamplingParams(temperature=0.0, max_tokens=6, extra_args={"target_token": 67}),
        SamplingParams(temperature=0.0, max_tokens=4),
        SamplingParams(temperature=0.0, max_tokens=8, extra_args={"target_token": 128}),
    ]
    for output in llm.generate(["Hello"] * 4, each):
        print(list(output.outputs[0].token_ids))


if __name__ == "__main__":
    main()
