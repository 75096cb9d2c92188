"""A real engine with a tiny model, real sockets, and a subscriber that counts what a prompt would find."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.engine.parts.snapshots import Snapshots
from tests.artifacts import LIMITS, ON, artifact_of
from tests.engine.events.wire import DECODE, AllBlocksCleared, BlockRemoved, BlockStored, Message, receive, subscribe
from tests.engine.harness import finish, open_core, request
from tests.waiting import until

_PARAMS = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


def test_a_subscriber_knows_how_much_of_a_prompt_is_cached(device: str, checkpoint: Path) -> None:
    """Blocks come and go, as the pool has room for two of the three sequences that run."""
    place, size = artifact_of(checkpoint, **{**LIMITS, **ON[device]}), ON[device]["block_size"]
    config = {"enable_kv_cache_events": True, "endpoint": "tcp://*:0"}
    core = open_core(checkpoint, place, pages=1 + 2 * (96 // size), kv_events_config=config, cache_secret="s")
    live = subscribe(core.stats().kv_events["endpoint"])
    known = 0

    def heard() -> bool:
        nonlocal known
        known = core.stats().kv_event_batches
        core.reset_prefix_cache()
        return bool(live.poll(10))

    until(heard)
    while (message := Message.of(receive(live))).number < known:
        assert [type(e) for e in DECODE(message.payload).events] == [AllBlocksCleared]
    rng, number = random.Random(0), message.number
    beginnings = [[rng.randrange(5, 311) for _ in range(40)] for _ in range(3)]
    prompts = [b[: rng.randint(1, 40)] + [rng.randrange(5, 311) for _ in range(20)] for b in beginnings * 4]
    found: dict[tuple[int, ...], int] = {}  # by tokens up to the end of a block: its hash
    held: Counter[int] = Counter()
    prefix: dict[int, tuple[int, ...]] = {}
    for begin in range(0, len(prompts), 3):
        finish(core, [request(f"{begin + i}", p, _PARAMS) for i, p in enumerate(prompts[begin : begin + 3])])
        while number < core.stats().kv_event_batches - 1:
            message = Message.of(receive(live))
            number += 1
            assert message.number == number
            for event in DECODE(message.payload).events:
                if isinstance(event, BlockRemoved):
                    held.subtract(event.block_hashes)
                elif isinstance(event, BlockStored):
                    before = prefix[event.parent_block_hash] if event.parent_block_hash is not None else ()
                    for i, one in enumerate(event.block_hashes):
                        held[one] += 1
                        before = prefix[one] = before + tuple(event.token_ids[i * size : (i + 1) * size])
                        found[before] = one
        assert set(held.values()) <= {0, 1}
        for n, prompt in enumerate(prompts):
            blocks = 0
            while (blocks + 1) * size < len(prompt) and held[found.get(tuple(prompt[: (blocks + 1) * size]), -1)] > 0:
                blocks += 1
            assert len(core.part(Snapshots).export_cache(request(f"{n}", prompt, _PARAMS))) == blocks
    assert min(held.values()) == 0 < max(held.values())
    live.close()
    core.close()
