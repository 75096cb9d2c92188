"""A GPU's memory that sleeps, over a driver that only writes down what it is asked for, with the host's memory under
the addresses. What a real driver does is for a machine with a GPU (tests/gpu)."""

from __future__ import annotations

import ctypes
import re
from typing import Any

import pytest
import torch

from graphllm.config import ConfigError
from graphllm.host.cuda_driver import CudaDriver, CudaError
from graphllm.runtime.cuda import virtual_memory
from graphllm.runtime.cuda.virtual_memory import AccessDesc, AllocationProp, Region, VirtualMemory
from graphllm.runtime.sleeping.cuda_memory import CudaSleepMemory
from graphllm.runtime.sleeping.rank_sleep import DROPPED, KEPT, RankSleep

UNIT = 1 << 16  # the driver's granularity
_PRIVATE, _ALL = 0x22, 3  # anonymous memory that is this process's own; reading and writing
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class FakeDriver(CudaDriver):
    """As a real one it refuses sizes that are no whole units, to map what is mapped, and to use what is not: that ends
    the process. Memory that is mapped holds rubbish.

    limit: bytes that there are. failing: calls by name, and which of them fails. calls: names of all calls.
    """

    def __init__(self, limit: int = 1 << 30) -> None:
        self.limit, self.failing, self.calls = limit, dict[str, int](), list[str]()
        self.reserved: dict[int, int] = {}
        self.handles: dict[int, int] = {}
        self.mapped: dict[int, tuple[int, int]] = {}  # bytes and handle, by address
        self.readable: set[int] = set()
        self.registered: dict[int, int] = {}
        self._next = 1

    @property
    def used(self) -> int:
        return sum(self.handles.values())

    def call(self, name: str, *arguments: Any) -> None:
        self.calls.append(name)
        if name in self.failing:
            self.failing[name] -= 1
            if self.failing[name] == 0:
                raise CudaError(f"{name} failed: made to (code 2)")
        given = [a.value if hasattr(a, "value") else a for a in arguments]
        handler = re.sub(r"(?<!^)([A-Z])", r"_\1", name.removeprefix("cu").removesuffix("_v2")).lower()
        getattr(self, handler)(*given)

    def device_get_attribute(self, out: Any, which: int, device: int) -> None:
        assert which == 110
        out._obj.value = 1

    def mem_get_allocation_granularity(self, out: Any, prop: Any, which: int) -> None:
        self._check(prop)
        out._obj.value = UNIT

    def _check(self, prop: Any) -> None:
        found: AllocationProp = prop._obj
        assert ctypes.sizeof(found) == 32
        assert (found.type, found.location.type, found.location.id, found.flags.rdma) == (1, 1, 0, 1)

    def mem_address_reserve(self, out: Any, size: int, align: int, wanted: int, flags: int) -> None:
        assert size
        assert size % UNIT == 0
        place = _LIBC.mmap(None, size, 0, _PRIVATE, -1, 0)
        out._obj.value = place
        self.reserved[place] = size

    def mem_address_free(self, place: int, size: int) -> None:
        assert self.reserved.pop(place) == size
        assert not any(place <= at < place + size for at in self.mapped)

    def mem_create(self, out: Any, size: int, prop: Any, flags: int) -> None:
        self._check(prop)
        assert size % UNIT == 0
        if self.used + size > self.limit:
            raise CudaError("cuMemCreate failed: out of memory (code 2)")
        out._obj.value, self.handles[self._next] = self._next, size
        self._next += 1

    def mem_release(self, handle: int) -> None:
        assert handle not in [h for _, h in self.mapped.values()], "released while it is mapped"
        del self.handles[handle]

    def mem_map(self, place: int, size: int, offset: int, handle: int, flags: int) -> None:
        assert any(at <= place and place + size <= at + n for at, n in self.reserved.items())
        assert place not in self.mapped
        assert self.handles[handle] == size
        self.mapped[place] = size, handle

    def mem_set_access(self, place: int, size: int, desc: Any, count: int) -> None:
        found: AccessDesc = desc._obj
        assert (found.location.type, found.location.id, found.flags, count) == (1, 0, 3, 1)
        assert self.mapped[place][0] == size
        assert _LIBC.mprotect(place, size, _ALL) == 0
        ctypes.memset(place, 0xA5, size)

    def mem_unmap(self, place: int, size: int) -> None:
        assert self.mapped.pop(place)[0] == size
        assert _LIBC.mprotect(place, size, 0) == 0

    def memset_d8(self, place: int, value: int, size: int) -> None:
        ctypes.memset(place, value, size)

    def memset_d8_async(self, place: int, value: int, size: int, stream: int) -> None:
        ctypes.memset(place, value, size)

    def ctx_synchronize(self) -> None:
        pass

    def stream_create(self, out: Any, flags: int) -> None:
        out._obj.value = 7

    def stream_synchronize(self, stream: int) -> None:
        assert stream == 7

    def mem_host_register(self, place: int, size: int, flags: int) -> None:
        self.registered[place] = size

    def mem_host_unregister(self, place: int) -> None:
        del self.registered[place]

    def memcpy_dto_h_async(self, to: int, source: int, size: int, stream: int) -> None:
        self._is_registered(to, size)
        ctypes.memmove(to, source, size)

    def memcpy_hto_d_async(self, to: int, source: int, size: int, stream: int) -> None:
        self._is_registered(source, size)
        ctypes.memmove(to, source, size)

    def _is_registered(self, place: int, size: int) -> None:
        assert any(at <= place and place + size <= at + n for at, n in self.registered.items())


class _OnHost(CudaSleepMemory):
    """Tensors of the fake driver's memory."""

    def _tensor(self, region: Region) -> torch.Tensor:
        self.__dict__.setdefault("users", []).append(region)  # as torch's tensors hold theirs
        return torch.frombuffer((ctypes.c_ubyte * region.nbytes).from_address(region.address), dtype=torch.uint8)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_memory, "PIECE", 2 * UNIT)


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def memory(driver: FakeDriver) -> CudaSleepMemory:
    return _OnHost(torch.device("cpu"), driver)  # type: ignore[arg-type]


def _filled(memory: CudaSleepMemory) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Weights of three pieces and a bit, a cache, and the table of an adapter."""
    weights = memory.parameters({"a": ((300, 700), "float16"), "b": ((11,), "float32"), "none": ((0, 4), "int8")})
    cache, table = memory.zeros((5, 1000), "float32"), memory.zeros((77,), "bfloat16")
    memory.keep([table])
    assert not any(int(t.count_nonzero()) for t in (*weights.values(), cache, table))
    weights["a"].copy_(torch.arange(210000).view(300, 700) % 1999)
    weights["b"].fill_(-3)
    cache.fill_(5)
    table.fill_(9)
    return weights, cache, table


def test_a_region_keeps_its_addresses(driver: FakeDriver) -> None:
    memory = VirtualMemory(driver, 0)  # type: ignore[arg-type]
    region = memory.region(5 * UNIT + 1, "weights")
    address = region.address
    assert sorted(driver.mapped) == [address, address + 2 * UNIT, address + 4 * UNIT]
    assert (driver.used, region.mapped) == (6 * UNIT, True)
    assert ctypes.string_at(address, 5 * UNIT + 1) == bytes(5 * UNIT + 1)
    region.unmap()
    assert (driver.used, driver.mapped, region.mapped) == (0, {}, False)
    region.unmap()
    assert [nbytes for _, nbytes in region.map()] == [2 * UNIT] * 3
    assert list(region.map()) == []
    assert (region.address, region.mapped) == (address, True)
    assert [found.tag for found in memory.regions] == ["weights"]
    del region
    assert (driver.used, driver.reserved, list(memory.regions)) == (0, {}, [])


@pytest.mark.parametrize("name", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_mapping_that_fails_leaves_nothing(driver: FakeDriver, name: str) -> None:
    memory = VirtualMemory(driver, 0)  # type: ignore[arg-type]
    region = memory.region(5 * UNIT, "kv_cache")
    region.unmap()
    driver.failing = {name: 2}
    with pytest.raises(CudaError, match=name):
        list(region.map())
    assert driver.used == 2 * UNIT  # the piece before it, until it is unmapped
    assert len(driver.mapped) == 1
    region.unmap()
    assert (driver.used, driver.mapped) == (0, {})
    list(region.map())
    assert region.mapped
    driver.failing = {name: 3}
    with pytest.raises(CudaError):
        memory.region(9 * UNIT, "kv_cache")
    assert driver.used == 5 * UNIT


@pytest.mark.parametrize("level", [KEPT, DROPPED])
def test_sleep_and_waking(driver: FakeDriver, memory: CudaSleepMemory, level: int) -> None:
    weights, cache, table = _filled(memory)
    before, addresses = {n: t.clone() for n, t in weights.items()}, {n: t.data_ptr() for n, t in weights.items()}
    used, reloads = driver.used, []

    def reload() -> None:
        assert not any(int(t.count_nonzero()) for t in weights.values())  # padding is never written
        weights["a"].copy_(before["a"])
        weights["b"].copy_(before["b"])
        reloads.append(driver.used)

    rank = RankSleep(memory, reload)
    for _ in range(3):
        assert rank.sleep(level, ["weights", "kv_cache"]) == ["weights", "kv_cache"]
        assert (driver.used, driver.mapped) == (0, {})
        assert rank.wake(["weights"]) == ["weights"]
        assert 0 < driver.used < used
        assert rank.wake(["kv_cache", "weights"]) == ["kv_cache"]
        assert driver.used == used
        assert {n: t.data_ptr() for n, t in weights.items()} == addresses
        assert all(torch.equal(t, before[n]) for n, t in weights.items())
        assert not int(cache.count_nonzero())
        assert table.unique().tolist() == [9]
        cache.fill_(5)
    assert len(reloads) == (3 if level == DROPPED else 0)
    wanted = sum(r.nbytes for r in memory._virtual.regions if r.tag == "weights") if level == KEPT else 2 * 77
    assert list(driver.registered.values()) == [wanted]
    assert driver.calls.count("cuMemHostRegister_v2") == 1  # it is kept from one sleep to the next


def test_copies_on_the_host_follow_the_level(driver: FakeDriver, memory: CudaSleepMemory) -> None:
    weights, _, _ = _filled(memory)
    rank = RankSleep(memory, lambda: weights["b"].fill_(-3))
    rank.sleep(KEPT, ["weights"])
    large = sum(driver.registered.values())
    rank.wake(["weights"])
    rank.sleep(DROPPED, ["weights"])
    assert sum(driver.registered.values()) == 2 * 77 < large
    rank.wake(["weights"])
    assert weights["b"].unique().tolist() == [-3]
    assert not int(weights["a"].count_nonzero())


@pytest.mark.parametrize("level", [KEPT, DROPPED])
@pytest.mark.parametrize("number", range(1, 6))
def test_waking_up_without_room(driver: FakeDriver, memory: CudaSleepMemory, level: int, number: int) -> None:
    """Whichever piece there is no memory for: nothing is held, and the next try finds all."""
    weights, _, table = _filled(memory)
    before = {n: t.clone() for n, t in weights.items()}

    def reload() -> None:
        for name, tensor in weights.items():
            tensor.copy_(before[name])

    rank = RankSleep(memory, reload)
    rank.sleep(level, ["weights", "kv_cache"])
    driver.failing = {"cuMemCreate": number}
    with pytest.raises(ConfigError, match=re.compile(r"the GPU has no 0\.0 GB left for (weights|kv_cache) .*wake up")):
        rank.wake(["weights", "kv_cache"])
    assert (driver.used, rank.asleep) == (0, {"weights", "kv_cache"})
    rank.wake(["weights", "kv_cache"])
    assert all(torch.equal(t, before[n]) for n, t in weights.items())
    assert table.unique().tolist() == [9]


def test_weights_that_cannot_be_read_again(driver: FakeDriver, memory: CudaSleepMemory) -> None:
    _filled(memory)

    def gone() -> None:
        raise FileNotFoundError("model.safetensors")

    rank = RankSleep(memory, gone)
    rank.sleep(DROPPED, ["weights", "kv_cache"])
    with pytest.raises(FileNotFoundError):
        rank.wake(["weights", "kv_cache"])
    assert (driver.used, rank.asleep) == (0, {"weights", "kv_cache"})


def test_no_room_on_the_host(driver: FakeDriver, memory: CudaSleepMemory) -> None:
    weights, _, _ = _filled(memory)
    before, used, rank = weights["a"].clone(), driver.used, RankSleep(memory, lambda: None)
    driver.failing = {"cuMemHostRegister_v2": 1}
    with pytest.raises(ConfigError, match=r"the host has no 0\.0 GB for the weights .*; free some, or use level 2"):
        rank.sleep(KEPT, ["weights", "kv_cache"])
    assert (driver.used, rank.asleep, driver.registered) == (used, set(), {})
    assert torch.equal(weights["a"], before)
    rank.sleep(KEPT, ["weights", "kv_cache"])
    assert driver.used == 0


def test_putting_back_copies_nothing(driver: FakeDriver, memory: CudaSleepMemory) -> None:
    weights, _, _ = _filled(memory)
    before, rank = weights["a"].clone(), RankSleep(memory, lambda: None)
    rank.sleep(KEPT, ["weights", "kv_cache"])
    rank.wake(["weights"])
    driver.calls.clear()
    rank.put_back(["weights"])
    assert "cuMemcpyDtoHAsync_v2" not in driver.calls
    assert driver.used == 0
    rank.wake(["weights", "kv_cache"])
    assert torch.equal(weights["a"], before)


def test_memory_that_others_may_keep_hold_of_stays(driver: FakeDriver) -> None:
    memory = _OnHost(torch.device("cpu"), driver, shares=True)  # type: ignore[arg-type]
    assert memory.scratch(100).shape == (100,)
    assert driver.used == 0
    assert memory.zeros((3,), "int32").shape == (3,)
    assert driver.used == UNIT


def test_a_gpu_that_is_too_small() -> None:
    memory = _OnHost(torch.device("cpu"), FakeDriver(limit=UNIT))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="out of memory"):
        memory.zeros((UNIT,), "int32")
