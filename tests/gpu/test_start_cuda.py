"""A process that has not imported torch: weights are read while it does, and are the checkpoint's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from graphllm.config import EngineArgs, Env
from graphllm.loading.artifact.build import find_or_build
from graphllm.loading.artifact.resolve import compile_config
from graphllm.loading.checkpoint.source import open_source
from graphllm.weights.checkpoint.checkpoint import Checkpoint
from graphllm.weights.loading.loader import load_weights
from graphllm.weights.plan.plan import WeightPlan

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
ROOT = Path(__file__).parents[2]
PROMPT = [5, 9, 77, 31]
# Prints how many allocations hold the parameters, greedy tokens, and how many of those were given back in the end.
SCRIPT = f"""
import gc, json, sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from tests.engine.harness import finish, open_core, request
assert "torch" not in sys.modules
from graphllm.weights.loading import early_reading as early
given_back = []
class Watched(early.Block):
    def __del__(self):
        super().__del__()
        given_back.append(self)
early.Block = Watched
checkpoint, place, found = sys.argv[1:]
core = open_core(Path(checkpoint), Path(place))
from safetensors.torch import save_file
weights = core.executor.worker.weights
save_file({{name: weight.cpu().clone() for name, weight in weights.items()}}, found)
blocks = {{weight.untyped_storage().data_ptr() for weight in weights.values()}}
tokens = finish(core, [request("r", {PROMPT})])["r"].tokens
del weights
core.close()
gc.collect()
print(json.dumps([len(blocks), tokens, len(given_back)]))
"""


def _compile(checkpoint: Path, place: Path, with_weights: bool) -> None:
    source = open_source(checkpoint)
    wanted = EngineArgs(target="cuda", dtype="float32", max_model_len=96, max_num_seqs=4, max_num_batched_tokens=32)
    config = compile_config(source.config, wanted)
    find_or_build(source, config, Env.read(), "rebuild", lambda *_: None, place, bake=with_weights)


def _start(checkpoint: Path, artifact: Path, found: Path) -> list[Any]:
    command = [sys.executable, "-c", SCRIPT, str(checkpoint), str(artifact), str(found)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("with_weights", [False, True], ids=["checkpoint", "baked"])
def test_weights_and_tokens(with_weights: bool, checkpoint: Path, tmp_path: Path) -> None:
    artifact = tmp_path / "artifact"
    _compile(checkpoint, artifact, with_weights)
    blocks, given, given_back = _start(checkpoint, artifact, tmp_path / "found.safetensors")
    plan = WeightPlan.from_json((artifact / "weights.json").read_text())
    expected, found = load_weights(plan, Checkpoint.open(checkpoint)), load_file(tmp_path / "found.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert (blocks, given_back) == (1, 1)  # of parameters that are read later each has its own
    model = LlamaForCausalLM.from_pretrained(checkpoint).eval()
    tokens = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=24, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    assert given == tokens[0, len(PROMPT) :].tolist()
