"""`LLM`: prompts and conversations, one and many, streamed and not; in notebooks, interrupted, closed and dropped."""

import asyncio
import gc
import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from m2forge import LLM, SamplingParams
from m2forge.errors import ConfigError, EngineError, FormatError, M2ForgeError, NotFoundError, RequestError
from m2forge.inference.llm import RawPrompt
from m2forge.model.checkpoint import load_model
from m2forge.records import FinishReason
from m2forge.text.message import Message, ToolCall, message_to_openai
from m2forge.text.parser import CallFinished, ContentDelta, ThinkingDelta
from m2forge.text.tokenizer import train_tokenizer
from m2forge.text.vocabulary import byte_of_sign
from tests.gateway.dialogue import FORMATS
from tests.inference.folder import write_model
from tests.inference.scripted import script_engine
from tests.model.generate import generate
from tests.text.draw import TOOLS

ROOT = Path(__file__).parent.parent.parent
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llm") / "model")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder) as opened:
        yield opened


def num_threads() -> int:
    return sum(thread.name.startswith("m2forge-") for thread in threading.enumerate())


def test_greedy_tokens_equal_the_plain_loop(llm: LLM, folder: Path) -> None:
    output = llm.generate("def main(", temperature=0, max_tokens=12)
    plain = generate(load_model(folder), torch.tensor(output.prompt_token_ids), max_new_tokens=12)
    assert list(output.token_ids) == plain
    assert output.finish_reason is FinishReason.LENGTH
    assert len(output.logprobs) == len(output.samples[0].raw_logprobs) == 12
    assert set(output.logprobs) == {0.0}
    assert max(output.samples[0].raw_logprobs) < 0
    assert str(output) == output.text == llm.tokenizer.decode([id for id in plain if id < llm.tokenizer.vocab_size])


def test_a_batch_equals_its_prompts_one_by_one(llm: LLM) -> None:
    prompts: list[RawPrompt] = ["def main(", "x", llm.tokenizer.encode("import os")]
    together = llm.generate(prompts, GREEDY)
    assert [output.token_ids for output in together] == [llm.generate(one, GREEDY).token_ids for one in prompts]
    assert together[2].token_ids == llm.generate("import os", GREEDY).token_ids
    chats = llm.chat(["a", [{"role": "user", "content": "b"}]], GREEDY)
    assert [chat.token_ids for chat in chats] == [llm.chat(one, GREEDY).token_ids for one in ("a", "b")]
    nothing: list[str] = []
    assert llm.generate(nothing) == llm.chat(nothing) == []


@pytest.mark.parametrize("name", FORMATS)
def test_a_conversation_is_rendered_by_its_chat_format(name: str, tmp_path: Path) -> None:
    format = FORMATS[name]()
    said = Message("assistant", "Looking.", "Hm.", (ToolCall("search", {"query": "a"}, "call_1"),))
    messages: list[Any] = [Message("system", "Brief."), {"role": "user", "content": "Find."}, said]
    messages.append({"role": "tool", "tool_call_id": "call_1", "content": "found"})
    with LLM(write_model(tmp_path / "model", format), max_context=1000) as llm:
        output = llm.chat(messages, GREEDY, tools=TOOLS)
        whole = [messages[0], Message("user", "Find."), said, Message("tool", "found", tool_call_id="call_1")]
        assert list(output.prompt_token_ids) == format.render(whole, TOOLS, generation=True).ids
        as_json = [one if isinstance(one, dict) else message_to_openai(one) for one in messages]
        assert llm.chat(as_json, GREEDY, tools=TOOLS).token_ids == output.token_ids


def test_thinking_content_and_calls_are_parsed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = Message("assistant", "Looking.", "First a.", (ToolCall("search", {"query": "a", "limit": 2}),))
    script_engine(monkeypatch, [said, said])
    with LLM(folder) as llm:
        output = llm.chat("Find a.", tools=TOOLS)
        message = output.message
        assert (message.thinking, message.content, output.text) == ("First a.", "Looking.", "Looking.")
        (call,) = message.tool_calls
        assert (call.name, call.arguments) == ("search", {"query": "a", "limit": 2})
        assert call.id.startswith("call_")
        assert output.finish_reason is FinishReason.STOP
        stream = llm.stream_chat("Find a.", tools=TOOLS)
        events = list(stream)
    assert "".join(event.text for event in events if isinstance(event, ThinkingDelta)) == "First a."
    assert "".join(event.text for event in events if isinstance(event, ContentDelta)) == "Looking."
    (finished,) = [event for event in events if isinstance(event, CallFinished)]
    assert finished.call == stream.output.message.tool_calls[0]


def test_a_stream_gives_the_text_as_it_is_sampled(llm: LLM) -> None:
    whole = llm.generate("def", temperature=0, max_tokens=100)
    stream = llm.stream_generate("def", temperature=0, max_tokens=100)
    texts = [event.text for event in stream if isinstance(event, ContentDelta)]
    assert len(texts) > 1
    assert "".join(texts) == whole.text
    assert stream.output.token_ids == whole.token_ids


def test_loaded_weights_sample_from_then_on(folder: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", seed=9)
    with LLM(folder) as llm, LLM(other) as expected:
        before = llm.generate("def", GREEDY).token_ids
        llm.load(other)
        assert llm.generate("def", GREEDY).token_ids == expected.generate("def", GREEDY).token_ids != before
        assert repr(llm) == f"LLM({str(other)!r})"
        with pytest.raises(NotFoundError, match="is not a folder"):
            llm.load(tmp_path / "none")
        assert llm.generate("def", GREEDY).token_ids == expected.generate("def", GREEDY).token_ids


def test_samples_stop_texts_and_seeds_are_as_asked(llm: LLM) -> None:
    output = llm.generate("def", SamplingParams(n=3, seed=5, max_tokens=40))
    assert len({sample.token_ids for sample in output.samples}) == 3
    assert llm.generate("def", n=3, seed=5, max_tokens=40).samples == output.samples
    text = output.text
    stop = text[len(text) // 2 :][:3]
    cut = llm.generate("def", seed=5, max_tokens=40, stop=stop)
    assert (cut.text, cut.samples[0].stop_text) == (text[: text.index(stop)], stop)
    assert cut.finish_reason is FinishReason.STOP


def test_it_works_where_an_event_loop_runs(llm: LLM) -> None:
    async def cell() -> tuple[str, str]:
        return llm.generate("def", GREEDY).text, llm.stream_generate("def", GREEDY).output.text

    assert asyncio.run(cell()) == (llm.generate("def", GREEDY).text,) * 2


def test_an_interrupt_cancels_and_leaves_the_engine_usable(llm: LLM) -> None:
    before = llm.generate("def", GREEDY).token_ids
    prompts = ["def"] * 200

    def stream() -> None:
        for number in range(1000):
            list(llm.stream_generate("def", seed=number))

    for call in (lambda: llm.generate(prompts, n=8), stream):
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            call()
        assert llm.generate("def", GREEDY).token_ids == before
        wait_until(lambda: llm._thread.run(llm._engine.state()).num_running == 0)


def wait_until(holds: Any) -> None:
    for _ in range(4000):
        if holds():
            return
        time.sleep(0.01)
    raise AssertionError("waited 40 s in vain")


def test_a_closed_llm_ends_its_streams_and_refuses_requests(folder: Path) -> None:
    before = num_threads()
    llm = LLM(folder)
    stream = llm.stream_generate("def", temperature=0)
    next(stream)
    llm.close()
    llm.close()
    assert num_threads() == before
    with pytest.raises(EngineError, match="closed"):
        list(stream)
    with pytest.raises(EngineError, match="closed; make another"):
        llm.generate("def")
    with pytest.raises(EngineError, match="closed before its completion ended"):
        _ = stream.output


def test_a_stream_that_is_dropped_is_cancelled(llm: LLM) -> None:
    def num_aborted() -> float:
        return llm._thread.run(llm._engine.metrics())["total_abort_samples"]

    before = num_aborted()
    assert llm.generate("def", temperature=0, max_tokens=100).finish_reason is FinishReason.LENGTH
    next(llm.stream_generate("def", temperature=0))
    wait_until(lambda: num_aborted() == before + 1)


def test_a_dropped_llm_ends_its_threads_after_its_stream(llm: LLM, folder: Path) -> None:
    before = num_threads()
    stream = LLM(folder).stream_generate("def", seed=1, max_tokens=50)
    gc.collect()
    assert stream.output.token_ids == llm.generate("def", seed=1, max_tokens=50).token_ids
    del stream
    gc.collect()
    wait_until(lambda: num_threads() == before)


def test_the_readme_line_answers_and_exit_is_silent(tmp_path: Path) -> None:
    write_model(tmp_path / "runs" / "demo" / "rl" / "model")
    program = """
from m2forge import LLM; print(LLM('runs/demo/rl/model').chat('What is 6 · 7?', max_tokens=16))
stream = LLM('runs/demo/rl/model').stream_generate('def')
next(stream)
raise SystemExit(3)
"""
    command, environment = [sys.executable, "-"], os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, input=program, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout.endswith("\n")


@pytest.mark.parametrize("number", [0, 1])
def test_the_programs_of_the_page_run(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "inference.md").read_text(encoding="utf-8")
    blocks = [textwrap.dedent(block) for block in re.findall(r"(?:^(?:    .*)?\n)+", page, re.MULTILINE)]
    programs = [block for block in blocks if block.lstrip().startswith("from m2forge import LLM")]
    assert len(programs) == 2
    write_model(tmp_path / "runs" / "demo" / "rl" / "model")
    monkeypatch.chdir(tmp_path)
    exec(programs[number], {})
    assert capsys.readouterr().out


def test_a_preset_has_random_weights_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), LLM("m2-nano", device="cpu", num_blocks=64) as llm:
        assert "random weights" in caplog.text
        texts = [llm.chat("hi", temperature=0, max_tokens=4).token_ids for _ in range(2)]
    assert texts[0] == texts[1]
    with pytest.raises(ConfigError, match="915 GB"):
        LLM("m2", device="cpu")


def test_a_base_model_continues_text_and_refuses_messages(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    train_tokenizer(["no markers"], 300, []).save(folder)
    with LLM(folder) as llm:
        assert len(llm.generate("no", GREEDY).token_ids) == 12
        with pytest.raises(FormatError, match="no chat format: the tokenizer has no chat template"):
            llm.chat("hi")
    with pytest.raises(FormatError, match="special tokens of the minimax_m2 format"):
        LLM(folder, format="minimax_m2")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate("x", temprature=0), "temprature: unknown key.*did you mean 'temperature'"),
        (lambda llm: llm.generate("x", temprature=None), "did you mean 'temperature'"),
        (lambda llm: llm.generate("x", max_tokens=0), "max_tokens: expected greater than 0, received 0"),
        (lambda llm: llm.generate("x", temperature=-1), "temperature"),
        (lambda llm: llm.stream_generate("x", n=2), "n: a stream has one completion, received 2"),
        (lambda llm: llm.generate(""), "at least one token"),
        (lambda llm: llm.generate(["x", ["y"]]), r"prompt: expected a text or a list of token ids, received \['y'\]"),
        (lambda llm: llm.generate([10**6]), "encoded with another tokenizer"),
        (lambda llm: llm.generate(3), "prompts: expected .* received 3"),
        (lambda llm: llm.generate("word " * 2000), "leave no room in the context of 1024"),
        (lambda llm: llm.chat(3), "messages: expected .* received 3"),
        (lambda llm: llm.chat([{"role": "usr", "content": "x"}]), r"messages\[0\].role: .*received 'usr'"),
        (lambda llm: llm.chat("x", tools=[{"type": "function"}]), r"tools\[0\].function"),
    ],
)
def test_bad_arguments_are_refused_by_name(llm: LLM, call: Any, message: str) -> None:
    with pytest.raises(M2ForgeError, match=message):
        call(llm)


def test_a_model_that_cannot_be_opened_is_one_message(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="num_block: unknown key, value 3; did you mean 'num_blocks'"):
        LLM(folder, num_block=3)
    with pytest.raises(NotFoundError, match=r"neither a model folder or GGUF file that exists nor a preset.*m2-nano"):
        LLM("m2-nan")
    (tmp_path / "empty").mkdir()
    with pytest.raises(M2ForgeError, match=r"tokenizer\.json"):
        LLM(tmp_path / "empty")


def test_one_bad_prompt_of_a_batch_samples_nothing(llm: LLM) -> None:
    before = llm._thread.run(llm._engine.metrics())["total_prompts"]
    with pytest.raises(RequestError, match="no room"):
        llm.generate(["x", "word " * 2000])
    assert llm._thread.run(llm._engine.metrics())["total_prompts"] == before


def test_a_gguf_file_is_opened_as_it_is(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf")
    with LLM(tmp_path / "a.gguf") as llm:
        output = llm.generate("ab", temperature=0, max_tokens=8)
    assert output.prompt_token_ids == (256,)
    plain = generate(load_model(tmp_path / "a.gguf"), torch.tensor([256]), max_new_tokens=8)
    assert list(output.token_ids) == plain


def write_gguf(path: Path) -> None:
    """A llama of one layer with a byte-level tokenizer."""
    hidden, heads, width, tokens = 32, 4, 64, [*sorted(byte_of_sign()), "ab", "<eos>"]
    shapes = {"token_embd": (len(tokens), hidden), "output": (len(tokens), hidden), "output_norm": (hidden,)}
    shapes |= {f"blk.0.attn_{part}": (hidden, hidden) for part in ("q", "k", "v", "output")}
    shapes |= {"blk.0.attn_norm": (hidden,), "blk.0.ffn_norm": (hidden,), "blk.0.ffn_down": (hidden, width)}
    shapes |= {"blk.0.ffn_gate": (width, hidden), "blk.0.ffn_up": (width, hidden)}
    writer, random = gguf.GGUFWriter(path, "llama"), np.random.default_rng(0)
    sizes = {"block_count": 1, "context_length": 128, "embedding_length": hidden, "feed_forward_length": width}
    for key, value in (sizes | {"attention.head_count": heads, "attention.head_count_kv": heads}).items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_merges(["a b"])
    writer.add_token_types([1] * 257 + [3])
    writer.add_eos_token_id(257)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
