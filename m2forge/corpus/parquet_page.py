"""Page sizes of a Parquet column chunk, read from the page headers without decompressing.

The library allocates the size in a page's header before it decompresses the page, and the file's footer, which it does
check, need not agree with it. A header is a Thrift struct in the compact protocol,

    PageHeader { 1: i32 type, 2: i32 uncompressed_page_size, 3: i32 compressed_page_size, … }

followed by the page's bytes. Anything else is a ValueError.
"""

from typing import BinaryIO

_UNCOMPRESSED, _COMPRESSED = 2, 3
_STOP, _BYTE, _VARINTS, _DOUBLE, _BINARY, _LISTS, _MAP, _STRUCT = 0, 3, (4, 5, 6), 7, 8, (9, 10), 11, 12
_BOOLEANS = (1, 2)
_MAX_DEPTH = 8


def page_sizes(file: BinaryIO, begin: int, num_bytes: int) -> list[int]:
    """Uncompressed size of each page, in a chunk of `num_bytes` starting at `begin`."""
    sizes, at = [], begin
    while at < begin + num_bytes:
        file.seek(at)
        fields = _Reader(file).numbers()
        uncompressed, compressed = fields.get(_UNCOMPRESSED, -1), fields.get(_COMPRESSED, -1)
        if uncompressed < 0 or compressed < 0:
            raise ValueError(f"no page begins at byte {at}")
        sizes.append(uncompressed)
        at = file.tell() + compressed
    return sizes


class _Reader:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def numbers(self, depth: int = 0) -> dict[int, int]:
        """The integer fields of the struct that starts here, by field id; other fields are skipped."""
        found: dict[int, int] = {}
        field = 0
        while (head := self._byte()) != _STOP:
            kind = head & 15
            field = field + (head >> 4) if head >> 4 else self._zigzag()
            if kind in _VARINTS:
                found[field] = self._zigzag()
            elif kind not in _BOOLEANS:
                self._pass_over(kind, depth)
        return found

    def _pass_over(self, kind: int, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise ValueError("a page's header is nested too deep")
        if kind in (*_BOOLEANS, _BYTE):
            self._byte()  # a boolean inside a list takes one byte
        elif kind in _VARINTS:
            self._varint()
        elif kind == _DOUBLE:
            self._file.seek(8, 1)
        elif kind == _BINARY:
            self._file.seek(self._varint(), 1)
        elif kind in _LISTS:
            head = self._byte()
            for _ in range(head >> 4 if head >> 4 < 15 else self._varint()):
                self._pass_over(head & 15, depth + 1)
        elif kind == _MAP:
            if num_items := self._varint():
                kinds = self._byte()
                for _ in range(num_items):
                    self._pass_over(kinds >> 4, depth + 1)
                    self._pass_over(kinds & 15, depth + 1)
        elif kind == _STRUCT:
            self.numbers(depth + 1)
        else:
            raise ValueError(f"a page's header has a field of the unknown type {kind}")

    def _byte(self) -> int:
        byte = self._file.read(1)
        if not byte:
            raise ValueError("a page's header breaks off")
        return byte[0]

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 64, 7):
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise ValueError("a page's header has a number of more than 64 bits")

    def _zigzag(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
