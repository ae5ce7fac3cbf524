"""Client of an engine behind vLLM's OpenAI-compatible server.

Prompt and completion are exchanged as token ids: a streamed `POST /v1/completions` with the prompt's ids,
`return_token_ids` (vLLM 0.10.2 and later) and `return_tokens_as_token_ids` for older servers. Only the prompt's own
stop ids end a completion, and every sampling parameter is sent, because the server would take missing ones from the
model's generation config.

vLLM reports one logprob per token, by its `--logprobs-mode`: of the raw logits (`raw`, its default) or of the sampling
distribution (`processed`). Where the two differ, a `raw` server cannot report what training needs, so such a prompt is
rejected. vLLM does not report which weights sampled a token either: requests and weight updates exclude each other (see
`turn`).

Weights are reloaded through endpoints that vLLM, 0.16 and later, offers in development mode only
(`VLLM_SERVER_DEV_MODE=1`): `/pause` and `/resume` around `/collective_rpc` with `reload_weights` and
`/reset_prefix_cache`.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from m2forge.errors import ConfigError, EngineError, M2ForgeError, NotFoundError, RequestError
from m2forge.model.config_file import whole_folder
from m2forge.protocols import Chunk, EngineState, Prompt
from m2forge.records import FinishReason, FloatArray, JsonValue, PolicyVersion, Sampling
from m2forge.rollout.backends.client import Client
from m2forge.rollout.backends.update_lock import UpdateLock, deadline_of, within_deadline

LogprobsMode: TypeAlias = Literal["raw", "processed"]

UPDATE_PATHS = ("/pause", "/resume", "/collective_rpc", "/reset_prefix_cache")
_ID_PREFIX = "token_id:"
_LOWEST_TEMPERATURE = 0.01
"""vLLM silently raises any lower temperature except 0 to this."""
_NUM_PROBES, _SURE = 4, 1e-3
"""Prompts that find the server's mode, and how far below 0 rounding puts the logprob of a certain token."""
_NUM_SEEDS = 1 << 62
"""vLLM takes signed 64-bit seeds, adds the sample's index, and reads −1 as no seed."""


class VLLMEngine:
    """See `Engine`. No other client should change the server's weights."""

    def __init__(
        self,
        url: str,
        version: PolicyVersion,
        *,
        model: str | None = None,
        api_key: str | None = None,
        logprobs_mode: LogprobsMode = "raw",
    ) -> None:
        """`version`: the policy version of the server's weights. `model`: the served model name; by default the
        server's own."""
        self._client = Client(url, key=api_key, read_error=_read_error)
        self._lock, self._model, self._logprobs_mode = UpdateLock(version), model, logprobs_mode

    async def generate(self, prompt: Prompt) -> AsyncGenerator[Chunk, None]:
        self.refuse_unsupported(prompt)
        async with aclosing(within_deadline(self._sample(prompt), prompt)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def load(self, folder: Path, version: PolicyVersion) -> None:
        """Waits for requests in flight, including those of other clients. The server must be able to read the
        folder."""
        folder = whole_folder(folder)
        # A failed reload terminates the server, so broken folders are rejected here.
        await asyncio.to_thread(_refuse_broken, folder)
        async with self._lock.load(version):
            try:
                await self._admin("/pause", parameters={"mode": "wait"})
                with self._lock.changing(folder):
                    await self._reload(folder)
            finally:
                await self._admin("/resume")

    async def _reload(self, folder: Path) -> None:
        kwargs: JsonValue = {"weights_path": str(folder.absolute())}
        await self._admin("/collective_rpc", {"method": "reload_weights", "kwargs": kwargs})
        response = await self._admin("/reset_prefix_cache")
        if response and not self._client.parse(response).get("success", True):
            raise EngineError(
                f"{self._client.url} loaded {folder} but did not reset the prefix cache of the old weights; restart it"
            )

    async def state(self) -> EngineState:
        text = await self._client.get("/metrics")
        running, waiting = (_read_gauge(text, f"vllm:num_requests_{name}") for name in ("running", "waiting"))
        return EngineState(self._lock.version, running, waiting)

    async def check_server(self) -> None:
        """Raise a ConfigError if the server has no routes to reload weights, or reports logprobs of another mode than
        `logprobs_mode`. With top_k 1 the sampling distribution holds one token, whose logprob is 0; under the raw
        logits it is lower."""
        for path in UPDATE_PATHS:
            if not await self._client.has_route(path):
                raise ConfigError(self._no_route(path))
        lowest = 0.0
        for id in range(_NUM_PROBES):
            prompt = Prompt(np.array([id], np.int32), max_tokens=1, sampling=Sampling(top_k=1))
            async with aclosing(self._sample(prompt)) as chunks:
                async for chunk in chunks:
                    lowest = min(lowest, float(chunk.logprobs.min(initial=0.0)))
        mode = "raw" if lowest < -_SURE else "processed"
        if mode != self._logprobs_mode:
            raise ConfigError(
                f"{self._client.url} reports {mode}_logprobs, the configuration says {self._logprobs_mode}; set "
                f'logprobs_mode = "{mode}", or start vLLM with --logprobs-mode {self._logprobs_mode}_logprobs'
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
            async with aclosing(self._client.events("/v1/completions", self._body(prompt), deadline_s)) as events:
                async for event in events:
                    if "error" in event:
                        raise _read_error(event, 500)
                    for choice in event.get("choices", ()):
                        yield self._chunk(choice, prompt.sampling, version)

    def _body(self, prompt: Prompt) -> dict[str, JsonValue]:
        sampling = prompt.sampling
        body: dict[str, JsonValue] = {
            "prompt": prompt.ids.tolist(),
            "max_tokens": prompt.max_tokens,
            "n": prompt.num_samples,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "repetition_penalty": sampling.repetition_penalty,
            "stop_token_ids": list(prompt.stop_ids),
            "stop": list(prompt.stop_texts),
            # Otherwise vLLM misses stop texts that contain special tokens.
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "stream": True,
        }
        if self._model is not None:
            body["model"] = self._model
        if prompt.seed is not None:
            body["seed"] = prompt.seed % _NUM_SEEDS
        if prompt.priority:
            body["priority"] = -prompt.priority  # vLLM serves lower values first
        return body

    def _chunk(self, choice: Mapping[str, Any], sampling: Sampling, version: PolicyVersion) -> Chunk:
        try:
            logprobs, reason = choice.get("logprobs") or {"tokens": [], "token_logprobs": []}, choice["finish_reason"]
            ids = choice.get("token_ids")
            if ids is None:
                ids = [int(token.removeprefix(_ID_PREFIX)) for token in logprobs["tokens"]]
            reported = np.array(logprobs["token_logprobs"], np.float32)
            if reported.size != len(ids):
                raise ValueError(f"{len(ids)} tokens with {reported.size} log-probabilities")
            logprobs, raw_logprobs = self._figures(reported, sampling)
            return Chunk(
                sample=choice["index"],
                ids=np.array(ids, np.int32),
                logprobs=logprobs,
                raw_logprobs=raw_logprobs,
                versions=np.full(len(ids), version.step, np.int32),
                finish_reason=None if reason is None else FinishReason(reason),
            )
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise EngineError(f"{self._client.url} sent a choice that cannot be read ({error!r}): {choice}") from error

    def _figures(self, reported: FloatArray, sampling: Sampling) -> tuple[FloatArray, FloatArray]:
        """Returns (logprobs under the sampling distribution, logprobs under the raw logits) from the reported ones."""
        if sampling.temperature == 0:  # vLLM reports greedy tokens under the raw logits in both modes
            return np.zeros_like(reported), reported
        if _is_plain(sampling):
            return reported, reported
        return reported, np.full_like(reported, np.nan)

    def refuse_unsupported(self, prompt: Prompt) -> None:
        """Raise a RequestError if the server cannot sample a prompt as it asks, or cannot report it."""
        if prompt.returns_experts:
            raise RequestError(
                "returns_experts: vLLM does not stream routed experts; leave it out, or use the native engine"
            )
        sampling = prompt.sampling
        if 0 < sampling.temperature < _LOWEST_TEMPERATURE:
            lowest = f"vLLM samples at {_LOWEST_TEMPERATURE} or more, or at 0"
            raise RequestError(f"temperature {sampling.temperature}: {lowest}; send one of these")
        if sampling.temperature == 0 and sampling.is_penalised and self._logprobs_mode == "processed":
            raise RequestError(
                "a vLLM server in mode processed_logprobs does not report raw logprobs of penalised greedy tokens"
            )
        if self._logprobs_mode == "raw" and sampling.temperature != 0 and not _is_plain(sampling):
            raise RequestError(
                f"{sampling}: a vLLM server in mode raw_logprobs does not report logprobs under the sampling "
                'distribution; start it with --logprobs-mode processed_logprobs and pass logprobs_mode="processed", '
                "or sample at temperature 1 without truncation and penalties"
            )

    async def _admin(self, path: str, body: JsonValue = None, parameters: Mapping[str, str] | None = None) -> str:
        try:
            return await self._client.post(path, body, parameters)
        except NotFoundError as error:
            raise EngineError(self._no_route(path)) from error

    def _no_route(self, path: str) -> str:
        return (
            f"{self._client.url} has no {path}: vLLM reloads weights only if the environment has "
            "VLLM_SERVER_DEV_MODE=1; restart it so"
        )


def _refuse_broken(folder: Path) -> None:
    # These import torch, which the rest of this module does not need.
    from m2forge.model.folder import FolderSource
    from m2forge.model.manifest import refuse_changed_files
    from m2forge.model.tensor_source import refuse_misfits

    refuse_misfits(FolderSource(folder))
    refuse_changed_files(folder)


def _is_plain(sampling: Sampling) -> bool:
    return sampling.temperature == 1 and not sampling.is_truncated


def _read_error(body: object, status: int) -> M2ForgeError:
    """vLLM answers {"error": {"message", "type", "param", "code"}}."""
    message = body.get("error", body) if isinstance(body, Mapping) else body
    if isinstance(message, Mapping):
        status = message["code"] if isinstance(message.get("code"), int) else status
        message = message.get("message", message)
    if status == 404:
        return NotFoundError(str(message))
    return RequestError(str(message)) if status in (400, 413, 422) else EngineError(f"answered {status}: {message}")


def _read_gauge(text: str, name: str) -> int:
    """The sum of a metric over its labels, in Prometheus text."""
    found = re.findall(rf"^{re.escape(name)}(?:\{{[^\n]*\}})? (\S+)$", text, re.MULTILINE)
    if not found:
        raise EngineError(f"the server's metrics have no {name}; is it a vLLM server?")
    return round(sum(float(value) for value in found))
