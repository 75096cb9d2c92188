"""Prompts that begin alike are computed once as far as they do, and give what they give without that."""

from graphllm import LLM, SamplingParams

PREFIX = "You are a helpful teacher. You answer in one short sentence, and you never guess. " * 4
QUESTIONS = ["What is 12 + 7?", "What is the capital of France?", "Hello"]


def main(**options):
    sampling = SamplingParams(temperature=0.0, max_tokens=8)
    prompts = [PREFIX + question for question in QUESTIONS]
    plain = LLM(enable_prefix_caching=False, **options)
    expected = [output.outputs[0].token_ids for output in plain.generate(prompts, sampling)]
    del plain

    llm = LLM(enable_prefix_caching=True, **options)
    llm.generate(PREFIX, sampling)
    outputs = llm.generate(prompts, sampling)
    print("same outputs:", [output.outputs[0].token_ids for output in outputs] == expected)
    print("cached tokens:", [output.num_cached_tokens for output in outputs])
    llm.reset_prefix_cache()
    print("after the reset:", llm.generate(prompts[0], sampling)[0].num_cached_tokens)


if __name__ == "__main__":
    main()
