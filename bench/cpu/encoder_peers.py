"""Other systems for the case `pooling` on a CPU, with the checkpoint of `write` in their own formats: ONNX Runtime
(torch exports its graph, and its own tool for transformers fuses it) and llama.cpp (the package gguf writes its file).
Both get token ids of transformers' tokenizer, and many texts in batches of like length."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.cpu.gguf_checkpoint import add_sizes, finish

TOKENS = 2048  # of a batch with its padding, about


def thread_count() -> int:
    """As for all systems."""
    return int(os.environ.get("OMP_NUM_THREADS", "0")) or len(os.sched_getaffinity(0))


def in_batches(rows: Sequence[Sequence[int]], tokens: int, most: int, run: Callable[[list[Sequence[int]]], Any]) -> Any:
    """[rows, D]: what ``run`` makes of batches, short rows first, of at most ``tokens`` tokens and ``most`` rows."""
    import numpy as np

    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    found: list[Any] = [None] * len(rows)
    begin = 0
    while begin < len(order):
        end = begin + 1
        while end < len(order) and end - begin < most and len(rows[order[end]]) * (end + 1 - begin) <= tokens:
            end += 1
        for i, vector in zip(order[begin:end], run([rows[i] for i in order[begin:end]]), strict=True):
            found[i] = vector
        begin = end
    return np.array(found)


class _Tokenized:
    """What both have: texts become token ids."""

    tokens, most = TOKENS, 256

    def __init__(self, folder: Path) -> None:
        import transformers

        self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def vectors(self, texts: Sequence[str]) -> Any:
        """[texts, D] float32."""
        rows = self._tokenizer(list(texts), truncation=True, max_length=512)["input_ids"]
        return in_batches(rows, self.tokens, self.most, self._run)

    def _run(self, rows: list[Sequence[int]]) -> Any:
        raise NotImplementedError


class OnnxRuntime(_Tokenized):
    """With all of its graph's optimisations, after the fusions of its tool for BERT."""

    def __init__(self, folder: Path, dtype: str, device: str) -> None:
        if device != "cpu" or dtype != "float32":
            raise ImportError("here it is for a CPU, where its kernels compute in float32")
        import onnxruntime

        super().__init__(folder)
        file = folder / "model.onnx"
        if not file.exists():
            write_onnx(folder, file)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = thread_count()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        self._session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])

    def _run(self, rows: list[Sequence[int]]) -> Any:
        import numpy as np

        width = max(map(len, rows))
        ids, mask = np.zeros((2, len(rows), width), np.int64)
        for i, row in enumerate(rows):
            ids[i, : len(row)], mask[i, : len(row)] = row, 1
        return self._session.run(None, {"input_ids": ids, "attention_mask": mask})[0]


def write_onnx(folder: Path, file: Path) -> None:
    """Export mean pooling and all before it."""
    import onnx
    import torch
    import transformers
    from onnxruntime.transformers import optimizer

    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()

    class Pooled(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            states = model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            mask = attention_mask[..., None].to(states.dtype)
            return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)

    pooled = Pooled()
    pooled.model = model
    ids = torch.ones(2, 7, dtype=torch.int64)
    plain = file.with_suffix(".plain.onnx")
    names = {0: "texts", 1: "tokens"}
    torch.onnx.export(
        pooled, (ids, ids), str(plain), input_names=["input_ids", "attention_mask"], output_names=["vectors"],
        dynamic_axes={"input_ids": names, "attention_mask": names}, dynamo=False, opset_version=17,
    )  # fmt: skip
    heads, width = model.config.num_attention_heads, model.config.hidden_size
    fused = optimizer.optimize_model(str(plain), "bert", num_heads=heads, hidden_size=width, opt_level=1)
    print("onnxruntime fused:", json.dumps(fused.get_fused_operator_statistics()), file=sys.stderr)
    onnx.save(fused.model, str(file))


class LlamaCpp(_Tokenized):
    """Many sequences in one batch; it has no padding, but each token's attention covers the batch."""

    most = 64

    def __init__(self, folder: Path, dtype: str, device: str) -> None:
        if device != "cpu":
            raise ImportError("here it is for a CPU")
        import llama_cpp

        super().__init__(folder)
        self._lib = llama_cpp
        file = folder / f"model-{dtype}.gguf"
        if not file.exists():
            write_gguf(folder, file, dtype)
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)  # llama.cpp holds on to it
        llama_cpp.llama_log_set(self._quiet, None)
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        self.tokens = 512  # the longest text
        params.n_ctx = params.n_batch = params.n_ubatch = self.tokens
        params.n_seq_max = self.most
        params.n_threads = params.n_threads_batch = thread_count()
        params.embeddings = True
        params.pooling_type = llama_cpp.LLAMA_POOLING_TYPE_MEAN
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp could not load {file}")
        self._batch = llama_cpp.llama_batch_init(self.tokens, 0, 1)
        self._width = llama_cpp.llama_model_n_embd(self._model)

    def _run(self, rows: list[Sequence[int]]) -> Any:
        import numpy as np

        batch, n = self._batch, 0
        for sequence, row in enumerate(rows):
            for i, token in enumerate(row):
                batch.token[n], batch.pos[n] = token, i
                batch.n_seq_id[n], batch.seq_id[n][0] = 1, sequence
                batch.logits[n] = 1
                n += 1
        batch.n_tokens = n
        if self._lib.llama_encode(self._context, batch):
            raise RuntimeError("llama_encode failed")
        found = [
            np.ctypeslib.as_array(self._lib.llama_get_embeddings_seq(self._context, i), (self._width,)).copy()
            for i in range(len(rows))
        ]
        return [vector / np.linalg.norm(vector) for vector in found]


def write_gguf(folder: Path, file: Path, dtype: str) -> None:
    """A BERT as llama.cpp reads it, matrices in that type and the rest in float32."""
    import gguf
    import torch
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    arch = gguf.MODEL_ARCH.BERT
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[arch])
    add_sizes(writer, config)
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_token_type_count(config["type_vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    wide = dtype == "float32"
    writer.add_file_type(gguf.LlamaFileType.ALL_F32 if wide else gguf.LlamaFileType.MOSTLY_BF16)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith("position_ids") or name.startswith("pooler."):
            continue
        called = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if called is None:
            raise KeyError(name)
        if wide or tensor.ndim == 1 or called.startswith(("token_", "position_")):
            writer.add_tensor(called, tensor.float().numpy())
        else:
            raw = tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
            writer.add_tensor(called, raw, raw_shape=raw.shape, raw_dtype=gguf.GGMLQuantizationType.BF16)
    finish(writer)
