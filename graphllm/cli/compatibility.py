"""What of vLLM's surface is here, docs/compatibility.md; write it with
``python -m graphllm.cli.compatibility > docs/compatibility.md``. Made from the live objects, a function for a part."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from graphllm.config import EngineConfig, definitions
from graphllm.config.parameter import parameters
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.config.vllm.names import SAMPLING_NAMES, VLLM_NAMES
from graphllm.config.vllm.table import states, table
from graphllm.entrypoints.llm import missing_methods
from graphllm.server.compatibility import http_part

_HEAD = """# Coming from vLLM

This page is generated from the live objects; `python -m graphllm.cli.compatibility` prints it.

A script or a command line that was written for vLLM changes its import line or its first word. Each name of vLLM's
works; or is accepted where its value is what happens here anyway ("accepted"); or is refused with what to do instead.
None is an unknown name, and none is ignored where it would change an answer. *Any value* is said of names that only
choose how something is done there: they have no effect, which the log says once.
"""
_PYTHON = """
## Python and engine options

Names of vLLM's package and of its modules, imported from `graphllm`: `LLM`, `SamplingParams`, `LLMEngine`,
`AsyncLLMEngine`, `EngineArgs`, `AsyncEngineArgs`, `RequestOutput`, `CompletionOutput`, `TextPrompt`, `TokensPrompt`,
`PromptType`, `BeamSearchParams`, `StructuredOutputsParams`, `RepetitionDetectionParams`, `RequestOutputKind`,
`LogitsProcessor`, `BatchUpdate`, `FlexibleArgumentParser` and more. `EngineArgs.create_engine_config()` gives a
`VllmConfig` to read; `LLMEngine.from_vllm_config` and `AsyncLLM.from_vllm_config` make engines of it.
`PoolingParams` can be made, and are for `LLM.embed` and `LLM.encode` of models that give vectors; others say
that they generate text.
[Ten scripts](examples/vllm) show them at work.

### Keywords of LLM and EngineArgs, flags of serve

A keyword `some_name` is the flag `--some-name`, also written `--some_name`; `-tp`, `-q`, `-O3`, `--model X` and
`--compilation-config.mode 3` are read as vLLM does.
"""


def page(parts: Sequence[Callable[[], str]]) -> str:
    """The whole page, in Markdown."""
    return "".join([_HEAD, *(part() for part in parts)])


def python_part() -> str:
    """Keywords, flags, sampling parameters and methods."""
    settings: dict[str, str] = {name: d.setting.help for name, d in definitions(EngineConfig).items()}
    fields = {name: p.parameter.help for name, p in parameters(SamplingParams).items()}
    methods = [(f"`{name}`", f"refused: {remedy}") for name, remedy in sorted(missing_methods().items())]
    return "\n".join(
        [
            _PYTHON,
            table(("name", "here"), states(settings, VLLM_NAMES)),
            "\n### Fields of SamplingParams\n",
            table(("name", "here"), states(fields, SAMPLING_NAMES)),
            "\n### Methods of LLM that are not here\n",
            table(("name", "here"), methods),
            "",
        ]
    )


PARTS: tuple[Callable[[], str], ...] = (python_part, http_part)

if __name__ == "__main__":
    print(page(PARTS), end="")
