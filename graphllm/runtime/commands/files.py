"""Commands over a rank's files: entries of host memory go to the disk, and come from there, by their numbers."""

from __future__ import annotations

from pathlib import Path

import msgspec

from graphllm.runtime.commands.command import Answered, Command, Device, Query
from graphllm.runtime.commands.tiers import tiers_of
from graphllm.runtime.tiers.files.block_files import BlockFiles
from graphllm.runtime.tiers.files.file_batches import FileBatch, FileBatches
from graphllm.runtime.tiers.host_memory import HostMemory

_KEPT = "files"  # in `Worker.kept`
_MOST_KEYS = 1 << 14  # of one answer: a large folder is told in many, so that no step waits for it
Entries = list[tuple[bytes, int]]  # keys, and their entries of host memory


class FileNews(msgspec.Struct, array_like=True):
    """What has become of one rank's files since this was last asked, or a part of it.

    ended: jobs that have ended, by ticket: for each entry whether it is where it should be.
    added, removed: keys whose files came and went.
    scanned: the files of earlier processes are known, and all keys have been told.
    used_bytes, total_bytes: of all files, and their limit.
    stored_bytes: written since the start.
    damaged, dropped, failed: files that were no good, writes that found no room, and reads and writes that the
        operating system refused, since the start.
    """

    ended: dict[int, list[bool]]
    added: list[bytes]
    removed: list[bytes]
    scanned: bool
    used_bytes: int
    total_bytes: int
    stored_bytes: int
    damaged: int = 0
    dropped: int = 0
    failed: int = 0


class RankFiles:
    """The files of one rank, and the jobs that have not been told as ended.

    memory: where the entries are.
    most_keys: of a store that are told at once.
    """

    def __init__(self, stores: dict[str, BlockFiles], memory: HostMemory, most_keys: int = _MOST_KEYS) -> None:
        self.stores, self._batches, self._most_keys = stores, FileBatches(memory), most_keys
        self._begun = dict[int, FileBatch]()  # by ticket

    def begin(self, kind: str, entries: Entries, ticket: int, writes: bool) -> None:
        """Start to write or to read."""
        self._begun[ticket] = batch = FileBatch(self.stores[kind], kind, entries, writes)
        self._batches.begin(batch)

    def clear(self) -> None:
        """Forget all contents, and delete their files."""
        self._batches.drop()
        for store in self.stores.values():
            store.clear()

    def close(self) -> None:
        """Write what waits, and stop the threads."""
        self._batches.close()
        for store in self.stores.values():
            store.close()

    def news(self) -> FileNews:
        """Since this was last asked."""
        ended = dict[int, list[bool]]()
        for ticket, batch in [(ticket, batch) for ticket, batch in self._begun.items() if batch.done]:
            ended[ticket] = [job.succeeded for job in batch.jobs]
            batch.store.use(key for key, _ in reversed(batch.entries))  # of a sequence, the end is to go first
            del self._begun[ticket]
        news = [store.take_news(self._most_keys) for store in self.stores.values()]
        stats = [store.stats() for store in self.stores.values()]
        return FileNews(
            ended,
            [key for added, _ in news for key in added],
            [key for _, removed in news for key in removed],
            all(store.scanned and not store.has_news for store in self.stores.values()),
            sum(store.file_bytes * found.files for store, found in zip(self.stores.values(), stats, strict=True)),
            sum(store.max_bytes for store in self.stores.values()),
            sum(found.write_bytes for found in stats),
            sum(found.damaged for found in stats),
            sum(found.dropped for found in stats),
            sum(found.failed_reads + found.failed_writes for found in stats),
        )


def _files_of(device: Device) -> RankFiles:
    found: RankFiles = device.worker.kept[_KEPT]
    return found


class OpenFiles(Command):
    """Open the stores of a rank, after `OpenTiers`.

    folder: of this model's files; each rank and kind has a folder in it.
    max_bytes: of all files; None: half of the free space.
    shares: the parts of max_bytes that are each rank's, by kind.
    max_writes: entries of a kind that may wait to be written.
    """

    folder: str
    max_bytes: int | None
    shares: dict[str, list[float]]
    max_writes: dict[str, int]

    def run(self, device: Device) -> None:
        rank, ranks = device.worker.rank, device.worker.world_size
        memory, stores = tiers_of(device).memory, {}
        for kind, shares in self.shares.items():
            place = Path(self.folder, f"{kind}-{rank}of{ranks}")
            size = memory.entry_bytes(kind)
            stores[kind] = BlockFiles(place, size, self.max_bytes, share=shares[rank], max_writes=self.max_writes[kind])
        device.worker.kept[_KEPT] = RankFiles(stores, memory)


class WriteFiles(Command):
    """Begin to write entries of host memory, which stay as they are until `AskFiles` tells of the ticket."""

    kind: str
    entries: Entries
    ticket: int

    def run(self, device: Device) -> None:
        _files_of(device).begin(self.kind, self.entries, self.ticket, writes=True)


class ReadFiles(Command):
    """Begin to fill entries of host memory."""

    kind: str
    entries: Entries
    ticket: int

    def run(self, device: Device) -> None:
        _files_of(device).begin(self.kind, self.entries, self.ticket, writes=False)


class AskFiles(Query):
    """The `FileNews` of each rank. used: keys whose contents were used elsewhere, by kind."""

    used: dict[str, list[bytes]]

    def run(self, device: Device) -> Answered:
        files = _files_of(device)
        for kind, keys in self.used.items():
            files.stores[kind].use(reversed(keys))
        return Answered(msgspec.to_builtins(files.news(), builtin_types=(bytes,)))


class ClearFiles(Command):
    """Forget all contents, and delete their files."""

    def run(self, device: Device) -> None:
        _files_of(device).clear()


class CloseFiles(Command):
    """Write what waits, and stop the threads; before `CloseTiers`."""

    def run(self, device: Device) -> None:
        found: RankFiles | None = device.worker.kept.pop(_KEPT, None)
        if found is not None:
            found.close()
