"""What a rank says of its files: all of them, in answers of a limited size."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from graphllm.runtime.commands.files import RankFiles
from graphllm.runtime.tiers.host_memory import HostMemory
from tests.runtime.tiers.stores import ENTRY, key, opened, until, write


def test_many_files_are_told_in_parts(tmp_path: Path) -> None:
    """The files of an earlier process count as known when the last part has been told."""
    before = opened(tmp_path)
    for number in range(5):
        write(before, number)
    before.close()
    store = opened(tmp_path)
    files = RankFiles({"blocks": store}, HostMemory({"blocks": 1}, {"blocks": (1, ENTRY)}), most_keys=2)
    answers = [files.news() for _ in range(4)]
    assert [len(answer.added) for answer in answers] == [2, 2, 1, 0]
    assert {added for answer in answers for added in answer.added} == set(map(key, range(5)))
    assert [answer.scanned for answer in answers] == [False, False, True, True]
    files.close()


def test_files_that_are_lost_are_counted(tmp_path: Path) -> None:
    store = opened(tmp_path, max_writes=0)
    memory = HostMemory({"blocks": 1}, {"blocks": (1, ENTRY)})
    memory.entry("blocks", 0)[:] = np.arange(ENTRY) % 7
    files = RankFiles({"blocks": store}, memory)
    files.begin("blocks", [(key(1), 0)], 1, writes=True)
    answers = [files.news()]
    until(lambda: answers[-1].ended or answers.append(files.news()))
    news = answers[-1]
    assert (news.ended, news.damaged, news.dropped, news.failed) == ({1: [False]}, 0, 1, 0)
    files.close()
