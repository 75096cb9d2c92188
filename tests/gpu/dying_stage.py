"""An engine of two stages on GPUs, of which one is killed while requests run: `test_stages_cuda` starts this.

python dying_stage.py CHECKPOINT     it says after how many seconds the engine knew, and ends by itself
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from pathlib import Path

from graphllm import LLM, SamplingParams
from graphllm.runtime.rank_failure import RankError

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "engine")]
from test_ranks import pids_of  # noqa: E402
from test_stages_cuda import OPTIONS, PROMPTS  # noqa: E402


def main() -> None:
    faulthandler.dump_traceback_later(60, exit=True)
    with LLM(sys.argv[1], pipeline_parallel_size=2, **OPTIONS) as llm:
        (pid,) = pids_of(llm)
        for number, prompt in enumerate(PROMPTS * 5):
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


if __name__ == "__main__":
    main()
