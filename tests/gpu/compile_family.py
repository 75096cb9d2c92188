"""Makes a tiny checkpoint of a family, and compiles it for so many GPUs.

python compile_family.py NAME RANKS (apart or "") FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.models import test_parity as parity

if __name__ == "__main__":
    name, ranks, apart, folder = sys.argv[1], int(sys.argv[2]), bool(sys.argv[3]), Path(sys.argv[4])
    arch = next(a for a in parity.ARCHS if a.name == name)
    parity._build(arch, arch.config).save_pretrained(folder)
    settings: dict[str, Any] = {"tensor_parallel_size": ranks, "enable_expert_parallel": apart}
    parity.driver.Driver(
        folder,
        "inductor",
        target="cuda",
        settings=settings,
        opened=lambda place, tensors: (folder / "artifact").symlink_to(place),
        jobs=4,
    )
