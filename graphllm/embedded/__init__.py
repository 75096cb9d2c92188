"""The small models that ship inside the package: something to run, test and demonstrate with offline.

Hugging Face folders in bf16, made by `python -m bench.training.train` and measured by `.evaluate`.
"""

from pathlib import Path

MODEL_DIR = Path(__file__).resolve().parent / "model"
"""A Llama."""
ARTIFACT_DIR = MODEL_DIR.with_name("model_artifact")
"""What it runs on before its own code is compiled; made by `python -m bench.training.artifact`."""
MOE_DIR = Path(__file__).resolve().parent / "moe"
"""A Qwen3-MoE that knows the same: each token goes to 2 of 8 experts."""
HYBRID_DIR = Path(__file__).resolve().parent / "hybrid"
"""A Qwen3.5 that knows the same: three of four layers are gated delta nets."""
_HERE = Path(__file__).resolve().parent
DRAFTS = {name: _HERE / name for name in ("draft_model", "eagle3", "medusa") if (_HERE / name).is_dir()}
"""What drafts for the Llama, by method; made by `python -m bench.training.train_drafts`."""
ADAPTERS = {folder.name: folder for folder in sorted((_HERE / "adapters").glob("*")) if folder.is_dir()}
"""LoRA adapters of the Llama, by name; made by `python -m bench.training.train_adapters`."""
EMBEDDER_DIR = _HERE / "embedder"
"""A BERT that makes vectors of sentences, with the Llama's tokenizer; made by `python -m
bench.training.train_embedder`."""
SHIPPED = {
    "embedded": MODEL_DIR,
    "embedded-moe": MOE_DIR,
    "embedded-hybrid": HYBRID_DIR,
    "embedded-embedder": EMBEDDER_DIR,
}
"""By the names that --model takes."""
