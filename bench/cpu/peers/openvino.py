"""OpenVINO GenAI's continuous batching pipeline, on an IR converted from the transformers model."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.cpu.peer import Peer, Runner, Times, Workload


class _OpenVino(Peer):
    packages = ("openvino-genai", "openvino", "nncf", "transformers")
    modules = ("openvino_genai", "openvino", "nncf", "transformers")

    def __init__(self, kind: str, bits: int) -> None:
        self._kind, self.bits, self.name = kind, bits, f"OpenVINO GenAI {kind}"

    def prepare(self, model: Workload) -> None:
        whole, folder = _folder(model, "fp16"), _folder(model, self._kind)
        if not whole.exists():
            _save(_convert(model), whole)
        if not folder.exists():
            _save(_compress(whole, self._kind), folder)

    def files(self, model: Workload) -> Sequence[Path]:
        return [_folder(model, self._kind)]

    def load(self, model: Workload) -> Runner:
        return _Loaded(_folder(model, self._kind), model)


def _folder(model: Workload, kind: str) -> Path:
    return model.work / f"openvino-{kind}"


def _save(converted: Any, folder: Path) -> None:
    import openvino

    part = folder.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    openvino.save_model(converted, part / "openvino_model.xml", compress_to_fp16=True)
    part.rename(folder)


def _compress(whole: Path, kind: str) -> Any:
    """optimum-intel's defaults: int8 by row, int4 by groups of 128 with embeddings in int8."""
    import nncf
    import openvino

    converted = openvino.Core().read_model(whole / "openvino_model.xml")
    if kind == "int8":
        return nncf.compress_weights(converted, mode=nncf.CompressWeightsMode.INT8_ASYM)
    return nncf.compress_weights(converted, mode=nncf.CompressWeightsMode.INT4_ASYM, group_size=128, ratio=1.0)


def _convert(model: Workload) -> Any:
    """A stateful IR: the caches are variables, reordered by beam_idx and extended along the tokens."""
    import numpy as np
    import openvino
    import torch
    from openvino import opset13
    from openvino._offline_transformations import apply_make_stateful_transformation
    from transformers import AutoModelForCausalLM, DynamicCache
    from transformers.cache_utils import DynamicLayer

    source = AutoModelForCausalLM.from_pretrained(
        model.checkpoint, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    layers, heads = source.config.num_hidden_layers, source.config.num_key_value_heads
    size = source.config.hidden_size // source.config.num_attention_heads

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.source = source

        def forward(self, input_ids: Any, attention_mask: Any, position_ids: Any, beam_idx: Any, *past: Any) -> Any:
            cache: Any = DynamicCache()
            for i in range(layers):
                layer = DynamicLayer()
                keys, values = (p.index_select(0, beam_idx) for p in past[2 * i : 2 * i + 2])
                layer.lazy_initialization(keys, values)
                layer.keys, layer.values = keys, values
                cache.layers.append(layer)
            columns = torch.arange(attention_mask.shape[1])
            rows = columns[attention_mask.shape[1] - input_ids.shape[1] :]
            seen = (columns[None, :] <= rows[:, None])[None, None] & attention_mask[:, None, None, :].bool()
            out = self.source(
                input_ids=input_ids,
                attention_mask=torch.where(seen, 0.0, torch.finfo(torch.float32).min),
                position_ids=position_ids,
                past_key_values=cache,
                use_cache=True,
            )
            return (out.logits, *(t for layer in cache.layers for t in (layer.keys, layer.values)))

    batch, fresh, past = 2, 3, 4  # all different, so that none is taken for another
    example = (
        torch.ones(batch, fresh, dtype=torch.long),
        torch.ones(batch, past + fresh, dtype=torch.long),
        torch.arange(past, past + fresh)[None].repeat(batch, 1),
        torch.arange(batch, dtype=torch.int32),
        *(torch.zeros(batch, heads, past, size) for _ in range(2 * layers)),
    )
    with torch.no_grad():
        converted = openvino.convert_model(Step(), example_input=example)
    caches = [f"past_key_values.{i}.{part}" for i in range(layers) for part in ("key", "value")]
    results = [name.replace("past_key_values", "present") for name in caches]
    i64, i32, f32 = openvino.Type.i64, openvino.Type.i32, openvino.Type.f32
    inputs = {
        "input_ids": ([-1, -1], i64), "attention_mask": ([-1, -1], i64), "position_ids": ([-1, -1], i64),
        "beam_idx": ([-1], i32), **{name: ([-1, heads, -1, size], f32) for name in caches},
    }  # fmt: skip
    for port, (name, (shape, kind)) in zip(converted.inputs, inputs.items(), strict=True):
        port.get_tensor().set_names({name})
        port.get_node().set_friendly_name(name)
        port.get_node().set_partial_shape(openvino.PartialShape(shape))
        port.get_node().set_element_type(kind)
    for port, name in zip(converted.outputs, ("logits", *results), strict=True):
        port.get_tensor().set_names({name})
    converted.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(converted, dict(zip(caches, results, strict=True)))
    # What a cache holds at first: without it GenAI does not recognize the attention.
    rows = opset13.gather(
        opset13.shape_of(converted.input("input_ids"), output_type="i64"), opset13.constant([0]), opset13.constant(0)
    )
    empty = opset13.concat([rows, opset13.constant(np.array([heads, 0, size]))], 0)
    for node in converted.get_ops():
        if node.get_type_name() == "ReadValue":
            node.set_arguments([opset13.broadcast(opset13.constant(0.0, dtype=np.float32), empty)])
    converted.validate_nodes_and_infer_types()
    return converted


class _Loaded(Runner):
    def __init__(self, folder: Path, model: Workload) -> None:
        import numpy as np
        import openvino
        import openvino_genai

        self._np, self._openvino, self._genai = np, openvino, openvino_genai
        scheduling = openvino_genai.SchedulerConfig()
        scheduling.cache_size = 1  # GB: many times what the cases need
        scheduling.max_num_batched_tokens, scheduling.max_num_seqs = model.max_len, model.batch
        threads = {"INFERENCE_NUM_THREADS": model.threads}
        self._pipe = openvino_genai.ContinuousBatchingPipeline(str(folder), scheduling, "CPU", threads)
        self._requests = 0

    def run(self, prompts: Sequence[list[int]], count: int) -> Times:
        wanted = self._genai.GenerationConfig()
        wanted.max_new_tokens, wanted.ignore_eos, wanted.do_sample = count, True, False
        wanted.set_eos_token_id(0)
        handles = []
        for prompt in prompts:
            ids = self._openvino.Tensor(self._np.array([prompt], dtype=self._np.int64))
            handles.append(self._pipe.add_request(self._requests, ids, wanted))
            self._requests += 1
        times: Times = [[] for _ in prompts]
        while self._pipe.has_non_finished_requests():
            self._pipe.step()
            now = time.perf_counter()
            for handle, mine in zip(handles, times, strict=True):
                if handle.can_read():
                    mine += [now] * len(next(iter(handle.read().values())).generated_ids)
        return times


PEERS = (_OpenVino("fp16", 16), _OpenVino("int8", 8), _OpenVino("int4", 4))
