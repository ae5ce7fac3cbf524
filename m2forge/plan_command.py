"""`m2forge plan`: a preset, model folder or stage's TOML in; layouts over GPUs, best first, out."""

import argparse
import json
import logging
import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from m2forge.errors import ConfigError

if TYPE_CHECKING:
    from m2forge.model.config import ModelConfig
    from m2forge.plan.gpu import GPU
    from m2forge.plan.gpu_split import Split
    from m2forge.plan.measure import Calibration
    from m2forge.plan.parallel_layout import Plan, Workload
    from m2forge.plan.simulation import Ring
    from m2forge.pretrain.config import PretrainConfig
    from m2forge.rl.config import RLConfig
    from m2forge.sft.config import SFTConfig
    from m2forge.train.memory import TrainingStep

GB = 10**9
BFLOAT16 = 2
"""Bytes per weight of a sampler."""
SPREAD = 0.5
SAMPLING: "dict[str, tuple[type[int] | type[float], str, str]]" = {
    "sampler-rate": (float, "TOKENS/S", "of one sampler, with many attempts at a time; splits --gpus"),
    "attempt-rate": (float, "TOKENS/S", "most of one attempt"),
    "attempt-tokens": (float, "N", "sampled tokens of an attempt, on average"),
    "sampler-gpus": (int, "N", "GPUs of one sampler (default: 1)"),
    "attempt-seconds": (float, "S", "of an attempt beside its sampling: agent, verdict, storing (default: 0)"),
    "spread": (float, "S", f"deviation of an attempt's tokens over their mean (default: {SPREAD})"),
}
"""Options of the simulation; it needs the first three."""
NEEDED = tuple(SAMPLING)[:3]
_log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="SOURCE", help="a preset, a model folder, a hub id, or the TOML of pretrain, sft or rl"
    )
    parser.add_argument(
        "--gpus",
        type=int,
        default=8,
        metavar="N",
        help="GPUs that train; with --sampler-rate, that train or sample (default: 8)",
    )
    parser.add_argument("--gpu", default="H200", metavar="NAME", help="A100, H100, H200 or B200 (default: H200)")
    parser.add_argument("--price", type=float, default=3.0, metavar="USD", help="dollars per GPU hour (default: 3)")
    parser.add_argument(
        "--network",
        type=float,
        default=50.0,
        metavar="GB/S",
        help="a GPU's bandwidth to other nodes (default: 50, of a 400 Gb/s card)",
    )
    parser.add_argument("--top", type=int, default=10, metavar="N", help="layouts to print (default: 10)")
    parser.add_argument("--measure", action="store_true", help="time a rank's share of the best layout on this GPU")
    for name, (kind, metavar, help_text) in SAMPLING.items():
        parser.add_argument(f"--{name}", type=kind, metavar=metavar, help=f"rl: {help_text}")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    for name in ("gpus", "price", "network", "top"):
        if not 0 < getattr(args, name) < math.inf:
            raise ConfigError(f"--{name} {getattr(args, name)}: expected a finite number above 0")
    from m2forge.plan.gpu import find_gpu
    from m2forge.plan.gpu_split import remedy, split_gpus
    from m2forge.plan.parallel_layout import make_plans
    from m2forge.plan.report import render, render_calibration, render_splits, to_json

    gpu = find_gpu(args.gpu)
    workload, config = read_workload(args.source)
    sampling = read_sampling(args, config is not None)
    if args.measure:
        # The first import of torch and the search take seconds.
        _log.info(
            "--measure: finding the best layout for %d × %s, of which a rank's share is timed", args.gpus, gpu.name
        )
        refuse_other_gpu(gpu)

    def search(gpu: "GPU") -> "tuple[list[Plan], list[Split]]":
        """Layouts of the trainer's GPUs, and splits of all GPUs, best first."""

        def plans_on(num_gpus: int) -> "list[Plan]":
            return make_plans(workload, gpu, num_gpus, args.price, args.network * GB)

        if config is None or sampling is None:
            plans = plans_on(args.gpus)
            if args.measure and not plans[0].fits:
                raise ConfigError(
                    f"--measure: no layout fits on {args.gpus} × {gpu.name}, so no rank's share can be timed: "
                    f"{plans[0].layout} {plans[0].reason}; {remedy(plans_on, args.gpus)}"
                )
            return plans, []
        splits = split_gpus(plans_on, partial(make_ring, config, sampling), args.gpus, sampling.num_gpus, args.price)
        return plans_on(splits[0].plan.layout.num_gpus), splits

    if sampling is not None:
        sampling.refuse_unfit(workload, gpu)
    plans, splits = search(gpu)
    calibration = None
    if args.measure:
        calibration = measure_share(gpu, workload, plans[0])
        gpu = replace(gpu, rates=calibration.rates)
        plans, splits = search(gpu)
    if args.json:
        print(json.dumps(to_json(workload, plans, gpu, splits, calibration)))
        return
    print(render(workload, plans, gpu, plans[0].layout.num_gpus, args.price, args.top))
    if splits:
        print(render_splits(splits, args.gpus, gpu, str(sampling)))
    if calibration is not None:
        print(render_calibration(calibration))


def read_workload(source: str) -> "tuple[Workload, RLConfig | None]":
    """What `source` trains, and the configuration if it is an RL run's."""
    path = Path(source)
    if path.suffix == ".toml" and path.is_file():
        from m2forge.config import load, read_toml

        keys = read_toml(path).keys()
        if "phases" in keys:
            from m2forge.pretrain.config import PretrainConfig

            return _pretrain_workload(load(PretrainConfig, path)), None
        if "curriculum" in keys:
            from m2forge.rl.config import RLConfig

            config = load(RLConfig, path)
            return _rl_workload(config), config
        if "data" in keys:
            from m2forge.sft.config import SFTConfig

            return _sft_workload(load(SFTConfig, path)), None
    from m2forge.model.preset import resolve_config

    return network_workload(source, resolve_config(source)), None


def network_workload(name: str, network: "ModelConfig") -> "Workload":
    """Training at the native context, one path per micro-batch, a micro-batch per GPU."""
    from m2forge.plan.parallel_layout import Workload
    from m2forge.train.activation import MicroBatch

    context = network.max_context
    return Workload(f"{name} at its native context", network, MicroBatch(context, context, context, network.num_mtp))


def _pretrain_workload(config: "PretrainConfig") -> "Workload":
    from m2forge.model.preset import resolve_config
    from m2forge.plan.parallel_layout import Workload
    from m2forge.pretrain.model_config import network_config
    from m2forge.train.activation import MicroBatch
    from m2forge.train.config import WalkConfig

    # Before the corpus is built, the vocabulary is the model's own.
    if Path(config.corpus).exists():
        network = network_config(config)
    else:
        network = resolve_config(config.model, revision=config.revision, overrides=config.model_set)
    phase = max(config.phases, key=lambda phase: phase.pack_tokens)
    num_mtp = max(network.num_mtp, phase.num_mtp or 0)
    network = network.model_copy(update={"num_mtp": num_mtp})
    return Workload(
        f"{config.name}, phase {phase.name}",
        network,
        MicroBatch(phase.pack_tokens, phase.context, phase.pack_tokens, num_mtp, is_even=False),
        phase.packs_per_step,
        config.train.optimizer,
        offload=config.train.machine.offload,
        walk=config.train.machine.walk or WalkConfig(),
    )


def _sft_workload(config: "SFTConfig") -> "Workload":
    from m2forge.model.preset import resolve_config
    from m2forge.plan.parallel_layout import Workload
    from m2forge.train.activation import MicroBatch
    from m2forge.train.config import WalkConfig

    network = resolve_config(config.model, revision=config.revision)
    return Workload(
        config.name,
        network,
        MicroBatch(
            config.pack_tokens,
            config.data.context,
            config.pack_tokens,
            network.num_mtp,
            config.train.lora is None,
            is_even=False,
        ),
        config.packs_per_step,
        config.train.optimizer,
        config.train.lora,
        config.train.machine.offload,
        config.train.machine.walk or WalkConfig(),
    )


def _rl_workload(config: "RLConfig") -> "Workload":
    from m2forge.model.preset import resolve_config
    from m2forge.plan.parallel_layout import Workload
    from m2forge.train.activation import MicroBatch
    from m2forge.train.config import WalkConfig

    network = resolve_config(config.model, revision=config.revision)
    tokens = config.policy.pack_tokens
    context = min(
        tokens, max(domain.context for stage in config.curriculum.stages for domain in stage.domains.values())
    )
    num_mtp = network.num_mtp if config.policy.mtp_weight else 0
    return Workload(
        config.name,
        network,
        MicroBatch(tokens, context, tokens, num_mtp, config.train.lora is None, is_even=False),
        None,
        config.train.optimizer,
        config.train.lora,
        config.train.machine.offload,
        config.train.machine.walk or WalkConfig(),
    )


# -- calibrating -------------------------------------------------------------------------------------------------------


def refuse_other_gpu(gpu: "GPU") -> None:
    """Raise unless the GPU at hand is the plan's."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("--measure times training steps on a GPU, and torch sees none here; leave it out")
    name = torch.cuda.get_device_name()
    if gpu.name not in name:
        raise ConfigError(f"--measure: the GPU at hand is {name}, the plan is for {gpu.name}; give --gpu for this one")


def measure_share(gpu: "GPU", workload: "Workload", plan: "Plan") -> "Calibration":
    """Rates fitted to one rank's share of the plan's layout, timed on the GPU at hand."""
    import torch

    from m2forge.plan import measure
    from m2forge.plan.parallel_layout import rank_step

    device = torch.device("cuda")
    free, _ = torch.cuda.mem_get_info(device)

    def time_step(step: "TrainingStep") -> float:
        return measure.measure_step(step, device).seconds

    name = torch.cuda.get_device_name(device)
    _log.info("timing a rank's share of %s", plan.layout)
    return measure.calibrate(rank_step(workload, plan.layout), gpu.rates, free, time_step, name)


# -- RL ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sampling:
    """How fast an RL run samples: the options of the simulation."""

    rate: float
    """Tokens per second of one sampler."""
    attempt_rate: float
    attempt_tokens: float
    num_gpus: int
    """GPUs of one sampler."""
    spread: float
    own_s: float = 0.0
    """Seconds of an attempt beside its sampling."""

    def __str__(self) -> str:
        own = f" and {self.own_s:g} s" if self.own_s else ""
        return f"attempts of {self.attempt_tokens:,.0f} tokens{own}, {self.rate:,.0f} tokens/s per sampler"

    def refuse_unfit(self, workload: "Workload", gpu: "GPU") -> None:
        """Raise if a sampler's GPUs cannot hold the policy's weights."""
        from m2forge.train.memory import weight_bytes

        size, memory = weight_bytes(workload.network, BFLOAT16), gpu.datasheet.memory
        if size > self.num_gpus * memory:
            raise ConfigError(
                f"--sampler-gpus {self.num_gpus}: a sampler holds the whole policy, whose weights take "
                f"{size / GB:.0f} GB, and {gpu.name} has {memory / GB:.0f} GB; give {math.ceil(size / memory)} or more"
            )


def read_sampling(args: argparse.Namespace, is_rl: bool) -> Sampling | None:
    """The options of the simulation; None if none is given. Raises if they are incomplete or have no effect."""
    given = {name: value for name in SAMPLING if (value := getattr(args, name.replace("-", "_"))) is not None}
    if not given:
        return None
    first = f"--{next(iter(given))}"
    if not is_rl:
        raise ConfigError(f"{first}: only the TOML of rl has samplers, and {args.source} is none; leave it out")
    if missing := [f"--{name}" for name in NEEDED if name not in given]:
        raise ConfigError(f"{first}: simulating the run needs {' and '.join(missing)} too; give all or none")
    for name, value in given.items():
        may_be_0 = name in ("spread", "attempt-seconds")
        if not (0 <= value < math.inf if may_be_0 else 0 < value < math.inf):
            bound = "of at least 0" if may_be_0 else "above 0"
            raise ConfigError(f"--{name} {value}: expected a finite number {bound}")
    rate, attempt_rate, attempt_tokens = (given[name] for name in NEEDED)
    num_gpus, spread, own_s = (
        given.get("sampler-gpus", 1),
        given.get("spread", SPREAD),
        given.get("attempt-seconds", 0.0),
    )
    return Sampling(rate, attempt_rate, attempt_tokens, num_gpus, spread, own_s)


def make_ring(config: "RLConfig", sampling: Sampling, plan: "Plan", num_samplers: int) -> "Ring":
    from m2forge.plan.simulation import Ring

    group_tokens = config.group_size * sampling.attempt_tokens
    num_groups = config.curriculum.batch_groups
    if config.batch_tokens is not None:
        num_groups = max(1, min(num_groups, int(config.batch_tokens / group_tokens)))
    return Ring(
        batch_units=num_groups * config.units_per_group,
        attempts_per_unit=1 if config.pool.window.unit == "episode" else config.group_size,
        queue=config.pool.window.queue,
        window=config.pool.window.size,
        num_jobs=config.agent.num_jobs * max(1, config.cluster.agent_hosts),
        mean_tokens=sampling.attempt_tokens,
        spread=sampling.spread,
        sampler_rate=num_samplers * sampling.rate,
        attempt_rate=sampling.attempt_rate,
        step_s=num_groups * group_tokens / plan.tokens_per_s,
        own_s=sampling.own_s,
    )
