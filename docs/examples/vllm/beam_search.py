"""The likeliest sequences that beam search finds."""

from graphllm import LLM, BeamSearchParams


def main(**options):
    llm = LLM(**options)
    prompts = [{"prompt": "What is the capital of"}, {"prompt": "Hello"}]
    for output in llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=6)):
        for sequence in output.sequences:
            print(f"{sequence.cum_logprob:8.3f} {sequence.text!r}")


if __name__ == "__main__":
    main()
