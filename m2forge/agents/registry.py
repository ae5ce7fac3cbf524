"""Creates operations from their configuration, or from their name and parameters in a log."""

from collections.abc import Mapping, Sequence

from m2forge.agents.config import DropToolOutputConfig, OperationConfig, SlidingWindowConfig, SummariseConfig
from m2forge.agents.drop_tool_output import DropToolOutput
from m2forge.agents.operation import Operation
from m2forge.agents.sliding_window import SlidingWindow
from m2forge.agents.summarise import Summarise
from m2forge.config import Config, build
from m2forge.errors import NotFoundError, suggest
from m2forge.records import JsonValue

_CONFIGS: Mapping[str, type[SlidingWindowConfig | SummariseConfig | DropToolOutputConfig]] = {
    SlidingWindow.name: SlidingWindowConfig,
    Summarise.name: SummariseConfig,
    DropToolOutput.name: DropToolOutputConfig,
}


def make_operation(config: OperationConfig) -> Operation:
    match config:
        case SlidingWindowConfig():
            return SlidingWindow(config)
        case SummariseConfig():
            return Summarise(config)
        case DropToolOutputConfig():
            return DropToolOutput(config)


def find_operation(name: str, parameters: Mapping[str, JsonValue], own: Sequence[Operation] = ()) -> Operation:
    """The operation of `own` with this name and these parameters, otherwise a built-in one."""
    for operation in own:
        if operation.name == name and operation.parameters == parameters:
            return operation
    if name not in _CONFIGS:
        known = {*_CONFIGS, *(operation.name for operation in own)}
        raise NotFoundError(f"operation {name!r} with {dict(parameters)} is not known; {suggest(name, known)}")
    kind: type[Config] = _CONFIGS[name]
    return make_operation(build(kind, parameters, origin=f"operation {name}"))  # type: ignore[arg-type]  # one of those
