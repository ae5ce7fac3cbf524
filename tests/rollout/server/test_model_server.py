"""A served model folder: its stop texts are exact, or refused; a server ends with its engine."""

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from m2forge.errors import EngineError, RequestError
from m2forge.protocols import Chunk, Prompt
from m2forge.records import PolicyVersion, Sampling
from m2forge.rollout.config import ServeConfig, ServerConfig
from m2forge.rollout.core import Core
from m2forge.rollout.server import model_server
from m2forge.rollout.server.model_server import make_core, serve_model
from m2forge.text.tokenizer import train_tokenizer
from tests.rollout.draw import finish, ids_of
from tests.rollout.network import write_network
from tests.rollout.served import KEY, KEYED

CONFIG = ServeConfig(device="cpu")
NUM_CLIENTS = 3


def test_ids_that_the_tokenizer_does_not_know_have_no_text(tmp_path: Path) -> None:
    """A network may have more ids than its tokenizer: one that is sampled must not end the engine."""
    write_network(tmp_path / "model")
    tokenizer = train_tokenizer(["a"], 256 + 8, ())
    tokenizer.save(tmp_path / "model")
    core = make_core(tmp_path / "model", CONFIG)
    assert core._decode is not None
    assert core._decode([65, tokenizer.vocab_size + 3, 66]) == tokenizer.decode_bytes([65, 66])


def test_a_core_has_the_version_that_it_is_started_with(tmp_path: Path) -> None:
    write_network(tmp_path / "model")
    core = make_core(tmp_path / "model", CONFIG.model_copy(update={"lineage": "run", "step": 3, "branch": "ab"}))
    assert core.version == PolicyVersion("run", 3, "ab")


def test_stop_texts_without_a_usable_tokenizer_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_network(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    with caplog.at_level(logging.WARNING):
        core = make_core(tmp_path / "model", CONFIG)
    assert "prompts with stop texts will be rejected" in caplog.text
    with pytest.raises(RequestError, match="stop_texts"):
        core.add("a", Prompt(ids_of(1), 1, stop_texts=("x",)))
    core.add("b", Prompt(ids_of(1), 1, Sampling(temperature=0)))
    assert len(finish(core)["b", 0].ids) == 1


def test_a_server_whose_engine_fails_answers_clients_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_network(tmp_path / "model")
    statuses: list[int] = []

    def fail(core: Core) -> list[tuple[str, Chunk]]:
        if core.num_running + core.num_waiting == NUM_CLIENTS:
            raise ArithmeticError("a bug")
        time.sleep(0.001)
        return []

    def ask(url: str) -> None:
        body = {"ids": [1, 2], "max_tokens": 4, "stream": False}
        statuses.append(httpx2.post(f"{url}/generate", json=body, headers=KEYED, timeout=20.0).status_code)

    def announce(url: str) -> None:
        for _ in range(NUM_CLIENTS):
            threads.submit(ask, url)

    monkeypatch.setattr(Core, "step", fail)
    monkeypatch.setattr(model_server, "spare_collector", lambda: None)
    config = ServeConfig(device="cpu", server=ServerConfig(port=0))
    with ThreadPoolExecutor() as threads, pytest.raises(EngineError, match="ArithmeticError: a bug"):
        serve_model(tmp_path / "model", config, KEY, announce)
    assert statuses == [503] * NUM_CLIENTS
