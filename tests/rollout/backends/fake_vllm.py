"""A server that speaks vLLM's protocol over a scripted policy.

Fields as in vLLM 0.32: `CompletionRequest` and `CompletionStreamResponse` of
vllm/entrypoints/openai/completion/protocol.py, the order of events in its serving.py (one choice in an event, the usage
if asked for, "[DONE]"), errors as `ErrorResponse` of entrypoints/serve/engine/protocol.py, the endpoints of the
development mode in entrypoints/rl/online/api_router.py and entrypoints/serve/dev, the names in /metrics of
v1/metrics/loggers.py.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from m2forge.records import PolicyVersion, Sampling
from m2forge.testing.scripted import ScriptedPolicy, uniform_draw

KNOWN_KEYS = {
    *("prompt", "max_tokens", "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "stop_token_ids", "stop", "ignore_eos", "logprobs", "return_token_ids", "stream", "seed"),
    *("return_tokens_as_token_ids", "model", "priority", "skip_special_tokens", "spaces_between_special_tokens"),
}


class FakeVLLM:
    def __init__(
        self, vocab_size: int, context: int, *, mode: str = "raw", is_dev: bool = True, tells_ids: bool = True
    ) -> None:
        """`tells_ids`: whether it knows `return_token_ids`, as vLLM does since 0.10.2."""
        self.policy, self.context, self.mode, self.tells_ids = ScriptedPolicy(vocab_size), context, mode, tells_ids
        self.version, self.num_running, self.admin_calls = PolicyVersion("fake", 0), 0, list[str]()
        self.bodies: list[dict[str, Any]] = []
        routes = [Route("/v1/completions", self.complete, methods=["POST"]), Route("/metrics", self.metrics)]
        if is_dev:
            paths = ("/pause", "/resume", "/collective_rpc", "/reset_prefix_cache")
            routes += [Route(path, self.administer, methods=["POST"]) for path in paths]
        self.app = Starlette(routes=routes)

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        assert set(body) <= KNOWN_KEYS
        assert body["ignore_eos"]
        assert body["logprobs"] == 0
        room = self.context - len(body["prompt"])
        if body["max_tokens"] > room or max(body["prompt"]) >= self.policy.vocab_size:
            message = f"This model's maximum context length is {self.context} tokens."
            error = {"message": message, "type": "BadRequestError", "param": "input_tokens", "code": 400}
            return JSONResponse({"error": error}, 400)
        return StreamingResponse(self.stream(body), media_type="text/event-stream")

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[str]:
        names = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty")
        sampling = Sampling(**{name: body[name] for name in (*names, "repetition_penalty")})
        going: dict[int, list[int]] = {sample: [] for sample in range(body["n"])}
        self.num_running += len(going)
        try:
            while going:
                for sample, before in list(going.items()):
                    await asyncio.sleep(0.001)
                    uniform = uniform_draw(body.get("seed", 0) + sample, 0, len(before))
                    drawn = self.policy.draw(body["prompt"], before, self.version, sampling, uniform)
                    before.append(drawn.id)
                    is_stop = drawn.id in body["stop_token_ids"]
                    reason = "stop" if is_stop else "length" if len(before) == body["max_tokens"] else None
                    is_raw = self.mode == "raw" or sampling.temperature == 0
                    yield self.event(sample, drawn.id, drawn.raw_logprob if is_raw else drawn.logprob, reason)
                    if reason is not None:
                        del going[sample]
                        self.num_running -= 1
            yield "data: [DONE]\n\n"
        finally:
            self.num_running -= len(going)

    def event(self, sample: int, id: int, logprob: float, reason: str | None) -> str:
        logprobs = {
            "text_offset": [0],
            "token_logprobs": [logprob],
            "tokens": [f"token_id:{id}"],
            "top_logprobs": [{f"token_id:{id}": logprob}],
        }
        # The separators are lines to Python's str.splitlines and none to the protocol.
        choice: dict[str, Any] = {
            "index": sample,
            "text": "a\u2028\u0085b",
            "logprobs": logprobs,
            "finish_reason": reason,
        }
        choice |= {"stop_reason": None} | ({"token_ids": [id]} if self.tells_ids else {})
        event = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "fake", "choices": [choice]}
        return f"data: {json.dumps(event, ensure_ascii=False)}\n\n"

    async def administer(self, request: Request) -> Response:
        self.admin_calls.append(str(request.url).removeprefix(str(request.base_url)))
        if request.url.path == "/collective_rpc":
            body = await request.json()
            assert body["method"] == "reload_weights"
            assert self.num_running == 0
            self.version = PolicyVersion(body["kwargs"]["weights_path"], 0)
            return JSONResponse({"results": [None]})
        return JSONResponse({"success": True} if request.url.path == "/reset_prefix_cache" else {"status": "done"})

    async def metrics(self, request: Request) -> Response:
        label = '{engine="0",model_name="a{b} c"}'
        return PlainTextResponse(
            f"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{label} {float(self.num_running)}\n"
            f"vllm:num_requests_waiting{label} 0.0\n"
            f'vllm:num_requests_waiting_by_reason{{reason="capacity"}} 5.0\n'
        )
