"""The small chat model that ships inside the package: something to run, test and demonstrate with offline."""

from pathlib import Path

MODEL_DIR = Path(__file__).resolve().parent / "model"
"""A Hugging Face folder (Llama, bf16). Made by `python -m graphllm.embedded.train`, measured by `.evaluate`."""
