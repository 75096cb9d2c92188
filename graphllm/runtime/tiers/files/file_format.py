"""What a file of the disk tier looks like: a page that says whose contents follow, and the contents of one entry.

The page has a mark, the format's version, the key, the length and a checksum of the contents, and a checksum of itself.
Contents end at the border of a page; zeros fill the last one.
"""

from __future__ import annotations

import re
import struct
import zlib
from pathlib import Path

import numpy as np

PAGE = 4096  # bytes
LONGEST_KEY = 64  # bytes
VERSION = 1
_MARK = b"GLLM-KV\n"
_FACTS = struct.Struct(f"<8sIIQQ{LONGEST_KEY}s")
_SUM = struct.Struct("<I")
_ROW = 8192  # bytes that `checksum` adds up together
_NAME = re.compile(r"(?:[0-9a-f]{2}){2,64}")


class DamagedFileError(Exception):
    """A file that does not hold what its name says. The message says why."""


def padded(num_bytes: int) -> int:
    """Bytes of whole pages."""
    return -(-num_bytes // PAGE) * PAGE


def file_bytes(entry_bytes: int) -> int:
    """The size of a file with an entry of that size."""
    return PAGE + padded(entry_bytes)


def path_of(key: bytes) -> Path:
    """Where the file of a key lies, relative to the store. Few files lie in one folder, and not too few: an empty
    folder takes a page, too."""
    name = key.hex()
    return Path(name[:2], name[2], name)


def key_of(name: str) -> bytes | None:
    """The key of a file with this name; None for a file of another kind."""
    return bytes.fromhex(name) if _NAME.fullmatch(name) else None


def checksum(content: np.ndarray) -> int:
    """64 bits that change when the content does.

    The content is a table of 8-byte numbers. The first half is the CRC of the sum of each row, the second one that of
    the exclusive or of each column, and of what is left after the last row. That is several times as fast as a CRC of
    everything.
    """
    whole = content.nbytes // _ROW * _ROW
    table = content[:whole].view(np.uint64).reshape(-1, _ROW // 8)
    rows = zlib.crc32(table.sum(axis=1).data)
    columns = zlib.crc32(content[whole:].data, zlib.crc32(np.bitwise_xor.reduce(table, axis=0).data))
    return rows << 32 | columns


def write_header(page: np.ndarray, key: bytes, content: np.ndarray) -> None:
    """Fill the first page of a file."""
    facts = _FACTS.pack(_MARK, VERSION, len(key), content.nbytes, checksum(content), key)
    head = facts + _SUM.pack(zlib.crc32(facts))
    page[:] = 0
    page[: len(head)] = np.frombuffer(head, np.uint8)


def check(page: np.ndarray, key: bytes, content: np.ndarray) -> None:
    """Raise DamagedFileError unless a file's first page is that of this key and of this content."""
    facts = page[: _FACTS.size].tobytes()
    mark, version, length, num_bytes, found, name = _FACTS.unpack(facts)
    if mark != _MARK or _SUM.unpack_from(page.data, _FACTS.size)[0] != zlib.crc32(facts):
        raise DamagedFileError("its first page is no header")
    if version != VERSION:
        raise DamagedFileError(f"its format is {version}, this version reads {VERSION}")
    if name[:length] != key:
        raise DamagedFileError("it holds another block")
    if num_bytes != content.nbytes:
        raise DamagedFileError(f"it holds {num_bytes} bytes, a block here has {content.nbytes}")
    if found != checksum(content):
        raise DamagedFileError("its contents do not match their checksum")
