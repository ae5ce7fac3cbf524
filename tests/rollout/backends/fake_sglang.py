"""A server that speaks SGLang's protocol over a scripted policy.

Fields as in SGLang of August 2026: `GenerateReqInput`, `UpdateWeightFromDiskReqInput` and `AbortReq` of
srt/managers/io_struct.py, sampling parameters of srt/sampling/sampling_params.py, `meta_info` as
srt/managers/tokenizer_manager.py builds it (all tokens so far in each event, or the latest alone with
--incremental-streaming-output), the end of a completion as `Req` of srt/managers/schedule_batch.py sees it (the length
first, then the model's end token together with the stop ids, neither with `ignore_eos`), the endpoints of
srt/entrypoints/http_server.py and v1_loads.py, log-probabilities after temperature and before truncation as in
srt/layers/sampler.py.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from m2forge.records import PolicyVersion, Sampling
from m2forge.testing.scripted import Drawn, ScriptedPolicy, uniform_draw


class FakeSGLang:
    def __init__(
        self,
        vocab_size: int,
        context: int,
        *,
        is_incremental: bool = False,
        end_id: int | None = None,
        takes_weights: bool = True,
    ) -> None:
        """`end_id`: the model's end token. `takes_weights`: a router in front of a server passes no weights on."""
        self.end_id = end_id
        self.policy, self.context, self.is_incremental = ScriptedPolicy(vocab_size), context, is_incremental
        self.version, self.aborted, self.going = PolicyVersion("fake", 0), list[str](), set[str]()
        self.bodies: list[dict[str, Any]] = []
        self.loaded: list[Path] = []
        routes = [
            Route("/generate", self.generate, methods=["POST"]),
            Route("/abort_request", self.abort, methods=["POST"]),
            Route("/v1/loads", self.loads),
        ]
        if takes_weights:
            routes.append(Route("/update_weights_from_disk", self.update, methods=["POST"]))
        self.app = Starlette(routes=routes)

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        assert body["return_logprob"]
        assert len(body["input_ids"]) == len(body["rid"]) == len(body["sampling_params"])
        return StreamingResponse(self.stream(body), media_type="text/event-stream")

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[str]:
        for ids, settings in zip(body["input_ids"], body["sampling_params"], strict=True):
            if len(ids) + settings["max_new_tokens"] > self.context or max(ids) >= self.policy.vocab_size:
                message = "The input is longer than the model's context length."
                error = {"message": message, "type": "invalid_request_error", "code": 400, "retryable": False}
                yield f"data: {json.dumps({'error': error})}\n\ndata: [DONE]\n\n"
                return
        drawn: dict[str, list[Drawn]] = {rid: [] for rid in body["rid"]}
        self.going |= set(drawn)
        try:
            while self.going & set(drawn):
                for index, rid in enumerate(body["rid"]):
                    if rid in self.going:
                        await asyncio.sleep(0.001)
                        settings = body["sampling_params"][index]
                        yield self.event(index, rid, body["input_ids"][index], settings, drawn[rid])
            yield "data: [DONE]\n\n"
        finally:
            self.going -= set(drawn)

    def event(self, index: int, rid: str, ids: list[int], settings: dict[str, Any], drawn: list[Drawn]) -> str:
        sampling = Sampling(temperature=settings["temperature"])
        uniform = uniform_draw(settings.get("sampling_seed", index), 0, len(drawn))
        token = self.policy.draw(ids, [token.id for token in drawn], self.version, sampling, uniform)
        drawn.append(token)
        reason: dict[str, Any] | None = None
        if not settings["ignore_eos"] and token.id in (*settings["stop_token_ids"], self.end_id):
            reason = {"type": "stop", "matched": token.id}
        if len(drawn) == settings["max_new_tokens"]:
            reason = {"type": "length", "length": len(drawn)}
        if reason is not None:
            self.going.discard(rid)
        shown = drawn[-1:] if self.is_incremental else drawn
        told = [[t.raw_logprob if sampling.temperature == 0 else t.logprob, t.id, None] for t in shown]
        meta_info = {
            "id": rid,
            "finish_reason": reason,
            "prompt_tokens": len(ids),
            "weight_version": str(self.version.step),
            "completion_tokens": len(drawn),
            "cached_tokens": len(ids) - 1,
            "output_token_logprobs": told,
        }
        event = {"text": "\u2028", "output_ids": [t.id for t in shown], "meta_info": meta_info, "index": index}
        return f"data: {json.dumps(event, ensure_ascii=False)}\n\n"

    async def abort(self, request: Request) -> Response:
        rid = (await request.json())["rid"]
        self.aborted.append(rid)
        self.going.discard(rid)
        return Response()

    async def update(self, request: Request) -> Response:
        body = await request.json()
        assert not self.going
        if not (Path(body["model_path"]) / "config.json").exists():
            return JSONResponse({"success": False, "message": "no config.json", "num_paused_requests": 0}, 400)
        self.loaded.append(Path(body["model_path"]))
        self.version = PolicyVersion("fake", int(body["weight_version"]))
        return JSONResponse(
            {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
        )

    async def loads(self, request: Request) -> Response:
        load = {"dp_rank": 0, "num_running_reqs": len(self.going), "num_waiting_reqs": 0}
        return JSONResponse({"timestamp": "", "version": "0.6", "loads": [load]})
