"""An engine that is driven step by step: requests come while others run, and one is taken back."""

from graphllm import EngineArgs, LLMEngine, SamplingParams


def main(**options):
    engine = LLMEngine.from_engine_args(EngineArgs(**options))
    waiting = [
        ("Hello", SamplingParams(temperature=0.0, max_tokens=8)),
        ("The capital of", SamplingParams(n=2, temperature=0.8, seed=7, max_tokens=8)),
        ("Never mind", SamplingParams(max_tokens=500)),
    ]
    number = 0
    while waiting or engine.has_unfinished_requests():
        if waiting:
            prompt, sampling = waiting.pop(0)
            engine.add_request(str(number), prompt, sampling)
            number += 1
            if prompt == "Never mind":
                engine.abort_request([str(number - 1)])
        for output in engine.step():
            if output.finished:
                print(output.request_id, [completion.text for completion in output.outputs])


if __name__ == "__main__":
    main()
