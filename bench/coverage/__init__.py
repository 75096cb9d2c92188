"""Which models of transformers run, measured type by type: `python -m bench.coverage` writes docs/models.md."""
