"""Settings: defaults for the machine and model, and errors that name the field, its value and the remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from graphllm.config import Bucket, ConfigError, EngineArgs, Env, Target, default_buckets, parse_buckets
from graphllm.loading.artifact import resolve
from graphllm.loading.artifact.build import find_or_build
from graphllm.loading.artifact.resolve import compile_config
from graphllm.loading.checkpoint.source import open_source

MODEL = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096, "dtype": "bfloat16"}
CPU, H200 = Target("cpu", ("x86_64",)), Target("cuda", ("sm_90", "sms_132"))


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Any:
    """target(t): this machine is ``t`` from now on."""
    return lambda made: monkeypatch.setattr(resolve, "detect_target", lambda wanted: made)


def test_cache_folder() -> None:
    assert Env.read({"GRAPHLLM_CACHE": "/a", "XDG_CACHE_HOME": "/b"}).cache_dir == Path("/a")
    assert Env.read({"XDG_CACHE_HOME": "/b"}).cache_dir == Path("/b/graphllm")
    assert Env.read({}).cache_dir == Path.home() / ".cache" / "graphllm"


def test_defaults(target: Any) -> None:
    target(CPU)
    config = compile_config(MODEL, EngineArgs())
    assert (config.dtype, config.max_model_len) == ("bfloat16", 4096)
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (64, 2048)
    assert config.buckets == (Bucket("decode", 1, 1), Bucket("decode", 2, 64), Bucket("mixed", 2, 2048))
    assert not config.tune
    assert compile_config({"n_positions": 77}, EngineArgs()).max_model_len == 77
    assert compile_config({}, EngineArgs()).dtype == "float32"
    target(H200)
    config = compile_config({**MODEL, "dtype": "float32"}, EngineArgs())
    assert (config.dtype, config.max_num_seqs, config.max_num_batched_tokens) == ("bfloat16", 256, 8192)
    edges = [(b.lo, b.hi) for b in config.buckets if b.kind == "decode"]
    assert edges == [(1, 1), (2, 16), (17, 32), (33, 64), (65, 128), (129, 256)]
    assert config.tune
    assert not compile_config(MODEL, EngineArgs(tune=False)).tune
    assert compile_config({"dtype": "float32"}, EngineArgs(dtype="float32")).dtype == "float32"


@pytest.mark.parametrize("device", [CPU, H200], ids=["cpu", "cuda"])
@pytest.mark.parametrize("seqs", [1, 2, 3, 16, 17, 100, 256])
def test_default_buckets_cover_every_batch_once(device: Target, seqs: int) -> None:
    buckets = default_buckets(device, seqs, 512)
    for n in range(1, seqs + 1):
        assert sum(b.kind == "decode" and b.lo <= n <= b.hi for b in buckets) == 1
    assert [b for b in buckets if b.kind == "mixed"] == [Bucket("mixed", 2, 512)]


def test_one_limit_sets_the_other(target: Any) -> None:
    """What is not given follows what is."""
    target(CPU)
    few = compile_config(MODEL, EngineArgs(max_num_batched_tokens=16))
    assert (few.max_num_seqs, few.max_num_batched_tokens, few.buckets[-1].hi) == (16, 16, 16)
    many = compile_config(MODEL, EngineArgs(max_num_seqs=4000))
    assert (many.max_num_seqs, many.max_num_batched_tokens, many.buckets[-1].hi) == (4000, 4000, 4000)
    own = compile_config(MODEL, EngineArgs(buckets=parse_buckets("decode-1,mixed-2-512")))
    assert (own.max_num_batched_tokens, own.max_num_seqs) == (512, 64)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0: it must be at least 1"),
        ({"max_num_seqs": -3}, "max_num_seqs is -3"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0"),
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"block_size": 0}, "block_size is 0"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "is 32: it must be at least max_num_seqs, 64"),
        (
            {"buckets": "mixed-2-64", "max_num_batched_tokens": 128},
            "is 128: .* at most what the mixed buckets take, 64",
        ),
        ({"buckets": "decode-1,decode-2-64"}, "none takes prompts"),
        ({"buckets": "mixed-1-64"}, "mixed-1-64 is no range"),
        ({"buckets": "mixed-64-2"}, "mixed-64-2 is no range"),
        ({"buckets": "decode-0,mixed-2-4"}, "decode-0 is no range"),
        ({"dtype": "float64"}, "dtype is 'float64': use bfloat16"),
    ],
)
def test_impossible_settings(wanted: dict[str, Any], message: str, target: Any) -> None:
    target(CPU)
    if "buckets" in wanted:
        wanted = {**wanted, "buckets": parse_buckets(wanted["buckets"])}
    with pytest.raises(ConfigError, match=message):
        compile_config(MODEL, EngineArgs(**wanted))


def test_deterministic_states_are_not_rounded(target: Any) -> None:
    """A step writes them, so where a prompt's chunks end would matter."""
    target(H200)
    with pytest.raises(ConfigError, match="deterministic: mamba_ssm_cache_dtype is float16"):
        compile_config(MODEL, EngineArgs(deterministic=True, mamba_ssm_cache_dtype="float16"))
    assert compile_config(MODEL, EngineArgs(deterministic=True, mamba_ssm_cache_dtype="float32")).deterministic


def test_parse_buckets() -> None:
    expected = (Bucket("decode", 1, 1), Bucket("decode", 2, 64), Bucket("mixed", 2, 2048))
    assert parse_buckets("decode-1, decode-2-64,mixed-2-2048") == expected
    assert parse_buckets(",".join(b.name for b in expected)) == expected
    for text in ("", "decode", "decode-", "prefill-1", "mixed-2-3-4", "mixed-a-b", "mixed--2"):
        with pytest.raises(ConfigError, match=f"'{text}' is not of the form"):
            parse_buckets(text)


def test_bucket_limits() -> None:
    """The largest sizes of a step: S and R are dynamic dimensions of their own in mixed batches, never below 2."""
    assert Bucket("decode", 1, 1).limits(8) == {"T": 1, "S": 1, "R": 1}
    assert Bucket("decode", 2, 8).limits(8) == {"T": 8, "S": 8, "R": 8}
    assert Bucket("mixed", 2, 64).limits(8) == {"T": 64, "S": 8, "R": 8}
    assert Bucket("mixed", 2, 64).limits(1) == {"T": 64, "S": 2, "R": 2}
    assert Bucket("decode", 2, 8, query_len=4).limits(8) == {"T": 32, "S": 8, "R": 32}


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "has no config.json"), ("{", "not valid JSON"), ("[]", "no JSON object"), ("{}", "model.safetensors")],
)
def test_folders_that_are_no_checkpoint(content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        _ = open_source(tmp_path).tensors


def test_missing_folder() -> None:
    with pytest.raises(ConfigError, match="/no/such is not a folder"):
        open_source("/no/such")


@pytest.mark.parametrize("architectures", [["SomethingNewForCausalLM"], [], None])
def test_unknown_architecture(architectures: Any, checkpoint: Path, tmp_path: Path) -> None:
    from graphllm.compile.families import find_model

    config = json.loads((checkpoint / "config.json").read_text()) | {"architectures": architectures}
    with pytest.raises(ConfigError, match=r"not supported. Known: .*LlamaForCausalLM.*docs/adding-a-model.md"):
        find_model(config)


def test_unknown_models_are_named_by_their_type() -> None:
    from graphllm.compile.families import find_model

    with pytest.raises(ConfigError, match=r"architectures: missing \(model_type 'mamba'\) is not supported") as refused:
        find_model({"model_type": "mamba"})
    text, vectors, drafts = str(refused.value).split("for ")[1:4]
    assert "Qwen3ForCausalLM" in text
    assert "BertModel" in vectors
    assert "LlamaForCausalLMEagle3" in drafts


def test_context_longer_than_the_model(checkpoint: Path, cache: Path) -> None:
    source = open_source(checkpoint)
    config = compile_config(source.config, EngineArgs(target="cpu", backend="eager", max_model_len=129))
    with pytest.raises(ConfigError, match="max_model_len is 129: the model was made for 128"):
        find_or_build(source, config, Env(cache), "build", lambda *stage: None)


def test_random_weights_need_no_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    assert open_source(tmp_path, "dummy").checkpoint is None
