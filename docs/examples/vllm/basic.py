"""Prompts in, texts out."""

from graphllm import LLM, SamplingParams

PROMPTS = ["Hello", "The capital of France is", "What is 12 + 7?"]


def main(**options):
    llm = LLM(**options)
    sampling = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=16, seed=1)
    for output in llm.generate(PROMPTS, sampling):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
