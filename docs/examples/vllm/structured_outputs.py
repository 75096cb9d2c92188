"""Answers of a given form: one of a few words, a regular expression, a JSON schema, a grammar."""

import json

from graphllm import LLM, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "large": {"type": "boolean"}},
    "required": ["city", "large"],
    "additionalProperties": False,
}
GRAMMAR = 'start: NUMBER " + " NUMBER\nNUMBER: /[0-9]{1,3}/\n'


def main(**options):
    llm = LLM(**options)
    wanted = {
        "choice": StructuredOutputsParams(choice=["Positive", "Negative"]),
        "regex": StructuredOutputsParams(regex=r"[a-z]{3,8}@example\.com"),
        "json": StructuredOutputsParams(json=SCHEMA),
        "grammar": StructuredOutputsParams(grammar=GRAMMAR),
    }
    for name, form in wanted.items():
        sampling = SamplingParams(temperature=0.0, max_tokens=64, structured_outputs=form)
        (output,) = llm.chat([{"role": "user", "content": "What is the capital of France?"}], sampling)
        text = output.outputs[0].text
        print(f"{name}: {json.loads(text) if name == 'json' else text}")


if __name__ == "__main__":
    main()
