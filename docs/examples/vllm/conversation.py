"""Conversations by the model's chat template: one, several at once, and one that goes on with what is written."""

from graphllm import LLM, SamplingParams


def main(**options):
    llm = LLM(**options)
    sampling = SamplingParams(temperature=0.0, max_tokens=32)
    one = [{"role": "user", "content": "What is the capital of France?"}]
    print(llm.chat(one, sampling)[0].outputs[0].text)

    questions = ["What is 12 + 7?", "What is 20 + 22?"]
    chats = [[{"role": "user", "content": question}] for question in questions]
    for output in llm.chat(chats, sampling, use_tqdm=False):
        print(output.outputs[0].text)

    begun = [*chats[0], {"role": "assistant", "content": "12 + 7 ="}]
    (output,) = llm.chat(begun, sampling, add_generation_prompt=False, continue_final_message=True)
    print("12 + 7 =" + output.outputs[0].text)


if __name__ == "__main__":
    main()
