"""Sampling from a model in Python, synchronously.

    from m2forge import LLM

    with LLM("runs/demo/rl/model") as llm:
        print(llm.generate("def main(", max_tokens=32, temperature=0))
        answer = llm.chat([{"role": "user", "content": "What is 6 · 7?"}], tools=[...])
        answer.message.thinking, answer.message.content, answer.message.tool_calls
        for event in llm.stream_chat("Tell me more."):
            ...                                     # ThinkingDelta, ContentDelta, CallStarted, CallFinished

Prompts of one call, and of calls from several threads, are decoded in one batch by the rollout engine. Ctrl-C cancels
the call and leaves the engine usable. It works in notebooks: the engine and its event loop have threads of their own.
`close`, the end of the `with` block, garbage collection or the end of the process stop them.

Every prompt gives an `Output` with its samples.
"""

import asyncio
import atexit
import contextlib
import queue
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike, fspath
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias, TypeGuard, cast, overload

import numpy as np

from m2forge.config import TomlValue, build
from m2forge.errors import ConfigError, EngineError, RequestError
from m2forge.gateway.calls.sample import SampleReader
from m2forge.gateway.dialects.openai.chat import CHAT
from m2forge.gateway.dialects.types import CompletionOutput, CompletionRequest, Ending, offered
from m2forge.inference.config import LLMConfig, SamplingParams
from m2forge.inference.model import open_model
from m2forge.loop_thread import LoopThread
from m2forge.model.hub import find_folder
from m2forge.protocols import Chunk, Prompt
from m2forge.records import FinishReason, JsonValue, PolicyVersion
from m2forge.rollout.engine import NativeEngine, merge_chunks
from m2forge.text.format import ChatFormat
from m2forge.text.message import Message, Tool, message_to_openai, tool_to_openai
from m2forge.text.parser import Event, Problem
from m2forge.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion of a prompt."""

    text: str
    """The sampled text without its end marker or stop text; for a chat, the message's content."""
    token_ids: tuple[int, ...]
    """All sampled tokens, end marker included."""
    logprobs: tuple[float, ...] = field(repr=False)
    """Logprob of each token under the distribution that it was sampled from; 0 if it was the only choice, as always at
    temperature 0."""
    raw_logprobs: tuple[float, ...] = field(repr=False)
    """Logprob of each token under the softmax of the raw logits, whatever the sampling parameters."""
    finish_reason: FinishReason
    stop_text: str | None = None
    """The text of `SamplingParams.stop` that ended it."""
    message: Message | None = None
    """For a chat: the parsed assistant message with thinking, content and tool calls; append it to the messages."""
    problems: tuple[Problem, ...] = ()
    """For a chat: what the parser could not understand, such as a malformed tool call."""


@dataclass(frozen=True, slots=True)
class Output:
    """The completions of one prompt. The properties are those of the first, which is the only one if `n` is 1."""

    prompt_token_ids: tuple[int, ...] = field(repr=False)
    num_cached: int
    """Prompt tokens served from the prefix cache."""
    samples: tuple[Sample, ...]

    @property
    def text(self) -> str:
        return self.samples[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.samples[0].token_ids

    @property
    def logprobs(self) -> tuple[float, ...]:
        return self.samples[0].logprobs

    @property
    def finish_reason(self) -> FinishReason:
        return self.samples[0].finish_reason

    @property
    def message(self) -> Message:
        """The parsed message of a chat."""
        message = self.samples[0].message
        if message is None:
            raise AttributeError("the output of generate has a text and no message; chat parses messages")
        return message

    def __str__(self) -> str:
        return self.text


def make_sample(chunks: Sequence[Chunk], parsed: CompletionOutput, *, is_chat: bool) -> Sample:
    """`chunks`: all of one completion; `parsed`: the same, parsed."""
    whole, completion = merge_chunks(chunks), parsed.completion
    assert whole.finish_reason is not None
    return Sample(
        text=completion.content,
        token_ids=tuple(whole.ids.tolist()),
        logprobs=tuple(whole.logprobs.tolist()),
        raw_logprobs=tuple(whole.raw_logprobs.tolist()),
        finish_reason=whole.finish_reason,
        stop_text=parsed.stop_text if parsed.ending is Ending.STOP_TEXT else None,
        message=completion.message() if is_chat else None,
        problems=completion.problems,
    )


RawPrompt: TypeAlias = str | Sequence[int]
"""Text, or token ids."""
ChatMessage: TypeAlias = Message | Mapping[str, JsonValue]
"""A message, as ours or as OpenAI's JSON."""
Conversation: TypeAlias = str | Sequence[ChatMessage]
"""Messages; a text is one user message."""
ChatTool: TypeAlias = Tool | Mapping[str, JsonValue]
"""A tool, as ours or as OpenAI's JSON."""
Value: TypeAlias = str | int | float | bool | Sequence[str] | None

_CALL_PREFIX = "call_"


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """A request, and what the engine samples for it."""

    request: CompletionRequest
    prompt: Prompt


class LLM:
    def __init__(self, model: str | PathLike[str], *, revision: str | None = None, **engine: Value) -> None:
        """`model`: a model folder, a GGUF file, a hub id such as `Qwen/Qwen3-0.6B`, or a preset (random weights).
        `revision`: branch, tag or commit of a hub model. `engine`: the fields of `LLMConfig`, such as `device="cpu"`,
        `num_blocks=4096` (KV cache size) or `speculation=1`."""
        config = build(LLMConfig, _table(engine), origin="LLM")
        self._name = fspath(model)
        opened = open_model(self._name, config, revision)
        self._format, self._context = opened.format, opened.context
        end = self.tokenizer.end_of_text_id
        self._raw_stop_ids = tuple(dict.fromkeys((*self._format.stop_ids, *(() if end is None else (end,)))))
        self._engine = NativeEngine(opened.core)
        self._thread = LoopThread("m2forge-llm", on_close=self._engine.stop)
        self._shut = _Shut(self._thread, self._engine)
        # A daemon thread that still computes while the interpreter exits may crash the process.
        atexit.register(self._shut)
        weakref.finalize(self, self._shut.soon).atexit = False

    @property
    def tokenizer(self) -> Tokenizer:
        return self._format.tokenizer

    def __repr__(self) -> str:
        return f"LLM({self._name!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the requests in flight and free the engine. Idempotent."""
        self._shut()

    def load(self, model: str | PathLike[str], *, revision: str | None = None) -> None:
        """Weight update: sample from the weights of another model folder or hub model of the same sizes from here on.
        Requests in flight are treated as `on_weight_update` says."""
        self._shut.refuse_closed()
        name = fspath(model)
        folder = find_folder(name, revision)
        step = self._thread.run(self._engine.state()).version.step + 1
        self._thread.run(self._engine.load(folder, PolicyVersion(Path(name).absolute().name, step)))
        self._name = name

    # -- raw prompts ---------------------------------------------------------------------------------------------------

    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is one prompt, though also a sequence of texts
        self, prompts: RawPrompt, params: SamplingParams | None = None, **options: Value
    ) -> Output: ...

    @overload
    def generate(
        self, prompts: Sequence[RawPrompt], params: SamplingParams | None = None, **options: Value
    ) -> list[Output]: ...

    def generate(
        self, prompts: RawPrompt | Sequence[RawPrompt], params: SamplingParams | None = None, **options: Value
    ) -> Output | list[Output]:
        """Continue a text or a list of token ids, or each of a list of those. `options`: fields of `SamplingParams`,
        which replace those of `params`."""
        sampling = _sampling(params, options)
        _require_sequence("prompts", prompts, "a text, a list of token ids, or a list of those")
        if _is_raw(prompts):
            return self._complete([self._plan(_raw_request(prompts, sampling))])[0]
        return self._complete([self._plan(_raw_request(one, sampling)) for one in cast("Sequence[RawPrompt]", prompts)])

    def stream_generate(self, prompt: RawPrompt, params: SamplingParams | None = None, **options: Value) -> "Stream":
        """Continue one prompt; the events are pieces of text (`ContentDelta`)."""
        return Stream(self, self._plan(_raw_request(prompt, _single(_sampling(params, options)))))

    # -- conversations -------------------------------------------------------------------------------------------------

    @overload
    def chat(  # type: ignore[overload-overlap]  # a text is one conversation, though also a sequence of texts
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[ChatTool] = (),
        **options: Value,
    ) -> Output: ...

    @overload
    def chat(
        self,
        messages: Sequence[Conversation],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[ChatTool] = (),
        **options: Value,
    ) -> list[Output]: ...

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[ChatTool] = (),
        **options: Value,
    ) -> Output | list[Output]:
        """Answer a conversation, or each of a list of conversations. Tool calls are returned, not executed. `options`:
        fields of `SamplingParams`, which replace those of `params`."""
        sampling = _sampling(params, options)
        _require_sequence("messages", messages, "a text, a list of messages, or a list of those")
        if _is_conversation(messages):
            return self._complete([self._plan(_chat_request(messages, tools, sampling))])[0]
        conversations = cast("Sequence[Conversation]", messages)
        return self._complete([self._plan(_chat_request(one, tools, sampling)) for one in conversations])

    def stream_chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[ChatTool] = (),
        **options: Value,
    ) -> "Stream":
        """Answer one conversation; the events are pieces of thinking and content, and tool calls."""
        sampling = _single(_sampling(params, options))
        return Stream(self, self._plan(_chat_request(messages, tools, sampling)))

    # -- requests ------------------------------------------------------------------------------------------------------

    def _plan(self, request: CompletionRequest) -> _Plan:
        """Tokenize a request. Requests of a batch are all checked before the first is sampled."""
        if request.prompt is None:
            ids: Sequence[int] = self._format.render(request.messages, offered(request), generation=True).ids
        else:
            ids = self.tokenizer.encode(request.prompt) if isinstance(request.prompt, str) else request.prompt
        room = self._context - len(ids)
        if room < 1:
            raise RequestError(
                f"the prompt has {len(ids)} tokens, which leave no room in the context of "
                f"{self._context}; shorten it, or raise max_context or num_blocks"
            )
        prompt = Prompt(
            np.array(ids, np.int32),
            min(request.max_tokens or room, room),
            sampling=request.sampling,
            stop_ids=self._format.stop_ids if request.prompt is None else self._raw_stop_ids,
            stop_texts=request.stop_texts,
            seed=request.seed,
            num_samples=request.num_samples,
        )
        return _Plan(request, prompt)

    def _complete(self, plans: Sequence[_Plan]) -> list[Output]:
        self._shut.refuse_closed()
        return self._thread.run(_complete_all(self._engine, self._format, plans))


class Stream(Iterator[Event]):
    """The events of one completion while it is sampled. `close`, or dropping the stream, cancels the rest."""

    def __init__(self, llm: LLM, plan: _Plan) -> None:
        llm._shut.refuse_closed()
        self._llm = llm  # whose garbage collection would end the engine
        self._items: queue.SimpleQueue[Event | Output | BaseException] = queue.SimpleQueue()
        self._output: Output | None = None
        self._is_over = False
        self._running = llm._thread.start(_fill(self._items, llm._engine, llm._format, plan))

    def __next__(self) -> Event:
        if self._is_over:
            raise StopIteration
        try:
            item = self._items.get()
        except KeyboardInterrupt:
            self.close()
            raise
        if isinstance(item, Output):
            self._is_over, self._output = True, item
            raise StopIteration
        if isinstance(item, BaseException):
            self._is_over = True
            raise item
        return item

    @property
    def output(self) -> Output:
        """The whole completion; waits for its end."""
        for _ in self:
            pass
        if self._output is None:
            raise EngineError("the stream was closed before its completion ended; there is no whole output")
        return self._output

    def close(self) -> None:
        """Cancel the completion. Idempotent."""
        self._is_over = True
        self._running.cancel()

    def __del__(self) -> None:
        if hasattr(self, "_running"):
            self._running.cancel()


class _Shut:
    """Ends the threads of an `LLM`; does not refer to it."""

    def __init__(self, thread: LoopThread, engine: NativeEngine) -> None:
        self._thread, self._engine, self._is_closed = thread, engine, False

    def __call__(self) -> None:
        self.soon()
        self._thread.close()
        self._engine.join()

    def soon(self) -> None:
        """Without waiting, for garbage collection, which may run in any thread."""
        self._is_closed = True
        atexit.unregister(self)
        self._thread.stop()

    def refuse_closed(self) -> None:
        if self._is_closed:
            raise EngineError("this LLM is closed; make another")


async def _complete_all(engine: NativeEngine, format: ChatFormat, plans: Sequence[_Plan]) -> list[Output]:
    """One failed request cancels the others."""
    tasks = [asyncio.create_task(_complete(engine, format, plan)) for plan in plans]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _fill(
    items: "queue.SimpleQueue[Event | Output | BaseException]", engine: NativeEngine, format: ChatFormat, plan: _Plan
) -> None:
    try:
        items.put(await _complete(engine, format, plan, items.put))
    except asyncio.CancelledError:
        items.put(EngineError("this LLM was closed before the completion ended"))
        raise
    except BaseException as error:  # noqa: BLE001  (raised in the thread that reads the stream)
        items.put(error)


async def _complete(
    engine: NativeEngine, format: ChatFormat, plan: _Plan, emit: Callable[[Event], None] | None = None
) -> Output:
    """Sample one request. `emit` gets the events as soon as they are known; without it they are parsed at the end."""
    request, prompt = plan.request, plan.prompt
    readers = [SampleReader(request, format, prompt.stop_ids, _CALL_PREFIX) for _ in range(prompt.num_samples)]
    chunks: list[list[Chunk]] = [[] for _ in readers]
    async with contextlib.aclosing(engine.generate(prompt)) as stream:
        async for chunk in stream:
            chunks[chunk.sample].append(chunk)
            if emit is not None:
                for event in _read(readers[chunk.sample], [chunk]):
                    emit(event)
    samples = []
    for found, reader in zip(chunks, readers, strict=True):
        if emit is None:
            _read(reader, found)
        assert reader.output is not None, "an engine ends every completion"
        samples.append(make_sample(found, reader.output, is_chat=request.prompt is None))
    num_cached = max(chunk.num_cached for found in chunks for chunk in found)
    return Output(tuple(prompt.ids.tolist()), num_cached, tuple(samples))


def _read(reader: SampleReader, chunks: list[Chunk]) -> list[Event]:
    events, _ = reader.take(chunks)
    finish_reason = chunks[-1].finish_reason
    return events if finish_reason is None else events + reader.finish(finish_reason)


# -- arguments --------------------------------------------------------------------------------------------------------


def _table(options: Mapping[str, Value]) -> dict[str, TomlValue]:
    """Keyword arguments as a config table."""
    values = {name: [value] if name == "stop" and isinstance(value, str) else value for name, value in options.items()}
    return cast("dict[str, TomlValue]", values)  # None is no TOML, but the config's JSON has it


def _sampling(params: SamplingParams | None, options: Mapping[str, Value]) -> SamplingParams:
    given = {} if params is None else params.model_dump(mode="json")
    return build(SamplingParams, given | _table(options), origin="sampling parameters")


def _single(params: SamplingParams) -> SamplingParams:
    if params.n != 1:
        raise ConfigError(f"n: a stream has one completion, received {params.n}; call generate or chat for more")
    return params


def _require_sequence(name: str, value: Sequence[object], expected: str) -> None:
    # Type checkers see it, notebooks do not.
    if not isinstance(value, Sequence):
        raise RequestError(f"{name}: expected {expected}, received {value!r:.80}")


def _is_raw(prompts: RawPrompt | Sequence[RawPrompt]) -> TypeGuard[RawPrompt]:
    return isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))


def _is_conversation(messages: Conversation | Sequence[Conversation]) -> TypeGuard[Conversation]:
    return isinstance(messages, str) or (bool(messages) and isinstance(messages[0], Message | Mapping))


def _raw_request(prompt: RawPrompt, params: SamplingParams) -> CompletionRequest:
    if not isinstance(prompt, str) and not all(type(id) is int and id >= 0 for id in prompt):
        raise RequestError(f"prompt: expected a text or a list of token ids, received {prompt!r:.80}")
    return _with(CompletionRequest(messages=(), prompt=prompt if isinstance(prompt, str) else tuple(prompt)), params)


def _chat_request(messages: Conversation, tools: Sequence[ChatTool], params: SamplingParams) -> CompletionRequest:
    """Read by the reader of /v1/chat/completions, so that both give the model the same tokens."""
    if isinstance(messages, str):
        messages = [Message("user", messages)]
    body: dict[str, JsonValue] = {
        "model": "llm",
        "messages": [message_to_openai(one) if isinstance(one, Message) else one for one in messages],
        "tools": [tool_to_openai(tool) if isinstance(tool, Tool) else tool for tool in tools],
    }
    return _with(CHAT.read(body), params)


def _with(request: CompletionRequest, params: SamplingParams) -> CompletionRequest:
    return replace(
        request,
        max_tokens=params.max_tokens,
        sampling=params.record(),
        stop_texts=params.stop,
        seed=params.seed,
        num_samples=params.n,
    )
