"""Models by name: the hub's cache, downloads, which name is a path, which files and commit are taken, and what of
config.json and generation_config.json may be said otherwise."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from graphllm import LLM, SamplingParams
from graphllm.config import ConfigError, EngineArgs, Env
from graphllm.loading.artifact.build import artifact_folder
from graphllm.loading.artifact.model import checkpoint_defaults
from graphllm.loading.artifact.resolve import compile_config
from graphllm.loading.checkpoint.hub import Hub, is_name, name_of
from graphllm.loading.checkpoint.source import find_source, find_tokenizer
from graphllm.loading.checkpoint.wanted import WholeModel
from graphllm.program.artifact import Artifact
from tests.hub import GATED, HubServer, commit_of, files_of, fill_cache, hub_server

pytestmark = pytest.mark.usefixtures("cache")  # what was converted or downloaded before is not there

NAME = "tiny/llama"
EAGER = {
    "enforce_eager": True, "target": "cpu", "kv_cache_memory_bytes": 1 << 20, "max_model_len": 96, "max_num_seqs": 4,
    "max_num_batched_tokens": 32, "block_size": 8,
}  # fmt: skip


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """Nothing but this one can be asked, and its cache is empty."""
    for name in ("HF_HOME", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with hub_server() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def found(model: str | Path, **settings: Any) -> Path:
    """The folder that is taken for it."""
    return find_source(EngineArgs(model, **settings)).folder


# --- the cache


def test_a_model_in_the_cache_runs(tmp_path: Path, checkpoint: Path, hub: HubServer) -> None:
    """As the folder does; the artifact is the same one, and says which commit it was made of."""
    fill_cache(tmp_path / "hub", NAME, files_of(checkpoint))
    prompt, greedy = {"prompt_token_ids": [5, 6, 7, 8]}, SamplingParams(temperature=0, max_tokens=8)
    with LLM(NAME, trust_remote_code=True, **EAGER) as llm:
        named = llm.generate(prompt, greedy)[0].outputs[0].token_ids
    with LLM(checkpoint, **EAGER) as llm:
        assert llm.generate(prompt, greedy)[0].outputs[0].token_ids == named
    assert hub.asked == []
    args = EngineArgs(NAME, **EAGER)
    source = find_source(args)
    place = artifact_folder(source, compile_config(source.config, args), Env.read())
    assert Artifact.trusted(place).manifest.origin == {"name": NAME, "commit": commit_of(NAME)}
    assert place.name.startswith("llama-")


def test_where_the_cache_is(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for the hub's own library, which is asked in a fresh process."""
    script = "from huggingface_hub import constants as c; print(c.HF_HUB_CACHE, c.HF_HUB_OFFLINE)"
    for variables in (
        {},
        {"XDG_CACHE_HOME": "/a"},
        {"XDG_CACHE_HOME": "/a", "HF_HOME": "/b"},
        {"HF_HOME": "/b", "HF_HUB_CACHE": "/c", "HF_HUB_OFFLINE": "1"},
    ):
        env = {"HOME": str(tmp_path), "TRANSFORMERS_OFFLINE": "yes" if not variables else "", **variables}
        told = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
        with monkeypatch.context() as patch:
            patch.setenv("HOME", str(tmp_path))
            ours = Env.read(env)
        assert told.stdout.split() == [str(ours.hub_cache), str(ours.offline)]
    there = fill_cache(tmp_path / "elsewhere", NAME, files_of(checkpoint))
    assert found(NAME, download_dir=str(tmp_path / "elsewhere")) == there


def test_revisions(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, other = files_of(checkpoint), commit_of("other")
    main = fill_cache(tmp_path / "hub", NAME, files)
    branch = fill_cache(tmp_path / "hub", NAME, files, "refs/pr/1", other)
    assert found(NAME) == found(NAME, revision="main") == found(NAME, revision=main.name) == main
    assert found(NAME, revision="refs/pr/1") == found(NAME, revision=other) == branch
    assert find_source(EngineArgs(NAME, revision=other)).commit == other
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=r"tiny/llama \(v2\) is neither a folder nor in the cache .*HF_HUB_OFFLINE"):
        found(NAME, revision="v2")
    with pytest.raises(ConfigError, match=r"revision is '../x': give a branch"):
        found(NAME, revision="../x")
    with pytest.raises(ConfigError, match="revision is 'v2': model is a folder on this machine"):
        found(checkpoint, revision="v2")
    assert found(checkpoint, revision="main") == checkpoint


# --- names and paths


@pytest.mark.parametrize(
    "path",
    ["./tiny/llama", "../llama", "/tiny/llama", "~/llama", "a/b/c", "tiny/llama/", "x/model.safetensors", "a/q.gguf",
     ".hidden", "a b", "a//b", "a/..", "", "a--b/c"],
)  # fmt: skip
def test_what_looks_like_a_path_is_never_asked_for(path: str, hub: HubServer) -> None:
    assert not is_name(path)
    with pytest.raises(ConfigError, match=r"is not a folder; give that|has no config.json|is not there; give the path"):
        found(path)
    assert hub.asked == []


def test_a_folder_comes_first(
    tmp_path: Path, checkpoint: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_cache(tmp_path / "hub", NAME, files_of(checkpoint))
    (tmp_path / "tiny").mkdir()
    (tmp_path / NAME).symlink_to(checkpoint)
    monkeypatch.chdir(tmp_path)
    assert (found(NAME), find_source(EngineArgs(NAME)).commit) == (Path(NAME), None)
    assert (name_of(NAME), name_of("gpt2"), name_of("Qwen/Qwen3-0.6B")) == ("llama", "gpt2", "Qwen/Qwen3-0.6B")
    with pytest.raises(ConfigError, match="is not a folder"):
        found(Path("other/llama"))  # a Path never is a name
    assert hub.asked == []


# --- downloads


def test_a_download(tmp_path: Path, checkpoint: Path, hub: HubServer, capfd: pytest.CaptureFixture[str]) -> None:
    files = files_of(checkpoint)
    others = {"modeling_tiny.py": b"raise SystemExit", "pytorch_model.bin": b"x", "original/model.safetensors": b"x",
              "README.md": b"x", "additional_chat_templates/tool_use.jinja": b"x"}  # fmt: skip
    hub.models[NAME] = {**files, **others}
    source = find_source(EngineArgs(NAME, hf_token="hf_secret"))
    assert source.commit == commit_of(NAME)
    taken = {str(p.relative_to(source.folder)): p.read_bytes() for p in source.folder.rglob("*") if p.is_file()}
    assert taken == {**files, "additional_chat_templates/tool_use.jinja": b"x"}
    assert hub.tokens == {"Bearer hf_secret"}
    assert "100%" in capfd.readouterr().err
    count = len(hub.asked)
    assert found(NAME) == source.folder
    assert len(hub.asked) == count  # it is in the cache now
    (source.folder / "model.safetensors").unlink()  # as after a download that was stopped
    assert (found(NAME) / "model.safetensors").read_bytes() == files["model.safetensors"]


def test_bin_files_only_where_there_is_nothing_else(checkpoint: Path, hub: HubServer) -> None:
    hub.models[NAME] = {
        **files_of(checkpoint, "model.safetensors"),
        "pytorch_model.bin": b"no tensors",
        "training_args.bin": b"x",
    }
    hub.models["tiny/small"] = hub.models[NAME]
    place = Hub.of(None, None)
    folder = place.locate("model", NAME, None, WholeModel("auto")).folder
    assert sorted(p.name for p in folder.glob("*.bin")) == ["pytorch_model.bin"]
    assert not any(found("tiny/small", load_format="dummy").glob("*.bin"))


def test_modules_of_sentence_transformers(checkpoint: Path, hub: HubServer) -> None:
    """Dense layers behind pooling lie in folders of their own, and a download without them is not complete."""
    modules = {"1_Pooling/config.json": b"{}", "2_Dense/config.json": b"{}", "2_Dense/model.safetensors": b"x"}
    hub.models["tiny/dense"] = {**files_of(checkpoint), **modules, "onnx/model.onnx": b"x", "2_Dense/a/b.bin": b"x"}
    place = Hub.of(None, None)
    folder = place.locate("model", "tiny/dense", None, WholeModel("auto")).folder
    assert {n for n in modules if (folder / n).is_file()} == set(modules)
    assert not (folder / "2_Dense" / "a").exists()
    (folder / "2_Dense" / "model.safetensors").unlink()
    assert (
        place.locate("model", "tiny/dense", None, WholeModel("auto")).folder / "2_Dense/model.safetensors"
    ).is_file()


def test_what_a_download_says(checkpoint: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.models |= {
        "tiny/gated": GATED,
        "tiny/old": {"config.json": b"{}", "tf_model.h5": b""},
        NAME: files_of(checkpoint),
    }
    for given, message in (
        ({"model": "tiny/none"}, r"model: tiny/none is neither a folder here nor a model at http.*--hf-token"),
        ({"model": "tiny/gated"}, r"model: tiny/gated is gated; accept its terms at http.*/tiny/gated, and give your"),
        ({"model": "tiny/old"}, r"only tf_model.h5, which cannot be read; .*from_tf=True"),
        ({"model": NAME, "revision": "v7"}, "revision is 'v7': tiny/llama has none of this name"),
        ({"model": checkpoint, "speculative_model": "tiny/none"}, "speculative_model: tiny/none is neither"),
    ):
        with pytest.raises(ConfigError, match=message):
            find_source(EngineArgs(**given))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody is there
    with pytest.raises(ConfigError, match=r"tiny/llama cannot be downloaded from http://127.0.0.1:9 .*; look at"):
        found(NAME)


# --- other files than the model's


def test_another_tokenizer(tmp_path: Path, checkpoint: Path, hub: HubServer) -> None:
    hub.models["tiny/words"] = {**files_of(checkpoint, "config.json", "generation_config.json"), "x.py": b"x"}
    args = EngineArgs(checkpoint, tokenizer="tiny/words", tokenizer_revision="main")
    folder = find_tokenizer(args, find_source(args))
    assert {"tokenizer.json", "tokenizer_config.json"} <= {p.name for p in folder.iterdir()}
    assert folder.is_relative_to(tmp_path / "hub")
    assert not any(p.suffix in (".py", ".safetensors") for p in folder.iterdir())
    args = EngineArgs(checkpoint, tokenizer_revision="v2")
    with pytest.raises(ConfigError, match="tokenizer_revision is 'v2': it is of --tokenizer"):
        find_tokenizer(args, find_source(args))


def test_fields_of_the_config(tmp_path: Path, checkpoint: Path) -> None:
    source = find_source(EngineArgs(checkpoint, hf_overrides={"rms_norm_eps": 0.5, "rope_scaling": None}))
    plain = find_source(EngineArgs(checkpoint, hf_overrides='{"rms_norm_eps": 0.5}'))
    assert source.config == {**plain.config, "rope_scaling": None}
    assert plain.config == {**find_source(EngineArgs(checkpoint)).config, "rms_norm_eps": 0.5}
    (tmp_path / "config.json").write_text(
        json.dumps({"text_config": {"model_type": "llama", "a": 1, "b": 2}, "c": {"d": 1}})
    )
    args = EngineArgs(
        checkpoint,
        hf_config_path=tmp_path,
        load_format="dummy",
        hf_overrides={"text_config": {"b": 3}, "c": {"e": 1}},
    )
    assert find_source(args).config == {"text_config": {"model_type": "llama", "a": 1, "b": 3}, "c": {"e": 1}}
    for wrong in ("[1]", "{", [1]):
        with pytest.raises(ConfigError, match=r"hf_overrides is .*: give a (JSON object|dict)"):
            EngineArgs(checkpoint, hf_overrides=wrong)


def test_an_override_reaches_the_tokenizer_and_the_key(checkpoint: Path) -> None:
    with LLM(checkpoint, hf_overrides={"pad_token_id": 7, "max_position_embeddings": 64}, load_format="dummy",
             **{**EAGER, "max_model_len": None}) as llm:  # fmt: skip
        assert llm.get_tokenizer().pad_id == 7
        assert llm.llm_engine.core.info.max_model_len == 64


def test_defaults_of_sampling_parameters(tmp_path: Path, checkpoint: Path) -> None:
    """vLLM's words: auto, vllm, a folder; overrides come last."""
    model, other = tmp_path / "model", tmp_path / "other"
    for folder, fields in ((model, {"temperature": 0.5, "top_k": 7}), (other, {"top_p": 0.25, "do_sample": True})):
        folder.mkdir()
        (folder / "generation_config.json").write_text(json.dumps(fields))
    (model / "config.json").write_text("{}")

    def defaults(**settings: Any) -> SamplingParams:
        args = EngineArgs(model, load_format="dummy", **settings)
        return checkpoint_defaults(args, find_source(args))

    assert defaults() == SamplingParams(temperature=0.5, top_k=7)
    assert defaults(generation_config="vllm") == SamplingParams()
    assert defaults(generation_config=str(other)) == SamplingParams(top_p=0.25)
    assert defaults(override_generation_config={"top_k": 3, "max_new_tokens": 5}) == SamplingParams(
        temperature=0.5, top_k=3, max_tokens=5
    )
    assert defaults(generation_config="vllm", override_generation_config={"do_sample": False}).temperature == 0
    for settings, message in (
        ({"override_generation_config": {"top_q": 1}}, "override_generation_config.top_q is 1: it has no effect; give"),
        ({"override_generation_config": {"top_p": 2}}, "override_generation_config: top_p is 2"),
        ({"generation_config": str(checkpoint.parent)}, "has no generation_config.json; give another folder"),
        ({"generation_config": "./vlm"}, "generation_config: ./vlm is not a folder"),
    ):
        with pytest.raises(ConfigError, match=message):
            defaults(**settings)


def test_the_options_of_the_command_line(checkpoint: Path, cli: Any) -> None:
    done = cli("run", "--model", checkpoint, "--prompt", "hello", "--enforce-eager", "--generation-config", "vllm",
               "--override-generation-config.top_p", "3", "--hf-overrides", '{"eos_token_id": 1}')  # fmt: skip
    assert (done.code, done.err.splitlines()[-1][:50]) == (2, "graphllm: override_generation_config: top_p is 3: ")
    done = cli("compile", "tiny/none", "--revision", "v1")
    assert (done.code, "model: tiny/none is neither a folder here" in done.err) == (2, True)


# --- which architecture it is


def test_a_missing_architecture_is_told_by_the_model_type() -> None:
    """As transformers names the classes that generate text."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from graphllm.ir.registry import load_models
    from graphllm.loading.checkpoint.model_config import with_architecture

    known = load_models()
    borrowing = ("gpt-sw3", "internlm3", "iquestcoder")  # other models, with the class of one
    classes = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    named = {kind: name for kind, name in classes if name in known and kind not in borrowing}
    assert {*named.values()} >= {"LlamaForCausalLM", "OPTForCausalLM", "GPT2LMHeadModel", "Gemma3ForCausalLM"}
    for kind, name in named.items():
        assert with_architecture({"model_type": kind})["architectures"] == [name]
    assert "architectures" not in with_architecture({"model_type": "no_such"})
    assert with_architecture({"model_type": "llama", "architectures": ["X"]})["architectures"] == ["X"]


def test_code_of_a_repository_never_runs(tmp_path: Path, checkpoint: Path) -> None:
    """Nor is it needed where the architecture is known."""
    from graphllm.compile.families import find_model

    folder = tmp_path / "model"
    fill = files_of(checkpoint)
    config = json.loads(fill["config.json"])
    config |= {"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}
    folder.mkdir()
    for name, data in {**fill, "modeling_x.py": b"open('ran', 'w')"}.items():
        (folder / name).write_bytes(data)
    (folder / "config.json").write_text(json.dumps(config))
    find_model(find_source(EngineArgs(folder)).config)
    config |= {"architectures": ["XForCausalLM"], "model_type": "x"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ConfigError, match="auto_map says that XForCausalLM is code of the repository's own, which never"
    ):
        LLM(str(folder), trust_remote_code=True, **EAGER)
    del config["architectures"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="auto_map says that x is code"):
        LLM(str(folder), trust_remote_code=True, **EAGER)
    assert not Path("ran").exists()
