"""The log goes to standard error at the level the environment names."""

import logging
import os
import subprocess
import sys

import pytest

from m2forge.errors import ConfigError
from m2forge.observe import log
from m2forge.observe.log import set_up_logging

PROGRAM = """
import logging
from m2forge.observe.log import set_up_logging
set_up_logging()
set_up_logging()
logging.getLogger("m2forge.model").info("told [once]")
logging.getLogger("m2forge.model").debug("detail")
logging.getLogger("elsewhere").info("not ours")
"""


@pytest.mark.parametrize(("level", "shown"), [("debug", [1, 1, 0]), ("INFO", [1, 0, 0]), ("error", [0, 0, 0])])
def test_lines_by_level(level: str, shown: list[int]) -> None:
    environment = os.environ | {"M2FORGE_LOG": level}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout == ""
    assert [result.stderr.count(text) for text in ("told [once]", "detail", "not ours")] == shown


def test_unknown_level_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("M2FORGE_LOG", "loud")
    with pytest.raises(ConfigError, match="M2FORGE_LOG=LOUD: no such log level; use one of DEBUG"):
        set_up_logging()


def test_a_warning_comes_once_for_each_logger_and_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log.warn_once.cache_clear()
    first, second = logging.getLogger("m2forge.first"), logging.getLogger("m2forge.second")
    for _ in range(3):
        log.warn_once(first, "100% slow")
        log.warn_once(second, "100% slow")
        log.warn_once(first, "slower")
    assert [(record.name, record.getMessage()) for record in caplog.records] == [
        ("m2forge.first", "100% slow"),
        ("m2forge.second", "100% slow"),
        ("m2forge.first", "slower"),
    ]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
