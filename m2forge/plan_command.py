"""`m2forge plan`: a preset, model folder or stage's TOML in; layouts over GPUs, best first, out."""

import argparse
import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from m2forge.errors import ConfigError

if TYPE_CHECKING:
    from m2forge.model.config import ModelConfig
    from m2forge.plan.gpu import GPU
    from m2forge.plan.parallel_layout import Plan, Workload
    from m2forge.plan.simulation import Balance, Ring
    from m2forge.pretrain.config import PretrainConfig
    from m2forge.rl.config import RLConfig
    from m2forge.sft.config import SFTConfig

GB = 10**9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="SOURCE", help="a preset, a model folder, a hub id, or the TOML of pretrain, sft or rl"
    )
    parser.add_argument("--gpus", type=int, default=8, metavar="N", help="GPUs that train (default: 8)")
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
    parser.add_argument("--measure", action="store_true", help="calibrate on the GPU at hand first")
    parser.add_argument("--sampler-rate", type=float, metavar="TOKENS/S", help="rl: of all samplers together")
    parser.add_argument("--attempt-rate", type=float, metavar="TOKENS/S", help="rl: most of one attempt")
    parser.add_argument(
        "--attempt-tokens", type=float, metavar="N", help="rl: sampled tokens of an attempt, on average"
    )
    parser.add_argument("--spread", type=float, default=0.5, metavar="S", help="rl: their deviation over their mean")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    for name in ("gpus", "price", "network", "top"):
        if getattr(args, name) <= 0:
            raise ConfigError(f"--{name} {getattr(args, name)}: expected a number above 0")
    from m2forge.plan.gpu import find_gpu
    from m2forge.plan.parallel_layout import make_plans
    from m2forge.plan.report import render, render_balance, to_json

    gpu = find_gpu(args.gpu)
    workload, config = read_workload(args.source)
    if args.measure:
        gpu = calibrated(gpu, workload)
    plans = make_plans(workload, gpu, args.gpus, args.price, args.network * GB)
    balance, assumed = None, ""
    if config is not None:
        balance, assumed = _simulate(config, plans[0], args)
    if args.json:
        print(json.dumps(to_json(workload, plans, gpu, balance)))
        return
    print(render(workload, plans, gpu, args.gpus, args.price, args.top))
    if balance is not None:
        print(render_balance(balance, assumed))


def read_workload(source: str) -> "tuple[Workload, RLConfig | None]":
    """What `source` trains, and the configuration if it is an RL run's."""
    path = Path(source)
    if path.suffix == ".toml" and path.is_file():
        keys = tomllib.loads(path.read_text(encoding="utf-8")).keys()
        from m2forge.config import load

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


def calibrated(gpu: "GPU", workload: "Workload") -> "GPU":
    """The GPU with rates fitted to steps of some of the workload's layers on the GPU at hand."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("--measure times training steps on a GPU, and torch sees none here; leave it out")
    name = torch.cuda.get_device_name()
    if gpu.name not in name:
        raise ConfigError(f"--measure: the GPU at hand is {name}, the plan is for {gpu.name}; give --gpu for this one")
    from m2forge.plan.measure import calibrating_steps, fit, measure_step

    device = torch.device("cuda")
    free, _ = torch.cuda.mem_get_info(device)
    steps = calibrating_steps(workload.network, workload.optimizer, free)
    records = [(step, measure_step(step, device).seconds) for step in steps]
    return replace(gpu, rates=fit(records, gpu.rates, f"measured by --measure on {name}"))


# -- RL ----------------------------------------------------------------------------------------------------------------


def _simulate(config: "RLConfig", plan: "Plan", args: argparse.Namespace) -> "tuple[Balance | None, str]":
    from m2forge.plan.simulation import simulate

    given = (args.sampler_rate, args.attempt_rate, args.attempt_tokens)
    if any(value is None for value in given):
        return None, ""
    ring = make_ring(config, plan, *given, args.spread)
    return simulate(ring), f"attempts of {ring.mean_tokens:,.0f} tokens, sampled at {ring.sampler_rate:,.0f} tokens/s"


def make_ring(
    config: "RLConfig", plan: "Plan", sampler_rate: float, attempt_rate: float, attempt_tokens: float, spread: float
) -> "Ring":
    from m2forge.plan.simulation import Ring

    attempts = config.curriculum.batch_groups * config.group_size
    num_tokens = attempts * attempt_tokens if config.batch_tokens is None else config.batch_tokens
    return Ring(
        batch_units=config.batch_units,
        attempts_per_unit=1 if config.pool.window.unit == "episode" else config.group_size,
        queue=config.pool.window.queue,
        window=config.pool.window.size,
        num_jobs=config.agent.num_jobs,
        mean_tokens=attempt_tokens,
        spread=spread,
        sampler_rate=sampler_rate,
        attempt_rate=attempt_rate,
        step_s=num_tokens / plan.tokens_per_s,
    )
