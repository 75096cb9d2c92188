"""OpenAI's chat and completions, its models, and the tokenizer's routes."""
