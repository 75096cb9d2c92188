"""A model's name becomes a folder of files that the engine reads, each once:

`Hub.locate` (a name becomes a folder) -> `ModelFiles.read` (its JSON files) -> `model_config` (config.json as the
engine computes it; opens nothing) -> `open_tensors` (the headers of its tensors) -> `Source`, which is handed on.
"""
