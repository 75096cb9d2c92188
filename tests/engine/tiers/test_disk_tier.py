"""The tier on disk: what a core has written is found by later ones, through a host memory that is too small for it;
texts are those of a core without tiers, whatever becomes of the files."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from graphllm.config import ConfigError, TierConfig
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.engine.core import EngineCore
from graphllm.engine.parts.tiers import Tiers
from graphllm.engine.requests.request import TierStats
from graphllm.engine.tiers.disk_tier import DiskTier
from graphllm.program.artifact import Artifact
from graphllm.runtime.commands.command import Answered, Command, Query
from graphllm.runtime.commands.files import (
    AskFiles,
    ClearFiles,
    CloseFiles,
    FileNews,
    OpenFiles,
    ReadFiles,
    WriteFiles,
)
from graphllm.runtime.tiers.files.file_format import file_bytes
from tests.engine.harness import finish, open_core, request
from tests.engine.tiers.test_tiers_engine import conversations, run
from tests.runtime.tiers.stores import Clock, until
from tests.tiers import draws

_TALKS = conversations(1, 8, 2)


@pytest.fixture(scope="module")
def expected(checkpoint: Path, eager_artifact: Path) -> list[list[int]]:
    """Texts without tiers."""
    core = open_core(checkpoint, eager_artifact, 400)
    found, _ = run(core, _TALKS)
    core.close()
    return found


@pytest.fixture
def core_on(checkpoint: Path, eager_artifact: Path, tmp_path: Path) -> Any:
    """Opens a core with few blocks, little host memory and a folder. entries: of host memory."""

    def opened(pages: int = 16, entries: int = 24, size: int | None = None, **options: Any) -> EngineCore:
        block = Artifact.open(eager_artifact).memory.block
        return open_core(
            checkpoint, eager_artifact, pages, tiers=TierConfig(entries * block, "lru", str(tmp_path), size), **options
        )

    return opened


def _disk(core: EngineCore) -> TierStats:
    return core.stats().tiers["disk"]


def _found(core: EngineCore) -> None:
    """Have the core know the files of those before it: they are looked for in a thread."""
    for number in range(2000):
        if _disk(core).used_bytes:
            return
        finish(core, [request(f"again-{number}", [1, 2, 3])])
    raise AssertionError("no file was found")


def _written(core: EngineCore) -> None:
    """Have the core write what waits."""
    disk = core.part(Tiers)
    until(lambda: not list(disk.gather(idle=False)) and not any(pool.host.pinned for pool in disk.pools.values()))


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*/blocks-0of1/*/*/*") if path.is_file()]


def test_texts_across_restarts(core_on: Any, expected: list[list[int]], tmp_path: Path) -> None:
    """The second core gets from the disk what the first one has computed."""
    core = core_on()
    assert run(core, _TALKS)[0] == expected
    core.close()
    assert _disk(core).stored_bytes > 0
    assert len(_files(tmp_path)) > 24
    core = core_on()
    _found(core)
    before = _disk(core).hit_tokens
    found, cached = run(core, _TALKS)
    assert found == expected
    prompts = sum(len(new) for talk in _TALKS for new in talk)
    assert cached > prompts / 2
    assert _disk(core).hit_tokens - before >= 0
    assert _disk(core).copied_bytes > 0
    core.close()


def test_a_beginning_larger_than_host_memory_comes_in_parts(core_on: Any) -> None:
    prompt = list(range(1, 91))
    core = core_on(pages=40, entries=40)
    wanted = finish(core, [request("first", prompt)])["first"].tokens
    core.close()
    core = core_on(pages=40, entries=4)
    _found(core)
    found = finish(core, [request("again", prompt)])["again"]
    assert (found.tokens, found.cached) == (wanted, 88)
    core.close()


def test_what_is_fetched_waits_for_blocks(core_on: Any) -> None:
    """More requests wait than host memory has room for, and the device for one at a time."""
    prompts = {f"{number}": [10 + number, *range(1, 60)] for number in range(6)}
    core = core_on(pages=100, entries=100)
    wanted = {id: finish(core, [request(id, prompt)])[id].tokens for id, prompt in prompts.items()}
    core.close()
    core = core_on(pages=13, entries=12)
    _found(core)
    found = finish(core, [request(id, prompt) for id, prompt in prompts.items()])
    assert {id: result.tokens for id, result in found.items()} == wanted
    assert sum(result.cached > 0 for result in found.values()) >= 2
    core.close()


def test_what_is_used_on_the_device_stays_on_the_disk(core_on: Any, eager_artifact: Path) -> None:
    """The beginning of a conversation is found on the device, while files of others fill the folder. The next core
    finds it among the newest files."""
    talk = list(range(1, 60))
    short = SamplingParams(temperature=0.0, max_tokens=1)
    size = 40 * file_bytes(Artifact.open(eager_artifact).memory.block)
    core = core_on(pages=400, entries=400, size=size)
    for number in range(10):
        finish(core, [request(f"talk-{number}", [*talk, 60 + number], short)])
        finish(core, [request(f"other-{number}", [60 + number, *range(60)], short)])
        _written(core)
    core.close()
    core = core_on(pages=400, entries=400, size=size)
    _found(core)
    assert finish(core, [request("again", [*talk, 90], short)])["again"].cached == 56
    core.close()


def test_damaged_files_are_computed_again(
    core_on: Any, expected: list[list[int]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    core = core_on()
    run(core, _TALKS)
    core.close()
    draw, files = random.Random(3), sorted(_files(tmp_path))
    for file in draw.sample(files, min(len(files), draws(40, 200))):
        whole = bytearray(file.read_bytes())
        whole[draw.choice([draw.randrange(100), draw.randrange(4096, len(whole))])] ^= 1 << draw.randrange(8)
        file.write_bytes(draw.choice([whole, whole[: draw.randrange(len(whole))], bytes(len(whole))]))
    core = core_on()
    finish(core, [request("first", [1, 2, 3])])
    assert run(core, _TALKS)[0] == expected
    assert _disk(core).damaged_files > 0
    core.close()
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len([line for line in warnings if "is damaged" in line]) <= 1
    assert [line for line in warnings if "Traceback" in line] == []


def test_a_folder_that_takes_nothing(
    core_on: Any, expected: list[list[int]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    core_on().close()
    (store,) = tmp_path.glob("*/blocks-0of1")
    for below in [*store.glob("*"), store]:
        below.rmdir()
    store.write_text("in the way")
    core = core_on()
    assert run(core, _TALKS)[0] == expected
    assert _disk(core).used_bytes == 0
    core.close()
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "blocks cannot be written" in line


def test_nothing_is_found_after_a_reset(
    checkpoint: Path, eager_artifact: Path, core_on: Any, expected: list[list[int]], tmp_path: Path
) -> None:
    plain = open_core(checkpoint, eager_artifact, 400)
    _, in_one_run = run(plain, _TALKS)
    plain.close()
    core = core_on(pages=400, entries=400)
    run(core, _TALKS)
    _found(core)
    assert core.reset_prefix_cache()
    assert run(core, _TALKS) == (expected, in_one_run)
    assert core.reset_prefix_cache()
    until(lambda: not _files(tmp_path))
    assert _disk(core).hit_tokens == 0
    core.close()


def test_other_settings_and_secrets(core_on: Any, tmp_path: Path) -> None:
    core_on(cache_secret="mine").close()
    core_on(cache_secret="mine").close()
    with pytest.raises(ConfigError, match=r"cache_secret: the files in .* were made with another one"):
        core_on()
    with pytest.raises(ConfigError, match="kv_offloading_disk_size is 10: the smallest number of files takes"):
        core_on(cache_secret="mine", size=10)


class Ranks:
    """Two ranks whose files are what a test says."""

    def __init__(self) -> None:
        self.commands = list[Command]()
        self.used = list[dict[str, list[bytes]]]()
        self.news = [FileNews({}, [], [], True, 0, 0, 0) for _ in range(2)]

    def do(self, command: Command) -> None:
        self.commands.append(command)

    def ask(self, query: Query) -> list[Answered]:
        assert isinstance(query, AskFiles)
        self.used.append(query.used)
        news, self.news = self.news, [FileNews({}, [], [], True, 0, 0, 0) for _ in range(2)]
        return [Answered(msgspec.to_builtins(each, builtin_types=(bytes,))) for each in news]

    def take(self) -> list[Command]:
        """The commands since this was last asked."""
        found, self.commands = self.commands, []
        return found


def _key(number: int, group: int = 0) -> tuple[int, bytes]:
    return group, number.to_bytes(32, "big")


def _tier(ranks: Ranks, clock: Clock, entries: int = 100) -> DiskTier:
    return DiskTier(ranks, "/folder", 10**9, {"blocks": [3000, 1000]}, {"blocks": entries}, clock)


def test_a_rank_without_attention_has_files_too() -> None:
    """Of a pipeline, one stage may have only recurrent layers: its blocks have no bytes, and as many files."""
    ranks = Ranks()
    DiskTier(ranks, "/folder", 10**9, {"blocks": [0, 4096]}, {"blocks": 10}, Clock())
    (command,) = ranks.take()
    assert isinstance(command, OpenFiles)
    assert command.shares["blocks"] == [pytest.approx(1 / 3), pytest.approx(2 / 3)]


def test_a_disk_that_hangs_has_nothing(caplog: pytest.LogCaptureFixture) -> None:
    ranks, clock = Ranks(), Clock()
    tier = _tier(ranks, clock)
    ranks.news = [FileNews({}, [_key(1)[1] + (1).to_bytes(2, "big")], [], True, 0, 0, 0) for _ in range(2)]
    tier.fetched()
    assert tier.has(_key(1))
    tier.fetch([(_key(1), 1)])
    ranks.news = [FileNews({}, [], [], True, 0, 0, 0) for _ in range(2)]
    clock.now += 31
    for _ in range(2):
        assert tier.fetched() == []
        assert not tier.has(_key(1))
    assert caplog.text.count("a file is being read for more than 30 s") == 1
    ranks.news = [FileNews({1: [True]}, [], [], True, 0, 0, 0) for _ in range(2)]
    assert [end.keys for end in tier.fetched()] == [{_key(1): True}]
    assert tier.has(_key(1))


def test_a_key_is_there_when_all_ranks_have_it() -> None:
    ranks, clock = Ranks(), Clock()
    tier = _tier(ranks, clock)
    (command,) = ranks.take()
    assert command == OpenFiles("/folder", 10**9, {"blocks": [0.5, 0.5]}, {"blocks": 50})
    tier.fetched()
    assert list(tier.offer([(_key(1), 7), (_key(1, group=3), 8)])) == [_key(1), _key(1, group=3)]
    (write,) = ranks.take()
    assert isinstance(write, WriteFiles)
    (first, entry), (second, _) = write.entries
    assert (entry, write.kind, first == second) == (7, "blocks", False)
    assert (tier.has(_key(1)), tier.busy, list(tier.offer([(_key(1), 7)]))) == (False, False, [])
    ranks.news[0] = FileNews({write.ticket: [True, True]}, [first, second], [], True, 10, 20, 30)
    clock.now += 0.1
    tier.fetched()
    assert (tier.has(_key(1)), list(tier.written())) == (False, [])
    ranks.news[1] = FileNews({write.ticket: [True, False]}, [first], [], True, 1, 2, 3)
    clock.now += 0.1
    tier.fetched()
    assert [tier.has(_key(1)), tier.has(_key(1, group=3))] == [True, False]
    assert list(tier.written()) == [_key(1), _key(1, group=3)]
    stats = tier.stats()
    assert (stats.used_bytes, stats.total_bytes, stats.stored_bytes) == (1, 2, 3)
    assert list(tier.offer([(_key(1), 7)])) == []  # it is there, and was used
    clock.now += 10
    ranks.news[0] = FileNews({}, [], [first], True, 0, 0, 0)
    tier.fetched()
    assert ranks.used[-1] == {"blocks": [first]}
    assert not tier.has(_key(1))


def test_a_fetch_ends_when_all_ranks_have_ended() -> None:
    ranks, clock = Ranks(), Clock()
    tier = _tier(ranks, clock)
    ranks.take()
    tier.fetch([(_key(1), 5), (_key(2), 6)])
    (read,) = ranks.take()
    assert isinstance(read, ReadFiles)
    assert [entry for _, entry in read.entries] == [5, 6]
    assert tier.busy
    ranks.news[1] = FileNews({read.ticket: [True, True]}, [], [], True, 0, 0, 0)
    assert list(tier.fetched()) == []
    clock.now += 2
    ranks.news[0] = FileNews({read.ticket: [True, False]}, [], [], True, 0, 0, 0)
    assert list(tier.fetched()) == [({_key(1): True, _key(2): False}, 2.0)]
    assert not tier.busy


def test_no_more_waits_to_be_written_than_half_of_host_memory() -> None:
    ranks, clock = Ranks(), Clock()
    tier = _tier(ranks, clock, entries=80)
    ranks.take()
    taken = tier.offer([(_key(number), number) for number in range(100)])
    assert list(taken) == [_key(number) for number in range(40)]
    writes = [command for command in ranks.take() if isinstance(command, WriteFiles)]
    assert [len(write.entries) for write in writes] == [32, 8]
    ranks.news = [FileNews({writes[0].ticket: [False] * 32}, [], [], True, 0, 0, 0) for _ in range(2)]
    clock.now += 0.1
    tier.fetched()
    assert len(tier.offer([(_key(number), number) for number in range(100)])) == 32


def test_ranks_are_seldom_asked_where_nothing_runs() -> None:
    ranks, clock = Ranks(), Clock()
    tier = _tier(ranks, clock)
    for _ in range(1000):
        tier.fetched()
        clock.now += 0.001
    assert len(ranks.used) == 2
    tier.offer([(_key(1), 1)])  # nobody waits for a write
    for _ in range(1000):
        tier.fetched()
        clock.now += 0.001
    assert len(ranks.used) < 60
    tier.fetch([(_key(2), 2)])
    before = len(ranks.used)
    for _ in range(10):
        tier.fetched()
    assert len(ranks.used) == before + 10


def test_what_is_forgotten() -> None:
    ranks, clock = Ranks(), Clock()
    tier = _tier(ranks, clock)
    file_key = _key(1)[1] + (1).to_bytes(2, "big")
    ranks.news = [FileNews({}, [file_key], [], True, 0, 0, 0) for _ in range(2)]
    tier.fetched()
    assert tier.has(_key(1))
    ranks.take()
    tier.reset()
    tier.close()
    assert not tier.has(_key(1))
    assert [type(command) for command in ranks.take()] == [ClearFiles, CloseFiles]
