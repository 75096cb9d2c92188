"""What users start from: `LLM` and `AsyncLLM`, and the way to them: a checkpoint is opened, its artifact found or
built, an engine core loaded. The one floor that knows both the compiler, imported only to build, and the engine."""
