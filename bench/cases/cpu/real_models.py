"""Real models on a CPU, beside llama.cpp on the same GGUF file.

    python -m bench real_models SmolLM2-135M-Instruct.Q4_1.gguf [--rounds 3]

starts: see first_answer. speed: tokens/s of decoding 1 and 8 sequences and of a prompt of 1,024, of the model's own
code, of prebuilt kernels and of llama.cpp, all loaded, in turn, in an order that is drawn. divergence: the mean, over
the tokens of a text, of the Kullback-Leibler divergence of a system's distribution from the exact one: the file's
weights in float32, by transformers. graphllm reads the exact weights, too, in place of a file whose architecture it
does not know in GGUF; ``quantization`` says how it then holds them.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from bench.cases.cpu.first_answer import starts
from bench.cpu.cases import CASES as SPEEDS
from bench.cpu.cases import Case as Speed
from bench.cpu.peer import Runner, Workload
from bench.cpu.worker import make_prompts
from bench.harness import CPUS, Case, in_process, in_turn, worker_command, worker_environment
from bench.process import Commands, Process

CASES = [("real_models", {"files": [str], "rounds": 3, "runs": 3, "threads": CPUS, "quantization": ""})]
HELP = {"files": "GGUF files", "quantization": "of models that graphllm reads from `exact`"}
OURS: dict[str, dict[str, str]] = {"graphllm": {}, "graphllm, prebuilt": {"backend": "prebuilt"}}
UNREAD = ("gemma3",)  # architectures that graphllm does not read in GGUF
_MAX_LEN, _BATCH, _IDS = 1152, 8, 20_000  # _IDS: of random prompts, in every model's vocabulary
TEXT = """The river rises in the hills above the old mill, where rain from the western slopes gathers in three small
lakes. For most of the year it is quiet, and children cross it on stones. In spring, when the snow melts, it can carry
away a bridge in one night. The people of the valley have built their houses on the higher side since a flood took the
lower village four hundred years ago. A stone in the church wall marks how far the water came. Engineers measured the
river for ten years before they planned the dam. They found that the largest floods came when warm rain fell on frozen
ground, because the water could not sink into the earth. The dam now holds back half of it, and a turbine gives light
to the mill, which has become a school."""


def run(case: Case) -> Iterator[dict[str, Any]]:
    """One file after the other."""
    rows: dict[str, Any] = {}
    for file in map(Path, case.files):
        with tempfile.TemporaryDirectory() as place:
            in_process(exact, file, f"{place}/exact")
            known = architecture(file) not in UNREAD
            model = str(file) if known else f"{place}/exact"
            more = {} if known or not case.quantization else {"quantization": case.quantization}
            systems = {
                name: Process(worker_command("serve", ours, model, case.threads, more | how), worker_environment())
                for name, how in OURS.items()
            }
            systems["llama.cpp"] = Process(worker_command("serve", theirs, file, case.threads), worker_environment())
            found = {
                "speed": measured(systems, case.rounds),
                "starts": starts(model, case.runs, Path(place), str(file)),
            }
            told = (in_process(reference, f"{place}/exact", f"{place}/exact.npy"), f"{place}/exact.npy")
            found["divergence"] = {
                "graphllm": in_process(our_divergence, model, *told, more),
                "llama.cpp": in_process(their_divergence, file, *told),
                "tokens": len(told[0]),
            }
        rows[file.stem] = found
        yield rows


def measured(systems: dict[str, Process], rounds: int) -> dict[str, Any]:
    """Medians of turns, and graphllm's speed by llama.cpp's."""
    speed: dict[str, dict[str, Any]] = {name: {} for name in systems}
    with contextlib.ExitStack() as stack:
        for name, system in systems.items():
            stack.enter_context(system).started()
            for what in SPEEDS:
                system.ask({"case": what.name, "seed": f"{name} warm"})

        def figure(what: Speed, name: str) -> float:
            return float(systems[name].ask({"case": what.name, "seed": f"{random.random()}"}))

        for what in SPEEDS:
            for name, figures in in_turn(rounds, systems, partial(figure, what), order="random").items():
                speed[name][what.name] = round(statistics.median(figures), 1)
    over = {
        f"{name} over llama.cpp": {
            what.name: round(speed[name][what.name] / speed["llama.cpp"][what.name], 2) for what in SPEEDS
        }
        for name in OURS
    }
    return {**speed, **over}


def architecture(file: Path) -> str:
    """As the file says."""
    import gguf

    field = gguf.GGUFReader(file).get_field("general.architecture")
    if field is None:
        raise ValueError(f"{file}: no general.architecture")
    return str(field.contents())


def exact(file: str, folder: str) -> None:
    """The file's weights in float32 as a checkpoint of transformers, with its tokenizer."""
    import torch
    from safetensors.torch import save_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    given = Path(file)
    model = AutoModelForCausalLM.from_pretrained(given.parent, gguf_file=given.name, dtype=torch.float32)
    AutoTokenizer.from_pretrained(given.parent, gguf_file=given.name).save_pretrained(folder)
    save_model(model, f"{folder}/model.safetensors", metadata={"format": "pt"})
    del model.config.quantization_config  # the weights are exact now
    model.config.save_pretrained(folder)


def reference(folder: str, to: str) -> list[int]:
    """Tokens of the text; writes the logarithms of the exact probabilities after each."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids: list[int] = AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        np.save(to, torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1).float().numpy())
    return ids


def apart(logits: Any, exact: str) -> float:
    """Mean KL divergence from the exact probabilities, of logits [tokens, vocabulary]."""
    import numpy as np
    import torch

    known = np.load(exact).astype(np.float64)
    found = torch.log_softmax(torch.tensor(np.asarray(logits)).double(), -1).numpy()
    assert found.shape == known.shape, f"{found.shape} logits, {known.shape} exact ones"
    assert (found.argmax(-1) == known.argmax(-1)).mean() > 0.5, "the work is not real: other tokens are likely"
    return float((np.exp(known) * (known - found)).sum(-1).mean())


def our_divergence(model: str, ids: list[int], exact: str, more: dict[str, Any]) -> float:
    """By a function that sees the logits after every token of a prompt."""
    from graphllm import LLM, SamplingParams

    seen: list[Any] = []

    def look(logits: Any, rows: Any) -> None:
        seen.extend(logits.float().numpy().copy())

    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
    with LLM(model, target="cpu", max_model_len=_MAX_LEN, logits_processors=[look], **more) as llm:
        llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    return apart(seen, exact)


def their_divergence(file: str, ids: list[int], exact: str) -> float:
    """Of llama.cpp."""
    return apart(llama(file, CPUS).logits(ids), exact)


def ours(commands: Commands, model: str, threads: int, more: dict[str, Any]) -> None:
    """graphllm's process."""
    from bench.cpu.peers.ours import InLlm

    sizes = {"max_model_len": _MAX_LEN, "max_num_seqs": _BATCH, "max_num_batched_tokens": _MAX_LEN}
    workload = Workload(Path(model), Path(model), {}, threads, _MAX_LEN, _BATCH)
    answer(commands, InLlm(workload, None, optimize="first", **sizes, **more))


def theirs(commands: Commands, file: str, threads: int) -> None:
    """llama.cpp's process."""
    answer(commands, llama(file, threads))


def llama(file: str, threads: int) -> Any:
    """The model in llama.cpp."""
    import gguf

    from bench.cpu.peers.llama_cpp import Loaded

    shapes = {tensor.name: tensor.shape for tensor in gguf.GGUFReader(file).tensors}
    config = {"vocab_size": int(shapes["token_embd.weight"][1])}
    return Loaded(Path(file), Workload(Path(file), Path(file), config, threads, _MAX_LEN, _BATCH))


def answer(commands: Commands, runner: Runner) -> None:
    """Each command with tokens/s."""
    commands.answer({})
    for command in commands:
        what = next(one for one in SPEEDS if one.name == command["case"])
        prompts = make_prompts(what, _IDS, command["seed"])
        begun = time.perf_counter()
        commands.answer(what.rate(begun, runner.run(prompts, what.generated)))
    runner.close()
    commands.answer({})
