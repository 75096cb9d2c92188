"""Two engine cores of one host: one computes prompts, the other goes on with them, and texts are those of one core."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from graphllm.config import ConfigError
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.embedded import HYBRID_DIR
from graphllm.engine.core import EngineCore
from graphllm.engine.parts.tiers import Tiers
from tests.artifacts import artifact_of
from tests.engine.harness import finish, open_core, request
from tests.engine.transfer import late_connector
from tests.engine.transfer.engines import asking, cached_tokens, prefilled, transfer
from tests.tiers import both_tiers, thorough

PROMPT = [(7 * i) % 89 + 1 for i in range(45)]
OTHERS = [[(i * k) % 83 + 1 for i in range(40)] for k in (3, 5, 11)]
BLOCKS_OF_PROMPT = 40  # tokens: the last one is always computed, and blocks have 8

Open = Callable[..., EngineCore]


@pytest.fixture
def opened(checkpoint: Path, eager_artifact: Path, tmp_path: Path) -> Iterator[Open]:
    """opened(role, **more): a core that meets the others."""
    cores = list[EngineCore]()

    def start(role: str, pages: int = 49, size: int = 4 << 20, secret: str | None = None, **more: Any) -> EngineCore:
        config = transfer(tmp_path, role, size, **more)
        cores.append(open_core(checkpoint, eager_artifact, pages, tiers=config, cache_secret=secret))
        return cores[-1]

    yield start
    for core in cores:
        if core not in closed:
            core.close()
    closed.clear()


closed = list[EngineCore]()


@pytest.fixture(scope="module")
def expected(checkpoint: Path, eager_artifact: Path) -> Iterator[Callable[[list[int]], list[int]]]:
    """expected(prompt): what a core of its own says."""
    core = open_core(checkpoint, eager_artifact)
    known = dict[tuple[int, ...], list[int]]()

    def of(prompt: list[int]) -> list[int]:
        if tuple(prompt) not in known:
            known[tuple(prompt)] = finish(core, [request("alone", prompt, asking(6))])["alone"].tokens
        return known[tuple(prompt)]

    yield of
    core.close()


Expected = Callable[[list[int]], list[int]]


def test_a_prompt_travels(opened: Open, expected: Expected) -> None:
    first, second = opened("kv_producer"), opened("kv_consumer")
    params = prefilled(first, "p", PROMPT)
    assert params["do_remote_prefill"] is True
    assert params["do_remote_decode"] is False
    found = finish(second, [request("d", PROMPT, asking(6, **params))])["d"]
    assert found.tokens == expected(PROMPT)
    assert found.cached == BLOCKS_OF_PROMPT
    assert cached_tokens(second) == BLOCKS_OF_PROMPT
    assert (
        finish(second, [request("again", PROMPT, asking(1))])["again"].cached == BLOCKS_OF_PROMPT
    )  # it is its own now


@pytest.mark.thorough
def test_many_at_a_time_with_common_beginnings(opened: Open, expected: Expected) -> None:
    """Each engine does both, and has some of the blocks already."""
    first, second = opened("kv_both", engine_id="one"), opened("kv_both", engine_id="two")
    prompts = [
        PROMPT[:keep] + other[: 44 - keep] for keep, other in zip((0, 13, 24, 40), [*OTHERS, PROMPT], strict=True)
    ]
    finish(second, [request("own", PROMPT[:20])])
    for there, back, begun in ((first, second, "p"), (second, first, "q")):
        given = [prefilled(there, f"{begun}{i}", prompt) for i, prompt in enumerate(prompts)]
        wanted = [
            request(f"d{begun}{i}", prompt, asking(6, **params))
            for i, (prompt, params) in enumerate(zip(prompts, given, strict=True))
        ]
        for result, prompt in zip(finish(back, wanted).values(), prompts, strict=True):
            assert result.tokens == expected(prompt)
            assert result.cached >= (len(prompt) - 1) // 8 * 8


def test_what_the_producer_has_only_on_its_device_travels(opened: Open, expected: Expected) -> None:
    """An engine for both copies nothing ahead: what is wanted is copied when a request ends."""
    first, second = opened("kv_both"), opened("kv_consumer")
    finish(first, [request("own", PROMPT)])
    assert first.stats().tiers["host"].stored_bytes == 0
    params = prefilled(first, "p", PROMPT)
    found = finish(second, [request("d", PROMPT, asking(6, **params))])["d"]
    assert (found.tokens, found.cached) == (expected(PROMPT), BLOCKS_OF_PROMPT)


def test_recurrent_states_travel(tmp_path: Path) -> None:
    place = artifact_of(HYBRID_DIR, backend="eager", max_model_len=256, max_num_seqs=4, max_num_batched_tokens=64)
    prompt = [(13 * i) % 800 + 5 for i in range(150)]
    alone = open_core(HYBRID_DIR, place, 40, snapshots=8)
    tokens = finish(alone, [request("a", prompt, asking(6))])["a"].tokens
    first, second = (
        open_core(HYBRID_DIR, place, 40, snapshots=8, tiers=transfer(tmp_path, role))
        for role in ("kv_producer", "kv_both")
    )
    params = prefilled(first, "p", prompt)
    found = finish(second, [request("d", prompt, asking(6, **params))])["d"]
    assert found.tokens == tokens
    boundary = alone.scheduler.cache.boundary
    assert found.cached == (len(prompt) - 1) // boundary * boundary > 0
    for core in (alone, first, second):
        core.close()


def test_a_producer_that_ends_at_any_moment(opened: Open, expected: Expected) -> None:
    second = opened("kv_consumer")
    seen = set[int]()
    for moment in (0, 1, 2, 3, 4) if both_tiers() else (0, 2):
        second.reset_prefix_cache()
        first = opened("kv_producer", engine_id=f"ends-{moment}")
        params = prefilled(first, "p", PROMPT)

        def end(step: int, moment: int = moment, first: EngineCore = first) -> None:
            if step == moment:
                first.close()
                closed.append(first)

        found = finish(second, [request(f"d{moment}", PROMPT, asking(6, **params))], end)[f"d{moment}"]
        assert found.tokens == expected(PROMPT)
        seen.add(found.cached)
    assert 0 in seen  # it has ended before anything could be copied


def test_memory_that_gets_another_use_before_it_is_copied(opened: Open, expected: Expected) -> None:
    """The producer has room for eight blocks and keeps none: after the consumer has found blocks, others are written in
    their place. What is copied then is thrown away."""
    first = opened("kv_producer", size=8 * 4096, extra={"keep_seconds": 1e-6})
    late = {"kv_connector": "LateConnector", "kv_connector_module_path": late_connector.__name__}
    second = opened("kv_consumer", **late)
    params = prefilled(first, "p", PROMPT)

    def disturb(step: int) -> None:
        if late_connector.BEGUN.is_set() and not late_connector.GO.is_set():
            finish(first, [request(f"o{i}", other, asking(1)) for i, other in enumerate(OTHERS)])
            late_connector.GO.set()

    found = finish(second, [request("d", PROMPT, asking(6, **params))], disturb)["d"]
    assert late_connector.GO.is_set()
    assert found.tokens == expected(PROMPT)
    assert found.cached < BLOCKS_OF_PROMPT


def test_blocks_are_kept_until_they_are_fetched(opened: Open, expected: Expected) -> None:
    """Room for eight blocks: five of them are kept, whatever comes in between; after the fetch they are not."""
    first, second = opened("kv_producer", size=8 * 4096), opened("kv_consumer")
    params = prefilled(first, "p", PROMPT)
    finish(first, [request(f"o{i}", other, asking(1)) for i, other in enumerate(OTHERS)])
    pinned = first.part(Tiers).pools["blocks"].host
    assert pinned.pinned == 5
    found = finish(second, [request("d", PROMPT, asking(6, **params))])["d"]
    assert (found.tokens, found.cached) == (expected(PROMPT), BLOCKS_OF_PROMPT)
    finish(first, [request(f"p{i}", other, asking(1)) for i, other in enumerate(OTHERS)])
    assert pinned.pinned == 0


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"remote_engine_id": "../../etc/passwd"}, "is not there"),
        thorough({"remote_engine_id": "nobody"}, "engine 'nobody' is not there"),
        thorough({}, "engine 'None' is not there"),
        ({"remote_engine_id": "there", "remote_request_id": "unknown"}, "has none of its blocks any more"),
    ],
)
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_contents_that_nobody_has(
    opened: Open, expected: Expected, caplog: pytest.LogCaptureFixture, params: dict[str, Any], says: str, policy: str
) -> None:
    opened("kv_producer", engine_id="there")
    second = opened("kv_consumer", kv_load_failure_policy=policy)
    with caplog.at_level(logging.WARNING):
        wanted = asking(6, do_remote_prefill=True, **params)
        found = finish(second, [request("d", PROMPT, wanted), request("other", OTHERS[0], asking(6))])
    assert says in caplog.text
    assert found["other"].tokens == expected(OTHERS[0])
    if policy == "recompute":
        assert found["d"].tokens == expected(PROMPT)
    else:
        assert found["d"].finish_reason == "error"
        assert says in (found["d"].error or "")


def test_another_secret_is_refused(opened: Open, expected: Expected, caplog: pytest.LogCaptureFixture) -> None:
    first, second = opened("kv_producer", secret="a"), opened("kv_consumer", secret="b")
    params = prefilled(first, "p", PROMPT)
    found = finish(second, [request("d", PROMPT, asking(6, **params))])["d"]
    assert (found.tokens, found.cached) == (expected(PROMPT), 0)
    assert "it has another cache_secret; give the same to both" in caplog.text


def test_another_model_is_refused(
    opened: Open, expected: Expected, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    place = artifact_of(HYBRID_DIR, backend="eager", max_model_len=256, max_num_seqs=4, max_num_batched_tokens=64)
    other = open_core(HYBRID_DIR, place, 40, snapshots=8, tiers=transfer(tmp_path, "kv_producer"))
    params = prefilled(other, "p", PROMPT)
    found = finish(opened("kv_consumer"), [request("d", PROMPT, asking(6, **params))])["d"]
    assert (found.tokens, found.cached) == (expected(PROMPT), 0)
    assert "it runs another model" in caplog.text
    other.close()


def test_an_engine_that_asks_others_by_itself(opened: Open, expected: Expected) -> None:
    """As the cores of one server do: the conversation is at one of them, the next turn at the other."""
    extra = {"ask_others": True}
    opened("kv_producer")  # which has nothing
    first, second = (opened("kv_both", extra=extra, engine_id="core") for _ in range(2))
    params = prefilled(first, "p", PROMPT)
    assert params["remote_engine_id"] == "core"
    found = finish(second, [request("turn", PROMPT, asking(6))])["turn"]
    assert (found.tokens, found.cached) == (expected(PROMPT), BLOCKS_OF_PROMPT)


def test_settings_that_cannot_be(opened: Open, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    for extra, says in (
        ({"folder": str(tmp_path / "open")}, "others than this user may enter it"),
        ({"folder": str(tmp_path / "file" / "x")}, "cannot be used"),
        ({"port": 3}, "port in kv_connector_extra_config is 3: HostConnector has folder, keep_seconds, ask_others"),
        ({"keep_seconds": 0}, "keep_seconds in kv_connector_extra_config is 0: give a number of seconds"),
    ):
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigError, match=says):
            opened("kv_both", extra=extra)


def test_an_engine_that_was_killed_leaves_nothing_behind(opened: Open, tmp_path: Path) -> None:
    """Its socket is removed by the next engine."""
    import socket

    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "dead.sock"))
    core = opened("kv_producer", engine_id="dead")
    assert prefilled(core, "p", PROMPT)["remote_engine_id"] == "dead"


def test_prompts_of_several_requests_do_not_fill_host_memory(opened: Open) -> None:
    """Room for twenty blocks: of four requests with five each that nobody fetches, the oldest are let go."""
    core = opened("kv_producer", size=20 * 4096)
    for i, prompt in enumerate([PROMPT, *OTHERS]):
        prefilled(core, f"p{i}", [*prompt, *PROMPT][:45])
    finish(core, [request("more", PROMPT[:3], asking(1))])
    assert core.part(Tiers).pools["blocks"].host.pinned == 10


def test_completions_of_one_prompt_share_what_comes(opened: Open, expected: Expected) -> None:
    first, second = opened("kv_producer"), opened("kv_consumer", kv_load_failure_policy="fail")
    params = prefilled(first, "p", PROMPT)
    wanted = [request(f"d{i}", PROMPT, asking(6, **params), fork_of="d0" if i else "") for i in range(3)]
    for result in finish(second, wanted).values():
        assert result.error is None
        assert result.tokens == expected(PROMPT)


def test_a_preempted_request_asks_once(opened: Open, expected: Expected) -> None:
    """The consumer has so few blocks that one of three requests has to go and come again."""
    prompts = [PROMPT, *([*other, *PROMPT][:45] for other in OTHERS[:2])]
    first = opened("kv_producer")
    second = opened("kv_consumer", pages=15, kv_load_failure_policy="fail")
    given = [prefilled(first, f"p{i}", prompt) for i, prompt in enumerate(prompts)]
    wanted = [request(f"d{i}", p, asking(40, **g)) for i, (p, g) in enumerate(zip(prompts, given, strict=True))]
    found = finish(second, wanted)
    assert second.stats().preemptions > 0
    for result, prompt in zip(found.values(), prompts, strict=True):
        assert result.error is None
        assert result.tokens[:6] == expected(prompt)


def test_params_that_are_no_object(opened: Open) -> None:
    core = opened("kv_consumer")
    wrong = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": 3})
    with pytest.raises(ConfigError, match="kv_transfer_params is 3: give an object"):
        core.add(request("d", PROMPT, wrong))


@pytest.mark.thorough
def test_greedy_is_not_needed(opened: Open, checkpoint: Path, eager_artifact: Path) -> None:
    """Sampled tokens depend on the seed only, also where the first ones of the prompt came from elsewhere."""
    params = {"temperature": 0.9, "seed": 4, "max_tokens": 16, "ignore_eos": True}
    alone = open_core(checkpoint, eager_artifact)
    tokens = finish(alone, [request("a", PROMPT, SamplingParams(**params))])["a"].tokens
    alone.close()
    first, second = opened("kv_producer"), opened("kv_consumer")
    given = prefilled(first, "p", PROMPT)
    sampled = SamplingParams(**params, extra_args={"kv_transfer_params": given})
    assert finish(second, [request("d", PROMPT, sampled)])["d"].tokens == tokens
