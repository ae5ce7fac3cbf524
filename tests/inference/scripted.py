"""An `LLM` whose engine says what a test has it say, in the tokens of the minimax tokenizer."""

import functools
from collections.abc import Iterable, Sequence

import pytest

from m2forge.inference import llm
from m2forge.text.message import Message, Tool
from tests.gateway.dialogue import minimax
from tests.gateway.live import Scene, WatchedEngine
from tests.text.draw import TOOLS


class LLMEngine(WatchedEngine):
    """In place of the native engine, which runs in a thread."""

    def __init__(self, engines: "list[LLMEngine]", scene: Scene, delay_s: float, core: object) -> None:
        super().__init__(minimax(), scene, delay_s=delay_s)
        engines.append(self)

    def stop(self) -> None:
        pass

    def join(self) -> None:
        pass


def script_engine(
    monkeypatch: pytest.MonkeyPatch, says: Iterable[Message], tools: Sequence[Tool] = TOOLS, delay_s: float = 0.0
) -> list[LLMEngine]:
    """The engines of the `LLM`s that are made from here on; they share what is said, message after message."""
    engines: list[LLMEngine] = []
    scene = Scene(minimax(), says, tools)
    monkeypatch.setattr(llm, "NativeEngine", functools.partial(LLMEngine, engines, scene, delay_s))
    return engines
