"""An engine for prompts in a process of its own: ``python -m tests.engine.transfer.producer SETTINGS``.

SETTINGS: of `LLM`, as JSON. Each line of stdin is a prompt, as a JSON list of tokens, and is answered with its
kv_transfer_params.
"""

from __future__ import annotations

import json
import sys

from graphllm import LLM
from tests.engine.transfer.engines import asking


def main() -> None:
    """Answer until stdin ends."""
    with LLM(**json.loads(sys.argv[1])) as llm:
        print("ready", flush=True)
        for line in sys.stdin:
            (output,) = llm.generate({"prompt_token_ids": json.loads(line)}, asking(1, do_remote_decode=True))
            print(json.dumps(output.kv_transfer_params), flush=True)


if __name__ == "__main__":
    main()
