"""Progress is a live bar in a terminal and a few plain lines elsewhere."""

import io

import pytest
from rich.console import Console

from m2forge.observe import progress as module
from m2forge.observe.progress import progress


def test_plain_output_is_one_line_at_the_end_of_a_short_job() -> None:
    console = Console(file=io.StringIO(), force_terminal=False)
    with progress(3, "training [nano]", console) as bar:
        for step in range(3):
            bar.advance(fields={"loss": 2.123456 - step, "tokens/s": "9k"})
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "training [nano] 3/3, 0 s  loss 0.1235  tokens/s 9k\n"


def test_plain_output_repeats_at_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PLAIN_INTERVAL_S", 0.0)
    console = Console(file=io.StringIO(), force_terminal=False)
    with progress(None, "reading", console) as bar:
        bar.advance(2)
        bar.advance(3)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines() == ["reading 2, 0 s", "reading 5, 0 s", "reading 5, 0 s"]


def test_the_last_line_comes_even_when_the_job_fails() -> None:
    console = Console(file=io.StringIO(), force_terminal=False)
    with pytest.raises(KeyboardInterrupt), progress(3, "training", console) as bar:
        bar.advance()
        raise KeyboardInterrupt
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "training 1/3, 0 s\n"


def test_terminal_shows_a_bar_with_the_latest_fields() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with progress(3, "training", console) as bar:
        bar.advance(2, {"loss": 2.0})
        bar.advance(1, {"loss": 1.5})
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "3/3" in shown
    assert "loss 1.5" in shown
