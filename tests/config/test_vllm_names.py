"""Every name of vLLM's surface works, is accepted where it changes nothing, or is refused with a remedy: in Python and
on the command line. docs/compatibility.md says which, and is checked against what happens."""

from __future__ import annotations

import functools
import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import graphllm
from graphllm.cli.compatibility import PARTS, page
from graphllm.config import ConfigError, EngineArgs, EngineConfig, definitions
from graphllm.config.parameter import parameters
from graphllm.config.requests.sampling_params import RepetitionDetectionParams, SamplingParams, StructuredOutputsParams
from graphllm.config.vllm.flags import vllm_values
from graphllm.config.vllm.names import SAMPLING_NAMES, VLLM_NAMES

ROOT = Path(__file__).parents[2]


def _surface() -> dict[str, list[str]]:
    """The names, by the first word of each comment."""
    found: dict[str, list[str]] = {}
    names: list[str] = []
    for line in Path(__file__).with_name("vllm_surface.txt").read_text().splitlines():
        if line.startswith("#"):
            names = found.setdefault(line[2:].partition(":")[0], [])
        else:
            names += line.split()
    return found


SURFACE = _surface()
ENGINE = [*SURFACE["engine"], *SURFACE["older"]]
SAMPLING = [*SURFACE["sampling"], *SURFACE["older sampling"]]
SETTINGS, PARAMETERS = definitions(EngineConfig), parameters(SamplingParams)
STRANGE = {"no such": "value"}  # which no option has

# What a stock command line says and means nothing here, but for a few.
STOCK = """--host 127.0.0.1 --tensor-parallel-size 1 -pp 1 --pipeline_parallel_size=1 --dtype auto --max-model-len 1k
--gpu-memory-utilization 0.9 --swap-space 4 --cpu-offload-gb 0 --trust-remote-code --tokenizer-mode auto
--kv-cache-dtype auto --enable-chunked-prefill --no-enable-lora --disable-custom-all-reduce --max-num-seqs 8
--enable-prefix-caching --seed 0 --enforce-eager --runner auto --convert auto --block-size 16 --load-format auto
--max_num_batched_tokens 2K --compilation-config.mode 3 -O3 --cudagraph-capture-sizes 1 2 4 --limit-mm-per-prompt {}
--disable-log-stats --scheduling-policy fcfs --max-logprobs 20 --served-model-name first second"""


def test_the_surface_is_all_there() -> None:
    assert (len(SURFACE["engine"]), len(SURFACE["sampling"])) == (255, 39)
    assert [name for name in ENGINE if name not in SETTINGS and name not in VLLM_NAMES] == []
    assert [name for name in SAMPLING if name not in PARAMETERS and name not in SAMPLING_NAMES] == []


def test_what_is_a_setting_is_no_other_name() -> None:
    """Else it would never be looked up: remove it from the table."""
    assert (SETTINGS.keys() & VLLM_NAMES.keys(), PARAMETERS.keys() & SAMPLING_NAMES.keys()) == (set(), set())


def test_the_page_is_up_to_date() -> None:
    written = (ROOT / "docs" / "compatibility.md").read_text()
    assert written == page(PARTS), "run: python -m graphllm.cli.compatibility > docs/compatibility.md"
    assert [name for name in (*ENGINE, *SAMPLING) if f"| `{name}` | " not in written] == []


@pytest.mark.parametrize("name", ENGINE)
def test_a_keyword(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """As the page says; with a value that it cannot have, an error that names it and what to do."""
    (said,) = re.findall(rf"^\| `{name}` \| (.*) \|$", python_page("### Keywords", "### Fields"), flags=re.MULTILINE)
    plain = EngineArgs()
    if name not in SETTINGS:
        assert EngineArgs(**{name: None}) == plain
    if said.startswith("works"):
        strange = [STRANGE] if name in SETTINGS and SETTINGS[name].setting.written == dict | None else STRANGE
        with pytest.raises(ConfigError, match=rf"{name if name in SETTINGS else '.*'} is .*: \w+"):
            EngineArgs(**{name: strange})
        return
    for neutral in VLLM_NAMES[name].neutral:
        assert EngineArgs(**{name: neutral}) == plain
    assert caplog.records == []
    if "any value" in said:
        with caplog.at_level(logging.WARNING):
            assert EngineArgs(**{name: STRANGE}) == plain
        assert f"{name} is {STRANGE!r}: no effect here; " in caplog.text
    else:
        with pytest.raises(ConfigError, match=rf"^{name} is .*: .{{20}}"):
            EngineArgs(**{name: STRANGE})


@functools.cache
def python_page(begin: str, end: str) -> str:
    """A part of the page."""
    return (ROOT / "docs" / "compatibility.md").read_text().partition(begin)[2].partition(end)[0]


@pytest.mark.parametrize("name", SAMPLING)
def test_a_sampling_parameter(name: str) -> None:
    (said,) = re.findall(rf"^\| `{name}` \| (.*) \|$", python_page("### Fields", "### Methods"), flags=re.MULTILINE)
    if name in PARAMETERS:
        assert SamplingParams(**{name: PARAMETERS[name].default}) == SamplingParams()
    else:
        assert SamplingParams(**{name: None}) == SamplingParams()
        for neutral in SAMPLING_NAMES[name].neutral:
            assert SamplingParams(**{name: neutral}) == SamplingParams()
    if name != "extra_args":  # which takes anything
        with pytest.raises(ConfigError, match=r"^\w+(\.\w+)? .*: \w+|has no such: "):
            SamplingParams(**{name: object() if name in PARAMETERS else STRANGE})
    assert said.startswith(("works: ", "accepted: "))


def test_names_that_mean_a_setting() -> None:
    for given, meant in (
        ({"enforce_eager": True}, {"backend": "eager"}),
        ({"enforce_eager": False}, {}),
        ({"device": "cpu"}, {"target": "cpu"}),
        ({"dtype": "half"}, {"dtype": "float16"}),
        ({"max_model_len": "4k"}, {"max_model_len": 4000}),
        ({"max_model_len": "4K"}, {"max_model_len": 4096}),
        ({"max_num_batched_tokens": "25.6k"}, {"max_num_batched_tokens": 25600}),
        ({"max_model_len": -1, "enable_prefix_caching": None, "logits_processors": None}, {}),
        ({"spec_model": "m", "spec_tokens": 3}, {"speculative_model": "m", "num_speculative_tokens": 3}),
        (
            {"speculative_config": {"model": "m", "num_speculative_tokens": 3, "method": "draft_model"}},
            {"speculative_method": "draft_model", "speculative_model": "m", "num_speculative_tokens": 3},
        ),
        ({"speculative_config": {"model": "m"}}, {"speculative_model": "m"}),
        ({"speculative_config": {"method": "eagle3"}}, {"speculative_method": "eagle3"}),
        ({"speculative_config": {"method": "mimo_mtp"}}, {"speculative_method": "mtp"}),
        ({"spec_method": "medusa", "spec_model": "m"}, {"speculative_method": "medusa", "speculative_model": "m"}),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}},
            {"num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 4},
        ),
        (
            {"spec_method": "ngram", "spec_tokens": 2},
            {"num_speculative_tokens": 2, "prompt_lookup_max": 5, "prompt_lookup_min": 5},
        ),
        (
            {
                "speculative_config": {
                    "method": "suffix",
                    "num_speculative_tokens": 4,
                    "disable_by_batch_size": 8,
                    "suffix_decoding_max_tree_depth": 9,
                }
            },
            {
                "num_speculative_tokens": 4,
                "draft_proposer": "suffix",
                "speculative_disable_by_batch_size": 8,
                "suffix_decoding_max_tree_depth": 9,
            },
        ),
        (
            {"speculative_config": {"method": "custom_class", "model": "m:C", "num_speculative_tokens": 4}},
            {"num_speculative_tokens": 4, "draft_proposer": "m:C"},
        ),
        (
            {"speculative_config": {"method": "ngram_host", "num_speculative_tokens": 4, "prompt_lookup_max": 3}},
            {"num_speculative_tokens": 4, "draft_proposer": "ngram", "ngram_proposer_max": 3},
        ),
        ({"structured_outputs_config": {"backend": "xgrammar"}}, {"structured_outputs_backend": "xgrammar"}),
        ({"structured_outputs_config": {"backend": None, "enable_in_reasoning": False}}, {}),
        ({"guided_decoding_backend": "outlines"}, {"structured_outputs_backend": "outlines"}),
        ({"swap_space": 4}, {"kv_offloading_size": 4 << 30}),
        ({"swap_space": 0, "kv_offloading_backend": "native", "kv_offloading_policy": None}, {}),
        ({"kv_offloading_size": 1.5}, {"kv_offloading_size": "1536MiB"}),
        ({"kv_offloading_size": "2"}, {"kv_offloading_size": 2 << 30}),
    ):
        assert EngineArgs(**given) == EngineArgs(**meant), given  # type: ignore[arg-type]
    choice = StructuredOutputsParams(choice=("a", "b"))
    assert SamplingParams(guided_decoding=choice) == SamplingParams(structured_outputs=choice)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kv_offloading_size": "500KB"}, "kv_offloading_size is '500KB': less than a megabyte; give more"),
        (
            {"kv_offloading_size": 1e-9},
            "kv_offloading_size is 1e-09: a number without a unit is GiB, and .*; give more",
        ),
        ({"kv_offloading_size": "1e-7"}, "kv_offloading_size is '1e-7': a number without a unit is GiB"),
        ({"kv_offloading_size": 1, "kv_offloading_disk": ""}, "kv_offloading_disk is '': give a folder"),
        ({"kv_offloading_disk": "/d"}, "kv_offloading_disk is '/d': .*; give kv_offloading_size, too"),
        ({"kv_offloading_disk_size": 9}, "kv_offloading_disk_size is 9: .*; give kv_offloading_disk, too"),
        ({"kv_offloading_backend": "lmcache"}, "kv_offloading_backend is 'lmcache': .*; use native, with kv"),
        ({"enforce_eager": True, "target": "cpu", "spec_model": "a", "speculative_model": "b"}, "spec_model is 'a'"),
        (
            {"speculative_config": {"method": "eagel"}},
            "speculative_config.method is 'eagel': there are draft_model, ea",
        ),
        ({"speculative_config": {"num_speculative_tokens": 2}}, "it has neither method nor model"),
        (
            {"speculative_config": {"method": "ngram", "model": "m"}},
            "speculative_config.model is 'm': with method ngram",
        ),
        (
            {"speculative_config": {"method": "suffix", "prompt_lookup_max": 2}},
            "speculative_config.prompt_lookup_max is 2: with method suffix give num_speculative_tokens, disable_by",
        ),
        (
            {"structured_outputs_config": {"backend": "yacc"}},
            "structured_outputs_backend is 'yacc': .*lm-format-enforcer",
        ),
        (
            {"structured_outputs_config": {"disable_any_whitespace": True}},
            "structured_outputs_config.disable_any_whitespace is True: not supported; give it in a request's",
        ),
        ({"structured_outputs_config": "xgrammar"}, "structured_outputs_config is 'xgrammar': give an object"),
        ({"enforce_eager": 1}, "enforce_eager is 1: give True or False"),
        ({"enable_lora_bias": 0}, "enable_lora_bias is 0: adapters change linear"),  # 0 is not False
        ({"tokenzier": "x"}, "tokenzier is 'x': not supported; leave it out, or did you mean tokenizer"),
        ({"max_model_len": "4.5"}, "max_model_len is '4.5': give a whole number, such as 4096"),
        (
            {"cpu_offload_params": ["w"], "enable_lora_bias": True},
            "cpu_offload_params is .*; enable_lora_bias is True: ",
        ),
    ],
)
def test_mistakes(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineArgs(**given)


# --- the command line


def _parsed(*words: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `graphllm serve` reads, and the other names among it."""
    from graphllm.cli.app import command_line

    command: Any = command_line()
    given = command.commands["serve"].make_context("serve", list(words)).params
    return given, vllm_values(given.pop("vllm_name") or ())


def test_a_stock_command_line() -> None:
    given, other = _parsed("MODEL", *STOCK.split())
    assert (str(given["model"]), given["max_model_len"], given["max_num_batched_tokens"]) == ("MODEL", "1k", "2K")
    assert given["served_model_name"] == ["first", "second"]
    assert (other["cudagraph_capture_sizes"], other["compilation_config"]) == ([1, 2, 4], {"mode": 3})
    args = EngineArgs(max_model_len=given["max_model_len"], **other)
    assert (args.backend, args.max_model_len) == ("eager", 1000)


def test_the_model_as_an_option() -> None:
    assert str(_parsed("--model", "M", "--served-model-name", "a", "b")[0]["model"]) == "M"
    given, _ = _parsed("--served-model-name", "a", "M")  # nothing but the model can stand there
    assert (given["served_model_name"], str(given["model"])) == (["a"], "M")


@pytest.mark.parametrize("name", [n for n in SURFACE["engine"] if n in VLLM_NAMES])
def test_a_flag(name: str) -> None:
    """With its neutral value, spelled in both ways, the command starts as without it."""
    entry = VLLM_NAMES[name]
    for flag in (f"--{name}", "--" + name.replace("_", "-")):
        for value in entry.neutral:
            words = (
                [flag] if value is True else [f"{flag}", str(value) if isinstance(value, str) else json.dumps(value)]
            )
            if value is False:
                words = ["--no-" + flag[2:]]
            given, other = _parsed("MODEL", *words)
            if name in given:  # it is an option of the server's
                continue
            assert list(other) == [name]
            assert EngineArgs(**other) == EngineArgs()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--enforce-eagr",), r"No such option: --enforce-eagr; did you mean --enforce-eager\?"),
        (("--skip-tokenizer-init",), "--skip-tokenizer-init: `graphllm serve` does not have it"),
        (("--offload-group-size",), "--offload-group-size: a value is missing after it"),
    ],
)
def test_mistakes_in_flags(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _parsed("MODEL", *words)


def test_a_refused_flag_ends_with_one_line(cli: Any) -> None:
    done = cli("serve", "MODEL", "--calculate-kv-scales")
    assert (done.code, done.err.splitlines()[-1][:42]) == (2, "graphllm: calculate_kv_scales is True: the")
    assert "Traceback" not in done.err


# --- the package


def test_names_to_import() -> None:
    for name in SURFACE["package"]:
        assert getattr(graphllm, name) is not None
    assert graphllm.AsyncLLMEngine is graphllm.AsyncLLM
    assert graphllm.AsyncEngineArgs is graphllm.EngineArgs
    fast = "import sys, graphllm; print([m for m in ('torch', 'numpy', 'msgspec') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", fast], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_scripts_own_options() -> None:
    parser = EngineArgs.add_cli_args(graphllm.FlexibleArgumentParser())
    parser.add_argument("--n", type=int, default=1)
    words = "--model 7 --n 3 --max_model_len 4k --enforce-eager --no-enable-prefix-caching --swap-space 4"
    given = parser.parse_args([*words.split(), "--speculative-config", '{"model": "d", "num_speculative_tokens": 2}'])
    args = EngineArgs.from_cli_args(given)
    assert given.n == 3
    assert args == EngineArgs(
        "7", backend="eager", max_model_len=4000, enable_prefix_caching=False, speculative_model="d",
        num_speculative_tokens=2, kv_offloading_size=4 << 30,
    )  # fmt: skip
    text = " ".join(parser.format_help().split())
    assert ("--gpu-memory-utilization" in text, "--swap-space" in text) == (True, False)
    with pytest.raises(ConfigError, match="offload_group_size is 3: cpu_offload_gb says how many"):
        EngineArgs.from_cli_args(parser.parse_args(["--offload-group-size=3"]))


def test_methods_and_fields() -> None:
    llm = graphllm.LLM.__new__(graphllm.LLM)
    llm.llm_engine = None  # type: ignore[assignment]
    assert [name for name in SURFACE["methods"] if not hasattr(llm, name)] == []
    assert not hasattr(llm, "no_such_method")
    assert set(SURFACE["repetition"]) == {*parameters(RepetitionDetectionParams)}
    assert set(SURFACE["structured"]) <= {
        *StructuredOutputsParams.__dataclass_fields__,
        "_backend",
        "_backend_was_auto",
    }
