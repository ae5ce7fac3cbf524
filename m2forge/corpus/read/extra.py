"""Lazily imports the libraries of the extra `corpus`, with the exceptions that they raise on broken files."""

import importlib
import logging
import struct
import zlib
from types import ModuleType
from typing import TYPE_CHECKING

from m2forge.errors import ConfigError

if TYPE_CHECKING:
    from pyarrow import CompressedInputStream, RecordBatchStreamReader
    from pyarrow.parquet import ParquetFile
    from pypdf import PdfReader


class Parquet:
    def __init__(self, arrow: ModuleType, module: ModuleType) -> None:
        self.ParquetFile: type[ParquetFile] = module.ParquetFile
        # Paths and names of columns must be UTF-8.
        self.errors: tuple[type[Exception], ...] = (arrow.lib.ArrowException, OSError, UnicodeError)


class Arrow:
    def __init__(self, arrow: ModuleType, compute: ModuleType) -> None:
        self.types, self.compute, self._arrow = arrow.types, compute, arrow
        # Paths and names of columns must be UTF-8.
        self.errors: tuple[type[Exception], ...] = (arrow.lib.ArrowException, OSError, UnicodeError)

    def open_stream(self, path: str) -> "RecordBatchStreamReader":
        """An Arrow file in the streaming format, memory-mapped."""
        return self._arrow.ipc.open_stream(self._arrow.memory_map(path, "r"))


class Zstd:
    def __init__(self, arrow: ModuleType) -> None:
        self._arrow = arrow

    def open(self, path: str) -> "CompressedInputStream":
        return self._arrow.CompressedInputStream(self._arrow.OSFile(path, "rb"), "zstd")


class Pdf:
    def __init__(self, module: ModuleType) -> None:
        self.PdfReader: type[PdfReader] = module.PdfReader
        # On a broken file the library raises whatever its parser hits first.
        self.errors: tuple[type[Exception], ...] = (
            module.errors.PyPdfError,
            ArithmeticError,
            AttributeError,
            LookupError,
            NotImplementedError,
            OSError,
            RecursionError,
            struct.error,
            TypeError,
            ValueError,
            zlib.error,
        )


def parquet() -> Parquet:
    return Parquet(_library("pyarrow", "Parquet files"), _library("pyarrow.parquet", "Parquet files"))


def arrow() -> Arrow:
    return Arrow(_library("pyarrow", "Arrow files"), _library("pyarrow.compute", "Arrow files"))


def zstd() -> Zstd:
    return Zstd(_library("pyarrow", ".zst files"))


def pdf() -> Pdf:
    # It logs every oddity of a file; we count and report what cannot be read.
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    module = _library("pypdf", "PDF files")
    _library("pypdf.errors", "PDF files")
    return Pdf(module)


def _library(name: str, purpose: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ConfigError(f"{purpose} need {package}, which is missing: pip install 'm2forge[corpus]'") from error
