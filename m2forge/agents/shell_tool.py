"""A shell tool in the sandbox: each call runs in a new shell, and no process that it starts outlives it."""

from collections.abc import Mapping

from m2forge.protocols import Command, OutcomeReason, Sandbox
from m2forge.records import JsonValue
from m2forge.text.message import Tool

TOOL = Tool(
    "shell",
    "Run a command in a shell, in the workspace. Each call is a shell of its own; what it leaves running is ended.",
    {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
)


class ShellTool:
    """See `ToolRunner`."""

    tool = TOOL
    is_timed = False

    def __init__(self, sandbox: Sandbox, *, timeout_s: float) -> None:
        """The sandbox enforces `timeout_s`, so that the result includes the output up to then."""
        self._sandbox, self._timeout_s = sandbox, timeout_s

    async def run(self, arguments: Mapping[str, JsonValue]) -> str:
        argv = ("sh", "-c", str(arguments["command"]).replace("\0", ""))
        outcome = await self._sandbox.run(Command(argv, timeout_s=self._timeout_s, merges_stderr=True))
        text = outcome.stdout.text()
        match outcome.reason:
            case OutcomeReason.EXITED:
                return text if outcome.status == 0 else f"{text}\n[exit status {outcome.status}]"
            case OutcomeReason.TIMEOUT:
                return f"{text}\n[ended after {self._timeout_s:g} s, the most a command may take]"
            case OutcomeReason.SIGNALLED:
                return f"{text}\n[ended by signal {-outcome.status}]"
            case OutcomeReason.FLOODED | OutcomeReason.KILLED | OutcomeReason.TAMPERED:
                return f"{text}\n[{outcome.reason}]"
