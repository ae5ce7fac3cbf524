"""Errors print plainly and are caught as what they are in the standard library."""

import pytest

from m2forge.errors import (
    CheckpointError,
    ConfigError,
    ExistsError,
    M2ForgeError,
    NotFoundError,
    RecordError,
    suggest,
)


@pytest.mark.parametrize(
    ("kind", "base"),
    [
        (ConfigError, ValueError),
        (CheckpointError, ValueError),
        (RecordError, ValueError),
        (NotFoundError, LookupError),
        (ExistsError, FileExistsError),
    ],
)
def test_each_error_has_a_standard_base_and_a_plain_text(kind: type[M2ForgeError], base: type[Exception]) -> None:
    error = kind("'quoted' text")
    assert isinstance(error, M2ForgeError)
    assert isinstance(error, base)
    assert str(error) == "'quoted' text"


def test_suggest_names_the_near_one_else_all() -> None:
    assert suggest("m2-tinny", ["m2", "m2-tiny"]) == "did you mean 'm2-tiny'?"
    assert suggest("zebra", ["m2-tiny", "m2"]) == "known: m2, m2-tiny"
    assert suggest("zebra", []) == "none is known here"
