"""Which core a request goes to."""

from __future__ import annotations

import random

from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.engine.process.placement import cpus_of, gpus_of
from graphllm.engine.process.routing import Router
from graphllm.engine.requests.request import Adapter, EngineRequest
from tests.engine.stub_core import info


def request(id: str, prompt: list[int], limit: int = 8, **changes: object) -> EngineRequest:
    plain = {"id": id, "prompt": prompt, "params": SamplingParams(), "stop_ids": [], "limit": limit, "seed": 0}
    return EngineRequest(**{**plain, **changes})  # type: ignore[arg-type]


def router(count: int = 2, prefix: bool = True, step: int = 2048) -> Router:
    """step: tokens of one."""
    made = Router(count, prefix)
    made.set_sizes(info(100, block_size=4, num_blocks=64, max_model_len=8192, max_num_batched_tokens=step))
    return made


def go(made: Router, id: str, prompt: list[int], **changes: object) -> int | None:
    return made.add([request(id, prompt, **changes)], [True] * len(made._cores))  # type: ignore[arg-type]


def test_unlike_requests_take_turns() -> None:
    made = router(3)
    chosen = [go(made, f"{i}", [i] * 8) for i in range(9)]
    assert sorted(chosen[:3]) == sorted(chosen[3:6]) == sorted(chosen[6:]) == [0, 1, 2]


def test_one_request_after_another_takes_turns() -> None:
    made, chosen = router(2), []
    for i in range(4):
        chosen.append(go(made, f"{i}", [i] * 8))
        made.ended(f"{i}")
    assert chosen in ([0, 1, 0, 1], [1, 0, 1, 0])


def test_a_prompt_that_is_not_computed_counts_as_what_it_fills_of_a_step() -> None:
    """Steps of 32 tokens: a prompt of 64 is two steps, until there is news of it."""
    made = router(2, prefix=False, step=32)
    long = go(made, "long", [1] * 64, limit=1)
    assert long is not None
    assert [go(made, f"{i}", [1], limit=1) for i in range(3)] == [1 - long] * 3
    made.began("long")
    assert go(made, "next", [1], limit=1) == long
    assert set(made.of(long)) == {"long", "next"}


def test_tokens_to_come_are_shared_as_well_as_requests() -> None:
    made = router(2, prefix=False)
    sizes = random.Random(0).choices(range(100, 1025), k=1000)
    owners = [made.add([request(f"{i}", [1], limit=size)], [True, True]) for i, size in enumerate(sizes)]
    by_core = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == core) for core in (0, 1)]
    assert abs(owners.count(0) - owners.count(1)) <= 4
    assert abs(by_core[0] - by_core[1]) < 2000, by_core  # in turns it would be 8,000 on average


def test_a_shared_beginning_prefers_its_core_until_that_has_clearly_more_to_do() -> None:
    made, prompt = router(2), list(range(40))
    home = go(made, "first", prompt)
    made.began("first")
    assert [go(made, f"{i}", [*prompt, i]) for i in range(2)] == [home, home]
    found = [go(made, f"more{i}", [*prompt, 50 + i]) for i in range(12)]
    assert 1 - home in found  # type: ignore[operator]
    # By then both know the beginning, so they share what comes.
    late = [go(made, f"late{i}", [*prompt, 80 + i]) for i in range(20)]
    assert abs(late.count(0) - late.count(1)) <= 2, (found, late)


def test_a_short_shared_beginning_of_a_long_prompt_changes_little() -> None:
    made = router(2)
    home = go(made, "first", [*range(4), *range(50, 90)])
    assert go(made, "second", [*range(4), *range(10, 50)]) != home


def test_a_prompt_is_another_one_with_another_salt_or_adapter() -> None:
    for changes in ({"cache_salt": "mine"}, {"adapter": Adapter("a", "/a", "digest")}):
        made, prompt = router(2), list(range(40))
        home = go(made, "first", prompt)
        made.ended("first")
        assert go(made, "plain", prompt) == home
        made.ended("plain")
        turns = set()
        for i in range(2):
            turns.add(go(made, f"{i}", prompt, **changes) if i == 0 else go(made, f"{i}", [99] * 8))
            made.ended(f"{i}")
        assert turns == {0, 1}, changes  # both are new, so they take turns


def test_an_adapter_prefers_the_core_that_has_run_it() -> None:
    made = router(2)
    a, b = Adapter("a", "/a", "digest-a"), Adapter("b", "/b", "digest-b")
    homes = [go(made, name, [n] * 8, adapter=adapter) for n, (name, adapter) in enumerate({"a": a, "b": b}.items())]
    assert sorted(homes) == [0, 1]  # type: ignore[type-var]
    for name in ("a", "b"):
        made.ended(name)
    for n in range(6):
        which = n % 2
        assert go(made, f"{n}", [40 + n] * 8, adapter=(a, b)[which]) == homes[which]
        made.ended(f"{n}")


def test_no_prefix_cache_no_preference() -> None:
    made, prompt = router(2, prefix=False), list(range(40))
    assert {go(made, f"{i}", prompt) for i in range(2)} == {0, 1}


def test_dead_cores_get_nothing() -> None:
    made = router(3)
    assert {made.add([request(f"{i}", [i])], [False, True, False]) for i in range(5)} == {1}
    assert made.add([request("none", [1])], [False] * 3) is None
    assert made.owner("none") is None


def test_others_load_counts() -> None:
    made = router(2)
    go(made, "own", [1])
    home = made.owner("own")
    assert home is not None
    own = made.load(home)
    made.reported(home, 6)  # one of these is ours
    assert made.load(home) == own + 5
    made.ended("own")
    assert made.load(home) == 5
    assert {go(made, f"{i}", [1]) for i in range(4)} == {1 - home}


def test_books_are_right_after_any_order_of_events() -> None:
    """Against a plain list of what is there."""
    rng = random.Random(0)
    made, live = router(3, prefix=False, step=32), {}  # id: [core, begun, tokens]
    for step in range(3000):
        kind = rng.random()
        if kind < 0.4 or not live:
            siblings = [
                request(f"{step}.{i}", [rng.randrange(5)] * 9, rng.randrange(50)) for i in range(rng.choice((1, 3)))
            ]
            core = made.add(siblings, [True] * 3)
            live |= {r.id: [core, False, 9 + r.limit] for r in siblings}
        elif kind < 0.6:
            id = rng.choice(list(live))
            made.began(id)
            live[id][1] = True
        elif kind < 0.99:
            id = rng.choice(list(live))
            made.ended(id)
            del live[id]
            made.ended(id)
            made.began(id)
        else:
            core = rng.randrange(3)
            made.replaced(core)
            live = {id: one for id, one in live.items() if one[0] != core}
        for core in range(3):
            own = [one for one in live.values() if one[0] == core]
            more = sum(0 if begun else 9 for _, begun, _ in own) / 32 + sum(size for _, _, size in own) / 8192
            assert made.load(core) == len(own) + more
            assert sorted(made.of(core)) == sorted(id for id, one in live.items() if one[0] == core)


def test_what_is_remembered_is_bounded() -> None:
    made = router(1)
    for i in range(200):
        made.add([request(f"{i}", list(range(i, i + 40)))], [True])
        made.ended(f"{i}")
    assert len(made._cores[0].blocks) == 64  # blocks of its cache


def test_devices_of_each_core(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [gpus_of(rank, 2) for rank in range(3)] == ["0,1", "2,3", "4,5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-abc,5,7")
    assert [gpus_of(rank, 1) for rank in range(4)] == ["3", "GPU-abc", "5", "7"]
    assert gpus_of(1, 2) == "5,7"
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3, 8, 9, 10})
    monkeypatch.setattr(
        "graphllm.engine.process.placement._place", lambda cpu: (0, cpu % 8, cpu)
    )  # 0 and 8 are one core
    assert [cpus_of(rank, 2) for rank in range(2)] == [[0, 1, 8], [2, 9, 10]]
    assert cpus_of(3, 9) == [0, 1, 2, 3, 8, 9, 10]
