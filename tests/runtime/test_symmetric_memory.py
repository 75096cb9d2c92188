"""What torch's symmetric memory is told of groups: a store that counts from 0 in a process that had groups before. The
memory itself needs GPUs: tests/gpu."""

from __future__ import annotations

from torch.distributed import HashStore, PrefixStore

from graphllm.runtime.symmetric_memory import CountedFromZero


def test_a_process_that_counted_on_finds_what_a_new_one_says() -> None:
    """torch's own stores call it, as torch does when ranks share memory: bytes under KIND/NUMBER/RANK."""
    common = HashStore()
    old = CountedFromZero(common)
    for number, payload in enumerate((b"\xff\x00\x80", b"second")):
        new = PrefixStore(f"CUDASymmetricMemory/{number}", common)
        new.set("1", payload)
        late = PrefixStore(f"CUDASymmetricMemory/{number + 7}", old)
        late.wait(["1"])
        late.set("0", payload[::-1])
        assert late.get("1") == payload
        assert late.multi_get(["0", "1"]) == [payload[::-1], payload]
        assert late.check(["0"])
        assert new.get("0") == payload[::-1]
        assert (late.add("count", 1), new.add("count", 1)) == (1, 2)
