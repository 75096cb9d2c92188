"""placeholder until the reader of adapters is merged"""
from pathlib import Path
def adapter_digest(folder: Path) -> str: raise NotImplementedError
def read_adapter(folder, linears, max_rank, dtype): raise NotImplementedError
