"""A model's name becomes a folder of files that the engine reads."""
