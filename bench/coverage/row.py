"""What was measured of a model type."""

from __future__ import annotations

from typing import Literal

import msgspec

from graphllm.program.manifest import Implementation


class Result(msgspec.Struct):
    """What one implementation does with a type.

    state: works: all tokens are transformers'. wrong: some are not. refused: with an error that says why. fails:
        something else went wrong.
    why: the error, or the first token that differs.
    code: whose code ran.
    """

    state: Literal["works", "wrong", "refused", "fails"]
    why: str = ""
    code: Implementation | None = None


class Row(msgspec.Struct):
    """A model type.

    architecture: transformers' class.
    untried: why there is no tiny model of it.
    ours: of a family here; None where there is none.
    traced: of transformers' code.
    """

    model_type: str
    architecture: str = ""
    untried: str = ""
    ours: Result | None = None
    traced: Result | None = None
