"""`--dry-run`: a validated configuration in, its resolved TOML and what would run out; starts and writes nothing.

Everything is read from configs, a model's config.json, the corpus manifest, and the names and sizes of files, without
torch. The report follows the TOML as comments, so that the output is a complete file for the same command. Memory
figures are exact sizes of the named tensors over the whole network; the peak of one rank on a GPU comes from
train/memory.py, without the allocator's free blocks.
"""

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from m2forge.config_class import Config
from m2forge.errors import ConfigError, ExistsError, NotFoundError
from m2forge.resolved import Line, resolved_lines

if TYPE_CHECKING:
    from m2forge.corpus.config import CorpusConfig
    from m2forge.gateway.config import GatewayConfig
    from m2forge.model.config import ModelConfig
    from m2forge.pipelines.config import PipelineConfig
    from m2forge.pretrain.config import PretrainConfig
    from m2forge.rl.config import RLConfig
    from m2forge.rollout.config import RolloutConfig, ServeConfig
    from m2forge.sft.config import SFTConfig
    from m2forge.train.config import EvalConfig as TrainEvalConfig
    from m2forge.train.config import TrainConfig
    from m2forge.train.memory import TrainingStep
    from m2forge.trials.config import TrialEvalConfig

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
NAME_WIDTH = 14
MEMORY_NOTE = "activations, logits and one micro-batch's gradients come on top"


def print_dry_run(
    configs: Mapping[str, Config], facts: Callable[[], Iterable[tuple[str, str]]], console: Console | None = None
) -> None:
    """Print the configs, by the option that sets their keys, then the facts. What the command would refuse to start
    with is raised after the configs, except for a hub model that cannot be found."""
    console = console or Console()
    for option, config in configs.items():
        console.print(f"# config ({option}); a comment gives the default where a value differs", highlight=False)
        for line in resolved_lines(config):
            console.print(_styled(line), soft_wrap=True, highlight=False)
        console.print()
    console.print("# what would run", highlight=False)
    previous = ""
    for name, text in facts():
        shown = "" if name == previous else name
        console.print(Text(f"# {shown:<{NAME_WIDTH}}{text}"), soft_wrap=True, highlight=False)
        previous = name


def _styled(line: Line) -> Text:
    style = "cyan" if line.text.startswith("[") else "bold" if line.note else ""
    return Text(line.text, style=style) + Text(str(replace(line, text="")), style="yellow")


# -- stages -----------------------------------------------------------------------------------------------------------


def describe_corpus(config: "CorpusConfig", dest: Path, num_workers: int) -> Iterator[tuple[str, str]]:
    from m2forge.corpus.manifest import MANIFEST_NAME
    from m2forge.corpus.read.source import list_parts
    from m2forge.corpus.write.stage_store import work_root

    total = 0
    for index, source in enumerate(config.sources):
        parts = list(list_parts([source], config.part_bytes))
        num_files = len({span.path for part in parts for span in part.spans})
        num_bytes = sum(part.num_bytes for part in parts)
        total += num_bytes
        yield (
            "sources",
            f"{index}: {source.path}: {_count(num_files, 'file')}, {_size(num_bytes)} in {_count(len(parts), 'part')}",
        )
    yield "processes", f"{num_workers} over {_size(total)}"
    tokenizer = config.tokenizer
    trained = f"trained on the documents, {tokenizer.vocab_size:,} tokens"
    yield "tokenizer", trained if tokenizer.path is None else tokenizer.path
    if (dest / MANIFEST_NAME).exists():
        yield "destination", f"{dest}: holds a corpus; it is reused if its input and configuration are the same"
    elif dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        raise ExistsError(f"{dest} holds something else than this corpus; choose another destination or remove it")
    else:
        state = "would resume the unfinished build" if work_root(dest).exists() else "new"
        yield "destination", f"{dest}: {state}"


def describe_pretrain(config: "PretrainConfig", runs: Path) -> Iterator[tuple[str, str]]:
    from m2forge.pretrain.model_config import has_weights, network_config

    for phase in config.phases:
        tokens = phase.packs_per_step * phase.pack_tokens
        yield "steps", f"{phase.name}: {phase.steps:,} × {tokens:,} tokens = {_number(phase.steps * tokens)} tokens"
    num_steps = sum(phase.steps for phase in config.phases)
    total = sum(phase.steps * phase.packs_per_step * phase.pack_tokens for phase in config.phases)
    yield "steps", f"together {num_steps:,} steps, {_number(total)} tokens"
    if config.eval is not None:
        yield _describe_evaluation(config.eval)
    yield _describe_run(runs / config.name, config, num_steps)
    network = network_config(config)
    num_mtp = max([network.num_mtp, *(phase.num_mtp or 0 for phase in config.phases)])
    network = network.model_copy(update={"num_mtp": num_mtp})
    origin = "its weights" if has_weights(config) else "random weights"
    yield from _describe_network(f"{config.model} ({origin})", network)
    largest = max(config.phases, key=lambda phase: phase.pack_tokens)
    packs = (largest.pack_tokens, largest.context, largest.packs_per_step)
    yield from _describe_training(config.train, network, partial(_pack_step, config.train, network, packs))


def describe_sft(config: "SFTConfig", runs: Path) -> Iterator[tuple[str, str]]:
    from m2forge.sft.dataset import list_files

    tokens = config.packs_per_step * config.pack_tokens
    yield (
        "steps",
        f"as many × {tokens:,} tokens as {_count(config.num_epochs, 'epoch')} of the encoded trajectories fill",
    )
    if config.eval is not None:
        yield _describe_evaluation(config.eval)
    yield _describe_run(runs / config.name, config, None)
    for source in config.data.sources:
        files = list_files(source)
        yield (
            "sources",
            f"{source.path}: {_count(len(files), 'file')}, {_size(sum(file.stat().st_size for file in files))}",
        )
    network, _ = _read_network(config.model, config.revision)
    yield from _describe_network(config.model, network)
    packs = (config.pack_tokens, config.data.context, config.packs_per_step)
    yield from _describe_training(config.train, network, partial(_pack_step, config.train, network, packs))


def describe_pipeline(config: "PipelineConfig", runs: Path) -> Iterator[tuple[str, str]]:
    from m2forge.pipelines.run import STORE_FILE, make_pipeline

    pipeline = make_pipeline(config)
    pipeline.source.fingerprint()
    yield "pipeline", next(iter(config.tables))
    yield "stages", " → ".join((pipeline.source.name, *(stage.name for stage in pipeline.stages)))
    for name, model in config.models.items():
        yield "models", f"{name}: {model.model} at {model.url}"
    run_dir = runs / config.name
    yield "run", f"{run_dir}: {'would be resumed' if (run_dir / STORE_FILE).exists() else 'new'}"


def describe_rl(config: "RLConfig", runs: Path) -> Iterator[tuple[str, str]]:
    from m2forge.rl.layout import TRAINER, gateway_names, host_names, sampler_names
    from m2forge.rl.preflight import refuse_misfit
    from m2forge.tasks.survey import survey
    from m2forge.train.memory import policy_step

    curriculum = config.curriculum
    for stage in curriculum.stages:
        length = "the rest" if stage.num_batches is None else f"{stage.num_batches:,} batches"
        for domain, ratio in stage.ratios().items():
            families = ", ".join(family.source for family in stage.domains[domain].families)
            share = f"{float(ratio):.0%} {domain}, context {stage.domains[domain].context:,}"
            yield "tasks", f"stage {stage.name} ({length}): {share}: {families}"
    # Refuses a family that cannot be opened, or has too few tasks.
    names = asyncio.run(
        survey(curriculum, config.verify, config.eval.num_tasks, config.eval.seed, config.reward.function)
    )
    per_step = curriculum.batch_groups * config.group_size
    limit = "" if config.batch_tokens is None else f", at most {config.batch_tokens:,} tokens per step"
    yield (
        "tasks",
        f"{_count(len(names), 'family', 'families')}; {config.num_steps * curriculum.batch_groups:,} groups to train",
    )
    groups = f"{config.num_steps:,} × {curriculum.batch_groups} groups × {config.group_size} attempts"
    yield "steps", f"{groups} = {config.num_steps * per_step:,} attempts{limit}"
    agent = config.agent
    preset = f" ({agent.preset})" if agent.kind == "command" and agent.preset else ""
    num_hosts = config.cluster.agent_hosts
    where = f" on each of {_count(num_hosts, 'agent host')}" if num_hosts else ""
    yield "agents", f"{agent.kind}{preset}, {agent.num_jobs} concurrent attempts{where}"
    servers = [*sampler_names(config.cluster), *gateway_names(config.cluster)]
    yield "processes", ", ".join([TRAINER, *servers, *host_names(config.cluster)])
    if config.eval.num_tasks:
        every = config.eval.every_steps
        between = f", every {every:,} steps" if every else ""
        when = f"before the first step{between} and after the last"
        yield "evaluation", f"{config.eval.num_tasks:,} held-out tasks {when}"
    yield _describe_run(runs / config.name, config, config.num_steps)
    network, folder = _read_network(config.model, config.revision)
    yield from _describe_network(config.model, network)
    refuse_misfit(config, network)
    make_step = partial(policy_step, config.train, network, config.policy)
    yield from _describe_training(config.train, network, make_step, "at least")
    yield from _describe_engine(folder, network, config.engine.rollout, config.engine.dtype)


def describe_eval(config: "TrialEvalConfig") -> Iterator[tuple[str, str]]:
    from m2forge.model.hub import find_model, is_hub_id
    from m2forge.model.preset import resolve_config

    for name, suite in zip(config.suite_names, config.suites, strict=True):
        samples = len(suite.sizes) * len(suite.positions) * suite.num_samples
        yield "suites", f"{name}: {samples:,} samples, {suite.decoding} decoding"
    if config.held_out is not None:
        most = config.held_out.num_packs * config.held_out.pack_tokens
        yield "suites", f"held-out loss over at most {_number(most)} tokens of {config.held_out.corpus}"
    for name, completions in (("tool_calls", config.tool_calls), ("exact_match", config.exact_match)):
        if completions is not None:
            if not completions.prompts.is_file():
                raise NotFoundError(f"{name}.prompts {str(completions.prompts)!r} is not a file; give a JSONL file")
            limit = "all" if completions.max_prompts is None else f"at most {completions.max_prompts:,}"
            yield "suites", f"{name}: {limit} prompts of {completions.prompts}"
    if config.trials is not None:
        trials = config.trials
        agent = f"{trials.agent.kind}, {trials.agent.num_jobs} concurrent attempts"
        yield "trials", f"{trials.num_trials} at each of {trials.num_tasks:,} tasks of {', '.join(trials.tasks)}"
        yield "agents", f"{agent}, sandbox {trials.agent.sandbox.backend}"
    yield "output", f"{config.output}: {'its report is replaced' if config.output.exists() else 'new'}"
    network = resolve_config(config.model, revision=config.revision)
    yield from _describe_network(config.model, network)
    is_fetched = is_hub_id(config.model)
    folder = find_model(config.model, config.revision, "config") if is_fetched else Path(config.model)
    yield from _describe_sampling(folder, network, config.dtype, config.max_pack_tokens)


def describe_server(model: str, revision: str | None, config: "ServeConfig") -> Iterator[tuple[str, str]]:
    """The native engine behind `serve` and `gateway`."""
    from m2forge.model.config_file import read_config
    from m2forge.model.hub import find_model

    path = find_model(model, revision, "config")
    if path.is_file():
        # A GGUF file has its config in its header, whose reader imports torch.
        from m2forge.model.gguf_file import GGUFSource

        network = GGUFSource(path).config
    else:
        network = read_config(path)
    yield from _describe_network(model, network)
    if config.rollout.speculation > network.num_mtp:
        raise ConfigError(
            f"rollout.speculation: {config.rollout.speculation} drafts need as many MTP modules; this model has "
            f"{network.num_mtp}"
        )
    yield from _describe_engine(path, network, config.rollout, config.dtype)


def describe_gateway(
    model: str, revision: str | None, config: "GatewayConfig", engine: "ServeConfig", kind: str, url: str | None
) -> Iterator[tuple[str, str]]:
    from m2forge.model.hub import find_folder

    if kind == "native":
        yield from describe_server(model, revision, engine)
    else:
        find_folder(model, revision, "config")
        yield "engine", f"the {kind} server at {url}"
    yield "journal", config.journal or "none: nothing is written to disk"


# -- parts ------------------------------------------------------------------------------------------------------------


def _read_network(model: str, revision: str | None) -> tuple["ModelConfig", Path]:
    """The network, and the folder that holds its config at least."""
    from m2forge.model.config_file import read_config
    from m2forge.model.hub import find_folder

    folder = find_folder(model, revision, "config")
    return read_config(folder), folder


def _describe_network(name: str, network: "ModelConfig") -> Iterator[tuple[str, str]]:
    from m2forge.model.count import count

    report = count(network)
    modules = f", {_count(network.num_mtp, 'MTP module')} included" if network.num_mtp else ""
    yield "model", f"{name}: {network.num_layers} layers, context {network.max_context:,}"
    yield "model", f"{_number(report.total_with_mtp)} parameters{modules}; {_number(report.active)} active per token"


def _describe_training(
    config: "TrainConfig", network: "ModelConfig", make_step: "Callable[[int], TrainingStep]", bound: str = "at most"
) -> Iterator[tuple[str, str]]:
    """`make_step`: returns what one rank of this number trains on CUDA. `bound`: how its memory bounds that of all
    steps."""
    from m2forge.train.config import TuneConfig
    from m2forge.train.memory import training_memory

    machine = config.machine
    lora = config.lora if isinstance(config, TuneConfig) else None
    by_device = {"cpu": "float32", "cuda": "bfloat16"}
    devices = [machine.device] if machine.device != "auto" else list(by_device)
    dtypes = dict.fromkeys(by_device[device] if machine.dtype == "auto" else machine.dtype for device in devices)
    for dtype in dtypes:
        size = training_memory(network, config.optimizer, ITEM_BYTES[dtype], lora)
        places = [device for device in devices if machine.dtype != "auto" or by_device[device] == dtype]
        together = size.weights + size.gradients + size.moments + size.masters
        masters = f", master weights {_size(size.masters)}" if size.masters else ""
        state = f"gradients {_size(size.gradients)}, {config.optimizer.kind} moments {_size(size.moments)}{masters}"
        sizes = f"weights {_size(size.weights)}, {state}; together {_size(together)}"
        yield "training", f"{dtype} ({' or '.join(places)}): {sizes}"
    if machine.offload == "host":
        yield "training", "moments and master weights are in host memory (offload)"
    machine.mesh.refuse_misfit(network)
    if not machine.mesh.is_single:
        yield "training", "each rank holds " + ("a shard of it" if machine.mesh.is_sharded else "all of it")
    mesh = machine.mesh
    if "cuda" not in devices or "auto" in (mesh.replicate, mesh.shard):
        yield "training", MEMORY_NOTE
    else:
        yield "training", _describe_peak(make_step(math.prod(mesh.shape)), bound)


def _pack_step(
    config: "TrainConfig", network: "ModelConfig", packs: tuple[int, int, int], num_ranks: int
) -> "TrainingStep":
    """`packs`: tokens, longest document and number of the packs of a step."""
    from m2forge.train.activation import MicroBatch
    from m2forge.train.config import TuneConfig
    from m2forge.train.memory import machine_step

    lora = config.lora if isinstance(config, TuneConfig) else None
    num_tokens, context, num_packs = packs
    batch = MicroBatch(num_tokens, context, num_tokens, network.num_mtp, lora is None)
    return machine_step(config.machine, "cuda", network, config.optimizer, batch, num_packs, lora, num_ranks)


def _describe_peak(step: "TrainingStep", bound: str) -> str:
    from m2forge.train.memory import rank_memory

    memory = rank_memory(step)
    parts = sorted(memory.components.items(), key=lambda item: -item[1])
    named = ", ".join(f"{name} {_size(size)}" for name, size in parts)
    pack = f"of {step.batch.num_tokens:,} tokens in a pack"
    return f"on CUDA a rank needs {bound} {_size(memory.total)} at once, {pack}, in the {memory.moment}: {named}"


def _describe_evaluation(config: "TrainEvalConfig") -> tuple[str, str]:
    return "evaluation", f"every {config.every:,} steps, at most {_number(config.num_tokens)} held-out tokens"


def _describe_engine(
    folder: Path, network: "ModelConfig", config: "RolloutConfig", dtype: str
) -> Iterator[tuple[str, str]]:
    from m2forge.rollout.kv.cache_size import cache_bytes
    from m2forge.train.memory import weight_bytes

    kind, note = _engine_dtype(folder, dtype)
    weights = weight_bytes(network, ITEM_BYTES[kind])
    cache = cache_bytes(network, config, ITEM_BYTES[kind])
    num_tokens = config.num_blocks * config.block_tokens
    blocks = f"{config.num_blocks:,} blocks × {config.block_tokens} tokens = {num_tokens:,} tokens"
    yield "engine", f"{kind}{note}: weights {_size(weights)}, KV cache {_size(cache)} ({blocks})"
    yield "engine", f"at most {config.max_running} running requests, {config.step_tokens:,} tokens per step"


def _describe_sampling(
    folder: Path, network: "ModelConfig", dtype: str, cache_tokens: int
) -> Iterator[tuple[str, str]]:
    """The engine of an evaluation, whose KV cache grows with its samples up to a limit."""
    from m2forge.train.memory import weight_bytes

    kind, note = _engine_dtype(folder, dtype)
    per_token = 2 * network.attention.kv_width * network.num_layers * ITEM_BYTES[kind]
    cache = f"KV cache at most {_size(cache_tokens * per_token)} ({cache_tokens:,} tokens), or one longer sample"
    yield "engine", f"{kind}{note}: weights {_size(weight_bytes(network, ITEM_BYTES[kind]))}, {cache}"


def _engine_dtype(folder: Path, dtype: str) -> tuple[str, str]:
    """The dtype of an engine's weights and KV cache, and a remark on it."""
    from m2forge.model.config_file import read_public

    if dtype in ITEM_BYTES:
        return dtype, ""
    if not folder.exists():
        return "float32", " (random weights)"
    public = read_public(folder) if folder.is_dir() else {}
    stored = str(public.get("dtype") or public.get("torch_dtype"))
    probe = "; a CPU that decodes faster in float32 uses that" if dtype == "auto" else ""
    if stored in ITEM_BYTES:
        return stored, f" (as stored{probe})"
    return "bfloat16", f" (assumed: config.json names no dtype{probe})"


def _describe_run(run_dir: Path, config: Config, num_steps: int | None) -> tuple[str, str]:
    from m2forge.train.position import CHECKPOINT_FOLDER, MODEL_FOLDER, newest_checkpoint, read_position
    from m2forge.train.run_dir import refuse_changes

    newest = newest_checkpoint(run_dir / CHECKPOINT_FOLDER)
    position = None if newest is None else read_position(newest)
    refuse_changes(run_dir, config, None if position is None else position.last_begun)
    if (run_dir / MODEL_FOLDER).is_dir():
        state = f"finished; {run_dir / MODEL_FOLDER} exists"
    elif position is None:
        state = "starts over; it has no checkpoint" if run_dir.exists() else "new"
    else:
        state = f"resumes after step {position.step:,}" + (f" of {num_steps:,}" if num_steps else "")
    return "run", f"{run_dir}: {state}"


def _count(number: int, noun: str, plural: str = "") -> str:
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def _size(num_bytes: int) -> str:
    from m2forge.model.count import short

    return f"{short(num_bytes, 'KMGT')}B" if num_bytes >= 1000 else f"{num_bytes} bytes"


def _number(number: int) -> str:
    from m2forge.model.count import short

    return short(number)
