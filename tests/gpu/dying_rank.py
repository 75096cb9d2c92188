"""An engine of two ranks on GPUs, of which one is killed while requests run: `several_gpus.check_dying` starts this.

python dying_rank.py CHECKPOINT SETTINGS     in JSON

It says after how many seconds the engine knew, closes it, opens another one in the same process, and ends by itself.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path

from graphllm import LLM, SamplingParams
from graphllm.runtime.ranks.rank_failure import RankError

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.engine.ranks.test_ranks import pids_of


def main() -> None:
    faulthandler.dump_traceback_later(50, exit=True)
    settings = json.loads(sys.argv[2])
    with LLM(sys.argv[1], **settings) as llm:
        (pid,) = pids_of(llm)
        for number in range(settings["max_num_seqs"]):
            prompt = {"prompt_token_ids": [7 * i % 290 + number for i in range(3 + number % 8)]}
            llm.llm_engine.add_request(f"{number}", prompt, SamplingParams(max_tokens=60, ignore_eos=True))
        for _ in range(12):
            llm.llm_engine.step()
        os.kill(pid, signal.SIGKILL)
        begun = time.monotonic()
        try:
            while True:
                llm.llm_engine.step()
        except RankError as told:
            seconds = time.monotonic() - begun
            print(f"process {pid}: told after {seconds:.2f} s: {told}", flush=True)
        begun = time.monotonic()
    print(f"closed after {time.monotonic() - begun:.2f} s", flush=True)
    with LLM(sys.argv[1], **settings) as llm:
        prompt = {"prompt_token_ids": [5, 6, 7]}
        (answer,) = llm.generate(prompt, SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    print(f"another engine says {answer.outputs[0].token_ids}", flush=True)


if __name__ == "__main__":
    main()
