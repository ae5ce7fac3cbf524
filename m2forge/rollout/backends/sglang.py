"""Client of an engine behind SGLang's server.

It sends a streamed `POST /generate` with `input_ids`. Each completion is a separate entry of one batch with its own id
(`rid`) and seed, so that it can be aborted by id; SGLang's prefix cache shares the prompt. Events carry all tokens of a
completion so far, or only the latest with `--incremental-streaming-output`; the client tells them apart by the reported
token count.

SGLang reports a token's logprob after temperature and before truncation. With truncation or penalties it cannot report
the sampling distribution, so such a prompt is rejected; at a temperature other than 1 the logprob under the raw logits
is unknown. SGLang uses seeds only with `--enable-deterministic-inference`, which the caller declares by `takes_seeds`;
otherwise seeds are rejected.

SGLang checks stop ids only together with the model's EOS token. If EOS ends a completion and is not one of the prompt's
stop ids, the request fails instead of appearing to have stopped as asked. SGLang searches stop texts only in as many of
the last tokens as its own tokenization of them has, so it may miss one sampled in more tokens: stop texts are rejected.

Weights are reloaded by `/update_weights_from_disk`, which also flushes the cache. Tokens carry no policy version:
requests and weight updates exclude each other (see `turn`).
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np

from m2forge.errors import ConfigError, EngineError, M2ForgeError, NotFoundError, RequestError
from m2forge.model.config_file import whole_folder
from m2forge.protocols import Chunk, EngineState, Prompt
from m2forge.records import FinishReason, JsonValue, PolicyVersion
from m2forge.rollout.backends.client import ANSWER_S, Client
from m2forge.rollout.backends.update_lock import UpdateLock, deadline_of, within_deadline

UPDATE_PATH = "/update_weights_from_disk"
_ALL_TOKENS = -1
"""SGLang's top_k for no limit."""
_LOWEST_TEMPERATURE = 1e-6
"""SGLang treats any lower temperature as 0."""
_NUM_SEEDS = 1 << 62
"""SGLang stores seeds as signed 64-bit integers."""


class SGLangEngine:
    """See `Engine`. No other client should change the server's weights."""

    def __init__(
        self, url: str, version: PolicyVersion, *, api_key: str | None = None, takes_seeds: bool = False
    ) -> None:
        """`version`: the policy version of the server's weights. `takes_seeds`: it runs with
        --enable-deterministic-inference."""
        self._client = Client(url, key=api_key, read_error=_read_error)
        self._lock, self._takes_seeds = UpdateLock(version), takes_seeds

    async def generate(self, prompt: Prompt) -> AsyncGenerator[Chunk, None]:
        self.refuse_unsupported(prompt)
        async with aclosing(within_deadline(self._sample(prompt), prompt)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def load(self, folder: Path, version: PolicyVersion) -> None:
        """Waits for requests in flight."""
        if not folder.is_dir():
            raise NotFoundError(f"{folder} is not a folder; give a model folder that the server sees too")
        folder = whole_folder(folder)
        await asyncio.to_thread(_refuse_changed, folder)
        async with self._lock.load(version):
            body: JsonValue = {"model_path": str(folder.absolute()), "weight_version": str(version.step)}
            with self._lock.changing(folder):
                response = self._client.parse(await self._client.post(UPDATE_PATH, body))
                if not response.get("success"):
                    raise RequestError(f"{self._client.url} did not load {folder}: {response.get('message')}")

    async def state(self) -> EngineState:
        response = self._client.parse(await self._client.get("/v1/loads", {"include": "core"}))
        try:
            loads = response["loads"]
            running, waiting = (sum(load[f"num_{name}_reqs"] for load in loads) for name in ("running", "waiting"))
        except (KeyError, TypeError) as error:
            raise EngineError(f"{self._client.url}/v1/loads cannot be read ({error!r}): {response}") from error
        return EngineState(self._lock.version, running, waiting)

    def refuse_unsupported(self, prompt: Prompt) -> None:
        """Raise a RequestError if the server cannot sample a prompt as it asks, or cannot report it."""
        _refuse_unsupported(prompt)
        if prompt.seed is not None and not self._takes_seeds:
            raise RequestError(
                f"seed {prompt.seed}: SGLang ignores seeds unless it runs with --enable-deterministic-inference; "
                "start it with that flag and pass takes_seeds=True, or leave the seed out"
            )

    async def check_server(self) -> None:
        """Raise a ConfigError if the server has no route to reload weights. SGLang has one mode of logprobs."""
        if not await self._client.has_route(UPDATE_PATH):
            raise ConfigError(
                f"{self._client.url} has no {UPDATE_PATH}, by which weights are reloaded; give the URL of an SGLang "
                "server itself, not of a router in front of it"
            )

    async def refuse_dead(self) -> None:
        """Raise an EngineError if the server does not respond or holds unknown weights; waits for a weight update."""
        await self._lock.wait()
        await self.state()

    async def close(self) -> None:
        """Closes the connections. The server keeps running."""
        await self._client.close()

    async def _sample(self, prompt: Prompt) -> AsyncGenerator[Chunk, None]:
        deadline_s = deadline_of(prompt)
        await self._lock.wait(deadline_s)
        with self._lock.request() as version:
            rids = [f"m2forge-{secrets.token_hex(8)}" for _ in range(prompt.num_samples)]
            num_read, unfinished = [0] * prompt.num_samples, set(range(prompt.num_samples))
            try:
                async with aclosing(self._client.events("/generate", _body(prompt, rids), deadline_s)) as events:
                    async for event in events:
                        if "error" in event:
                            raise _read_error(event, 500)
                        chunk = self._chunk(event, prompt, version, num_read)
                        if chunk.finish_reason is not None:
                            unfinished.discard(chunk.sample)
                        yield chunk
            finally:
                if unfinished:
                    await asyncio.shield(self._abort([rids[sample] for sample in unfinished]))

    def _chunk(self, event: Mapping[str, Any], prompt: Prompt, version: PolicyVersion, num_read: list[int]) -> Chunk:
        try:
            meta, sample, sampling = event["meta_info"], event["index"], prompt.sampling
            reason = _read_reason(meta["finish_reason"], prompt.stop_ids)
            # The last `num_fresh` entries, whether the event reports all tokens so far or only the latest.
            num_fresh = meta["completion_tokens"] - num_read[sample]
            reported = meta.get("output_token_logprobs") or []
            fresh = reported[len(reported) - num_fresh :]
            if len(fresh) != num_fresh:
                raise ValueError(f"{num_fresh} tokens with {len(fresh)} log-probabilities")
            num_read[sample] += num_fresh
            drawn = np.array([entry[0] for entry in fresh], np.float32)
            ids = np.array([entry[1] for entry in fresh], np.int32)
            if reason == FinishReason.LENGTH and ids.size and ids[-1] in prompt.stop_ids:
                reason = FinishReason.STOP  # for a stop id at the length limit SGLang reports length
            is_greedy = sampling.temperature == 0  # then SGLang reports logprobs under the raw logits
            return Chunk(
                sample=sample,
                ids=ids,
                logprobs=np.zeros_like(drawn) if is_greedy else drawn,
                raw_logprobs=drawn if is_greedy or sampling.temperature == 1 else np.full_like(drawn, np.nan),
                versions=np.full(num_fresh, version.step, np.int32),
                num_cached=meta.get("cached_tokens") or 0,
                finish_reason=reason,
            )
        except (AttributeError, KeyError, IndexError, OverflowError, TypeError, ValueError) as error:
            if isinstance(error, M2ForgeError):
                raise
            raise EngineError(f"{self._client.url} sent an event that cannot be read ({error!r}): {event}") from error

    async def _abort(self, rids: list[str]) -> None:
        # An unreachable server has nothing to abort, and the original error must not be masked.
        with contextlib.suppress(M2ForgeError):
            for rid in rids:
                await self._client.post("/abort_request", {"rid": rid}, timeout_s=ANSWER_S)


def _body(prompt: Prompt, rids: list[str]) -> dict[str, JsonValue]:
    sampling = prompt.sampling
    settings: dict[str, JsonValue] = {
        "max_new_tokens": prompt.max_tokens,
        "temperature": sampling.temperature,
        "top_k": 1 if sampling.temperature == 0 else _ALL_TOKENS,
        "top_p": 1.0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": list(prompt.stop_ids),
        "ignore_eos": not prompt.stop_ids,
    }
    seeds = [
        {} if prompt.seed is None else {"sampling_seed": (prompt.seed + sample) % _NUM_SEEDS}
        for sample in range(len(rids))
    ]
    return {
        "input_ids": [prompt.ids.tolist()] * len(rids),
        "sampling_params": [settings | seed for seed in seeds],
        "rid": list(rids),
        "return_logprob": True,
        "stream": True,
    }


def _refuse_unsupported(prompt: Prompt) -> None:
    sampling = prompt.sampling
    if prompt.returns_experts:
        raise RequestError("returns_experts: not supported with SGLang; leave it out, or use another engine")
    if sampling.is_penalised or (sampling.temperature and sampling.is_truncated):
        raise RequestError(
            f"{sampling}: SGLang reports logprobs before truncation and penalties, not under the sampling "
            "distribution; sample by temperature alone"
        )
    if 0 < sampling.temperature < _LOWEST_TEMPERATURE:
        raise RequestError(f"temperature {sampling.temperature}: SGLang treats it as 0; send 0")
    if prompt.stop_texts:
        raise RequestError(f"stop_texts {prompt.stop_texts}: SGLang may miss some; give stop_ids instead")
    if prompt.priority:
        raise RequestError(
            f"priority {prompt.priority}: SGLang rejects priorities unless it schedules by them; leave it out"
        )


def _read_reason(finish: Mapping[str, Any] | None, stop_ids: tuple[int, ...]) -> FinishReason | None:
    """Reads None or {"type": "stop" | "length" | "abort", ...}; an abort with a status is a rejection or a failure."""
    if finish is None:
        return None
    if finish["type"] == "abort" and finish.get("status_code"):
        raise _read_error(finish.get("message"), int(finish["status_code"]))
    if finish["type"] == "stop" and finish.get("matched") not in stop_ids:
        # The model's EOS token, or "NaN happened".
        raise EngineError(
            f"SGLang ended a completion at {finish.get('matched')!r}, which is not in the prompt's stop ids "
            f"{list(stop_ids)}; if it is the model's EOS token, add it to stop_ids"
        )
    return FinishReason(finish["type"])


def _refuse_changed(folder: Path) -> None:
    # It imports torch, which the rest of this module does not need.
    from m2forge.model.manifest import refuse_changed_files

    refuse_changed_files(folder)


def _read_error(body: object, status: int) -> M2ForgeError:
    """SGLang answers {"error": {"message", "type", "code"}}."""
    message = body.get("error", body) if isinstance(body, Mapping) else body
    if isinstance(message, Mapping):
        status = message["code"] if isinstance(message.get("code"), int) else status
        message = message.get("message", message)
    if status in (400, 413, 422):
        return RequestError(str(message))
    return EngineError(f"answered {status}: {message}")
