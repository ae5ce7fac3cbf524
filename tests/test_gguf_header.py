"""Headers of GGUF files are read as the gguf library reads them; those that promise too much are refused at once."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from m2forge.errors import CheckpointError, DataError
from m2forge.gguf_header import MAX_ITEMS, read_header
from m2forge.model.gguf_file import GGUFSource
from m2forge.text.tokenizer import load_tokenizer
from tests.bounds import within

HUGE = 1 << 60
U8, U32, STRING, ARRAY = 0, 4, 8, 9


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def field(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def array(kind: int, num_items: int, items: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, num_items) + items


def tensor(name: str, shape: tuple[int, ...], offset: int = 0, kind: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def file(
    *fields: bytes, tensors: tuple[bytes, ...] = (), num_fields: int | None = None, num_tensors: int = -1
) -> bytes:
    counts = (len(tensors) if num_tensors < 0 else num_tensors, len(fields) if num_fields is None else num_fields)
    head = b"GGUF" + struct.pack("<IQQ", 3, *counts) + b"".join(fields) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(4096)


def test_headers_are_read_as_the_library_reads_them(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for number in range(10):
        path = tmp_path / f"{number}.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_uint64("a.u64", int(rng.integers(1 << 62)))
        writer.add_int8("a.i8", int(rng.integers(-128, 128)))
        writer.add_float32("a.f32", float(rng.random()))
        writer.add_float64("a.f64", float(rng.random()))
        writer.add_bool("a.bool", bool(rng.integers(2)))
        writer.add_string("a.text", "é😀" * int(rng.integers(5)))
        writer.add_array("a.texts", ["x" * int(size) for size in rng.integers(0, 9, size=1 + number)])
        writer.add_array("a.numbers", rng.integers(-9, 9, size=1 + number).tolist())
        writer.add_array("a.floats", rng.random(1 + number).tolist())
        if number % 2:
            writer.add_custom_alignment(64)
        for index in range(number):
            shape = tuple(int(size) for size in rng.integers(1, 5, size=1 + index % 4))
            writer.add_tensor(f"t{index}", rng.random(shape, dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        peer, ours = gguf.GGUFReader(path), read_header(path)
        own = {name: value.contents() for name, value in peer.fields.items() if not name.startswith("GGUF.")}
        assert ours.fields == own
        assert list(ours.tensors) == [tensor.name for tensor in peer.tensors]
        for expected, stored in zip(peer.tensors, ours.tensors.values(), strict=True):
            assert stored.shape == tuple(reversed(expected.shape.tolist()))
            assert (stored.kind, stored.start) == (expected.tensor_type, expected.data_offset)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (file(field("a", ARRAY, array(U8, HUGE))), "items up to 'a'"),
        (file(field("a", ARRAY, array(U32, MAX_ITEMS))), r"announces 67108864 bytes at byte \d+, where \d+ bytes"),
        (file(field("a", ARRAY, array(STRING, MAX_ITEMS))), "announces 16777216 texts in 'a'"),
        (file(field("a", ARRAY, array(STRING, 2, text("x") + struct.pack("<Q", HUGE)))), "announces"),
        (file(field("a", ARRAY, array(ARRAY, 1, array(ARRAY, 1) * 99))), "arrays of arrays"),
        (file(struct.pack("<Q", HUGE)), "announces"),
        (file(field("a", STRING, struct.pack("<Q", HUGE))), "announces"),
        (file(num_fields=HUGE), "announces 1152921504606846976 fields"),
        (file(num_tensors=HUGE), "announces 1152921504606846976 tensors"),
        (file(tensors=(text("a") + struct.pack("<I", 1 << 31),)), "2147483648 dimensions"),
        (file(field("a", U32, bytes(4)), field("a", U32, bytes(4))), "'a' occurs twice"),
        (file(tensors=(tensor("a", (1,)), tensor("a", (1,)))), "1 of its tensors occur twice"),
        (file(field("general.alignment", U32, struct.pack("<I", 3))), "expected a power of two"),
        (file(field("a", STRING, struct.pack("<Q", 2) + b"\xff\xff")), "codec can't decode"),
    ],
)
def test_a_header_that_promises_more_than_the_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    with within(), pytest.raises(CheckpointError, match=f"is not a complete GGUF file: .*{message}"):
        GGUFSource(path)
    with within(), pytest.raises(DataError, match=message):
        load_tokenizer(path)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ((tensor("a", (1 << 40, 1 << 20)),), "ends at byte 46116860184273"),
        ((tensor("a", (4,), offset=HUGE),), "ends at byte"),
        (tuple(tensor(f"t{n}", (1024,)) for n in range(9)), "its tensors have 36864 bytes, the file has"),
        ((tensor("a", (33,), kind=2),), "rows of 33 values, expected a multiple of 32 for Q4_0"),
    ],
)
def test_tensors_that_the_file_cannot_hold_are_refused(
    tmp_path: Path, tensors: tuple[bytes, ...], message: str
) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(file(tensors=tensors))
    with within(), pytest.raises(CheckpointError, match=f"is not a complete GGUF file: .*{message}"):
        GGUFSource(path)
