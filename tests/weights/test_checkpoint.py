"""Opening checkpoints: single files and shards, and every kind of damage refused by the name of the file."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from graphllm.config import ConfigError
from graphllm.loading.checkpoint.model_files import ModelFiles
from graphllm.loading.checkpoint.tensors import open_tensors
from graphllm.weights.checkpoint.checkpoint import Checkpoint, WeightError, fingerprint, read_header


def save_shards(folder: Path, shards: dict[str, dict[str, torch.Tensor]]) -> None:
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
    weight_map = {t: name for name, tensors in shards.items() for t in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def two_shards(folder: Path) -> None:
    save_shards(folder, {"one.safetensors": {"a": torch.ones(2, 3)}, "two.safetensors": {"b": torch.ones(4).half()}})


def raw(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def test_a_single_file(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3, dtype=torch.bfloat16), "c": torch.tensor(7)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = Checkpoint.open(tmp_path).tensors
    assert {n: (t.dtype, t.shape) for n, t in found.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("BF16", (3,)),
        "c": ("I64", ()),
    }
    data = (tmp_path / "model.safetensors").read_bytes()
    for name, t in found.items():
        assert data[t.offset : t.offset + t.nbytes] == tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes()


def test_shards_and_fingerprint(tmp_path: Path) -> None:
    two_shards(tmp_path)
    sharded = Checkpoint.open(str(tmp_path))
    assert {n: t.file.name for n, t in sharded.tensors.items()} == {"a": "one.safetensors", "b": "two.safetensors"}
    one_file = tmp_path / "whole"
    one_file.mkdir()
    save_file({"b": torch.zeros(4).half(), "a": torch.zeros(2, 3)}, one_file / "model.safetensors")
    assert fingerprint(Checkpoint.open(one_file)) == fingerprint(sharded)  # neither values nor files count
    save_file({"b": torch.zeros(4), "a": torch.zeros(2, 3)}, one_file / "model.safetensors")
    assert fingerprint(Checkpoint.open(one_file)) != fingerprint(sharded)


OTHER_FORMATS = {
    "tf_model.h5": r"pip install 'transformers<5' tensorflow; .*from_tf=True\)\.save_pretrained",
    "flax_model.msgpack": r"from_flax=True",
    "model.ckpt.index": "from_tf=True",
    "epoch=1.ckpt": r"\['state_dict'\], 'model.safetensors'",
    "model.pt": r"torch.load\('FILE', weights_only=True\), 'model.safetensors'",
    "consolidated.00.pth": "convert_llama_weights_to_hf",
    "weights.bin": "rename it to pytorch_model.bin",
}


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="no such folder"):
        Checkpoint.open(tmp_path / "nothing")
    with pytest.raises(WeightError, match=r"neither model.safetensors nor"):
        Checkpoint.open(tmp_path)
    for file, remedy in OTHER_FORMATS.items():
        (tmp_path / file).touch()
        with pytest.raises(ConfigError, match=rf"only {file}, which cannot be read; .*{remedy}"):
            Checkpoint.open(tmp_path)
        (tmp_path / file).unlink()


def test_all_missing_shards_are_named(tmp_path: Path) -> None:
    two_shards(tmp_path)
    (tmp_path / "one.safetensors").unlink()
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(WeightError, match=r"(?s)one.safetensors', which is not.*two.safetensors', which is not"):
        Checkpoint.open(tmp_path)


def test_all_damaged_shards_are_named(tmp_path: Path) -> None:
    two_shards(tmp_path)
    for name in ("one.safetensors", "two.safetensors"):
        data = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(data[:-1])
    with pytest.raises(WeightError) as e:
        Checkpoint.open(tmp_path)
    assert [p.split(":")[0] for p in e.value.problems] == ["one.safetensors", "two.safetensors"]
    assert str(e.value).count("truncated") == 2


@pytest.mark.parametrize("more", [0, 1, None])
def test_layers_after_the_last_one_only_draft(tmp_path: Path, more: int | None) -> None:
    names = ("model.layers.2.norm.weight", "model.layers.3.norm.weight", "model.layers.4.norm.weight", "model.norm")
    save_file({name: torch.ones(2) for name in names}, tmp_path / "model.safetensors")
    config = {"num_hidden_layers": 3} | ({} if more is None else {"num_nextn_predict_layers": more})
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = open_tensors(ModelFiles.read(tmp_path), "auto").checkpoint
    assert found is not None
    own = "model.mtp_layers.0.norm.weight" if more else "model.layers.3.norm.weight"
    assert set(found.tensors) == {names[0], own, *names[2:]}


def test_no_further_layer(tmp_path: Path) -> None:
    """As in checkpoints that transformers has written, whatever their config.json says."""
    save_file({"model.layers.0.norm.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 1, "num_nextn_predict_layers": 1}))
    files = ModelFiles.read(tmp_path)
    with pytest.raises(WeightError, match="no tensors of a further layer that drafts"):
        open_tensors(files, "auto", files)


@pytest.mark.parametrize("tied", [False, True])
def test_tables_of_a_further_layer_that_are_the_models_own(tmp_path: Path, tied: bool) -> None:
    """Copies are not read; a head is one of the embedding, where the model has no head of its own."""
    tokens, head, other = torch.ones(4, 2), torch.zeros(4, 2), torch.full((4, 2), 2.0)
    stored = {"model.embed_tokens.weight": tokens} | ({} if tied else {"lm_head.weight": head})
    config = {"num_hidden_layers": 1, "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    files = ModelFiles.read(tmp_path)
    for own_tokens, own_head in ((tokens, tokens if tied else head), (other, other), (tokens, other)):
        further = {"embed_tokens.weight": own_tokens.clone(), "shared_head.head.weight": own_head.clone()}
        further = {f"model.layers.1.{n}": t for n, t in (further | {"eh_proj.weight": tokens.clone()}).items()}
        save_file(stored | further, tmp_path / "model.safetensors")
        found = open_tensors(files, "auto", files).checkpoint
        assert found is not None
        assert {n for n in found.tensors if n.startswith("draft:")} == {
            "draft:model.mtp_layers.0.eh_proj.weight",
            *(["draft:mtp.embed_tokens.weight"] if own_tokens is other else []),
            *(["draft:mtp.lm_head.weight"] if own_head is other else []),
        }


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "damaged"),
        ('{"weight_map": {"a": 1}}', "damaged"),
        ('{"weight_map": [1]}', r"weight_map is \[1\]"),
        ("{}", "damaged"),
        ('{"weight_map": {"a": "../one.safetensors"}}', r"outside its folder: '\.\./one"),
        ('{"weight_map": {"a": "one.safetensors", "z": "one.safetensors"}}', "one.safetensors holds z, it does not"),
    ],
)
def test_a_damaged_index(tmp_path: Path, index: str, message: str) -> None:
    two_shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigError, match=rf"index.json: .*{message}"):
        Checkpoint.open(tmp_path)


def tensor(begin: int, end: int, shape: Any = (1,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no header"),
        (b"\x80\x02}q\x00.", "no header"),  # a pickle
        (struct.pack("<Q", 2**60) + b"{}", "no header"),
        (struct.pack("<Q", 500) + b"{}", "truncated"),
        (raw(b"{nonsense}"), "damaged header"),
        (raw([]), "damaged header"),
        (raw({"a": 1}), "damaged header"),
        (raw({"a": tensor(0, 4, (2,))}, bytes(4)), "damaged header"),
        (raw({"a": tensor(0, 4, (-1,))}, bytes(4)), "damaged header"),
        (raw({"a": tensor(0, 4, (True,))}, bytes(4)), "damaged header"),
        (raw({"a": tensor(0, 4, dtype=3)}, bytes(4)), "damaged header"),
        (raw({"a": tensor(4, 0)}, bytes(4)), "damaged header"),
        (raw({"a": tensor(0, 4), "b": tensor(0, 4)}, bytes(4)), "tensor b starts"),
        (raw({"a": tensor(0, 4), "b": tensor(8, 12)}, bytes(12)), "tensor b starts"),
        (raw({"a": tensor(0, 4)}, bytes(3)), "truncated"),
        (raw({"a": tensor(0, 4)}, bytes(5)), "damaged"),
    ],
)
def test_a_damaged_file(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(WeightError, match=rf"model.safetensors: .*{message}"):
        Checkpoint.open(tmp_path)


def test_sub_byte_and_unknown_dtypes_are_listed(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(raw({"a": tensor(0, 2, (4,), "F4"), "b": tensor(2, 5, (1,), "F99")}, bytes(5)))
    assert {n: (t.dtype, t.nbytes) for n, t in read_header(file).items()} == {"a": ("F4", 2), "b": ("F99", 3)}


_good = raw({"__metadata__": {"format": "pt"}, "a": tensor(0, 8, (2,)), "b": tensor(8, 12)}, bytes(12))


@given(at=st.integers(0, len(_good) - 1), byte=st.integers(0, 255), cut=st.booleans())
def test_any_damage_is_found_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, at: int, byte: int, cut: bool
) -> None:
    file = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    file.write_bytes(_good[:at] if cut else _good[:at] + bytes([byte]) + _good[at + 1 :])
    try:
        tensors = read_header(file)
    except WeightError:
        return
    assert not cut
    assert all(t.offset >= 8 and t.offset + t.nbytes <= len(_good) for t in tensors.values())
