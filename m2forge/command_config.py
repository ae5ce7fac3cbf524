"""The configuration class behind each command's options, imported when it is asked for."""

from m2forge.config_class import Config


def config_kinds(command: str) -> dict[str, type[Config]]:
    """The options of `command` that set config keys, and the class whose keys each sets."""
    if command == "gateway":
        from m2forge.gateway.config import GatewayConfig
        from m2forge.rollout.config import ServeConfig

        return {"--set": GatewayConfig, "--engine-set": ServeConfig}
    if command == "chat":
        from m2forge.inference.config import LLMConfig, SamplingParams

        return {"--set": LLMConfig, "--sampling": SamplingParams}
    kind = config_kind(command)
    return {} if kind is None else {"--set": kind}


def config_kind(command: str) -> type[Config] | None:
    """The class whose keys `--set` sets; None if `command` has no such option."""
    match command:
        case "params":
            from m2forge.model.config import ModelConfig

            return ModelConfig
        case "corpus":
            from m2forge.corpus.config import CorpusConfig

            return CorpusConfig
        case "pretrain":
            from m2forge.pretrain.config import PretrainConfig

            return PretrainConfig
        case "sft":
            from m2forge.sft.config import SFTConfig

            return SFTConfig
        case "rl":
            from m2forge.rl.config import RLConfig

            return RLConfig
        case "pipeline":
            from m2forge.pipelines.config import PipelineConfig

            return PipelineConfig
        case "eval":
            from m2forge.trials.config import TrialEvalConfig

            return TrialEvalConfig
        case "tasks":
            from m2forge.tasks.config import VerifyConfig

            return VerifyConfig
        case "serve":
            from m2forge.inference.config import ModelServerConfig

            return ModelServerConfig
    return None
