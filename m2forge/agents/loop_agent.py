"""The agent kind `loop`: our own agent loop, one conversation tree per attempt, in this process.

Its tools are the configured ones, which act on the attempt's workspace, and those of the task's family, which the
gateway serves. For a share of the attempts the logged states are rebuilt and compared with the tokens that the gateway
recorded (`agents/rebuild.py`), so that an operation that is not deterministic, or a gateway that recorded something
else, shows while training.
"""

import asyncio
import json
import logging
import random
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from m2forge.agents.attempt import AgentError, Answer, ErrorKind, Job, Recorded
from m2forge.agents.call_log import read_log
from m2forge.agents.config import LoopConfig
from m2forge.agents.rebuild import rebuild
from m2forge.agents.white_box import LOG_FILE, WhiteBoxAgent
from m2forge.errors import DataError, EngineError, RecordError
from m2forge.http_client import HttpClient, encode_json
from m2forge.protocols import AgentEnd
from m2forge.records import Call, JsonValue
from m2forge.sandbox.process import ProcessSandbox
from m2forge.text.format import ChatFormat
from m2forge.text.message import Tool

_log = logging.getLogger(__name__)


class LoopAgent:
    """See `AttemptAgent`."""

    is_silent_allowed = False

    def __init__(self, config: LoopConfig, format: ChatFormat, rng: random.Random | None = None) -> None:
        """`format`: the policy's chat format. `rng`: chooses the attempts to compare."""
        self._config, self._format, self._rng = config, format, rng or random.Random()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Every attempt closes what it opened."""

    async def attempt(self, job: Job, *, is_exclusive: bool = False) -> Answer:
        config = self._config
        sandbox = ProcessSandbox(job.workspace.path, config.sandbox, job.workspace.environment())
        http = HttpClient(job.endpoint.url, key=job.endpoint.key)
        try:
            agent = WhiteBoxAgent(config, [FamilyTool(tool, http) for tool in job.tools])
            result = await agent.run(job.task, job.endpoint, sandbox)
        finally:
            http.close()
            await sandbox.close()
        match result.end:
            case AgentEnd.TIMEOUT:
                raise TimeoutError
            case AgentEnd.FAILED:
                is_infra = (result.failure or "").startswith(EngineError.__name__)
                raise AgentError(f"the loop failed: {result.failure}", ErrorKind.INFRA if is_infra else None)
        return Answer(result.answer, result.transcript)

    async def watch(self) -> None:
        """There is no process that could break."""
        await asyncio.get_running_loop().create_future()

    async def inspect(self, answer: Answer, recorded: Recorded) -> bool | None:
        if self._rng.random() >= self._config.check_share:
            return None
        try:
            # It tokenizes whole conversations.
            await asyncio.to_thread(self._rebuild, answer.transcript[LOG_FILE], recorded)
        except RecordError as error:
            _log.warning("the states of an attempt, rebuilt from its log, differ from what is recorded: %s", error)
            return False
        return True

    def _rebuild(self, log: bytes, recorded: Recorded) -> None:
        rebuild(read_log(log), self._format, calls_by_id(recorded))


def calls_by_id(recorded: Recorded) -> Mapping[str, Call]:
    """The recorded calls by the ids of their responses."""
    calls = recorded.tree.calls()
    return {str(step["id"]): call for step, call in zip(recorded.steps, calls, strict=False)}


class FamilyTool:
    """See `ToolRunner`. A tool of the task's family, which the gateway runs."""

    is_timed = True

    def __init__(self, tool: Tool, http: HttpClient) -> None:
        self.tool, self._http = tool, http

    async def run(self, arguments: Mapping[str, JsonValue]) -> str:
        body: JsonValue = {"name": self.tool.name, "arguments": dict(arguments)}
        response = await self._http.request("POST", "/v1/tools/call", encode_json(body))
        if not response.is_success:
            raise DataError(f"status {response.status}: {response.text[:200]}")
        return str(json.loads(response.content)["content"])
