"""Several completions of a prompt, seeds that repeat, log-probabilities, stops, and ends of outputs that repeat."""

from graphllm import LLM, RepetitionDetectionParams, SamplingParams, TextPrompt, TokensPrompt


def main(**options):
    llm = LLM(**options)
    several = SamplingParams(n=3, temperature=1.0, top_k=50, min_p=0.01, seed=11, max_tokens=8)
    first, again = llm.generate([TextPrompt(prompt="Hello"), TextPrompt(prompt="Hello")], several)
    texts = [completion.text for completion in first.outputs]
    print("three:", texts)
    print("the same seed, the same texts:", texts == [completion.text for completion in again.outputs])

    ids = llm.get_tokenizer().encode("Hello")
    scored = SamplingParams(temperature=0.0, max_tokens=2, logprobs=2, prompt_logprobs=0, stop=["\n"])
    (output,) = llm.generate(TokensPrompt(prompt_token_ids=ids), scored)
    for position in output.outputs[0].logprobs:
        print({logprob.decoded_token: round(logprob.logprob, 2) for logprob in position.values()})

    stuck = SamplingParams(
        temperature=0.0, max_tokens=40, allowed_token_ids=[67, 68],
        repetition_detection=RepetitionDetectionParams(max_pattern_size=4, min_pattern_size=1, min_count=3),
    )  # fmt: skip
    completion = llm.generate("Hello", stuck)[0].outputs[0]
    print(completion.finish_reason, len(completion.token_ids))


if __name__ == "__main__":
    main()
