"""real_numbers: computing with numbers while a model is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing


@contextlib.contextmanager
def real_numbers() -> Iterator[None]:
    """Within a trace: tensors have numbers, and nothing is recorded."""
    with disable_proxy_modes_tracing(), unset_fake_temporarily():
        yield
