"""From the text of Python's standard library to a small agent that calls tools, on two CPU cores.

    python examples/agent.py [--scale 1.0] [--runs runs/agent] [--text FOLDER]

Five stages, each of which `m2forge` also offers as a command, with the configurations in configs/:

    corpus     the standard library's files → scored, deduplicated token shards and a tokenizer
    pretrain   m2-nano from random weights: constant rate, decay, two longer contexts, one → three prediction modules
    data       trajectories made up by rule: think, call a tool, read its answer, think, answer
    sft        fine-tuning on them, with the thinking of every turn kept
    eval       the base model's held-out loss, and the agent's calls on requests with names that training never used

A stage that was killed goes on where it stopped, and one that is complete is not repeated. `--scale 0.5` trains half
as long, warmup included, and asks half as many held-out requests. `--text` names a folder of Python files to read
instead of the standard library.
"""

import os

# torch's CPU allocator reads this when it is loaded: keep freed memory for a second, for the next training step.
os.environ.setdefault("MIMALLOC_PURGE_DELAY", "1000")

import argparse
import json
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from m2forge.config import load
from m2forge.corpus.build import build_corpus
from m2forge.corpus.config import CorpusConfig
from m2forge.evaluate.config import EvalConfig
from m2forge.evaluate.predictor import ModelPredictor, complete
from m2forge.evaluate.report import EvalReport
from m2forge.evaluate.run import run_eval
from m2forge.files import write_atomic
from m2forge.model.checkpoint import load_model
from m2forge.pretrain.config import PretrainConfig
from m2forge.pretrain.stage import run_pretrain
from m2forge.sft.config import SFTConfig
from m2forge.sft.stage import run_sft
from m2forge.sft.synthetic import write_jsonl
from m2forge.text.format import make_format
from m2forge.text.message import message_from_openai, tool_from_openai
from m2forge.text.tokenizer import load_tokenizer

CONFIGS = Path(__file__).parent.parent / "configs"
NUM_TRAIN, NUM_HELD_OUT = 2200, 300
TRAIN_SEED, HELD_OUT_SEED = 0, 1

Result = TypeVar("Result")


def make_corpus(text: Path, folder: Path) -> Path:
    config = load(CorpusConfig, CONFIGS / "corpus" / "stdlib.toml", [f"sources.0.path={json.dumps(str(text))}"])
    print("\n".join(build_corpus(config, folder, num_workers=2).lines()))
    return folder


def pretrain(corpus: Path, runs: Path, scale: float) -> Path:
    path = CONFIGS / "pretrain" / "nano.toml"
    phases = load(PretrainConfig, path).phases
    steps = []
    for index, phase in enumerate(phases):
        steps.append(f"phases.{index}.steps={max(1, round(phase.steps * scale))}")
        steps.append(f"phases.{index}.warmup_steps={round(phase.warmup_steps * min(scale, 1.0))}")
    return run_pretrain(load(PretrainConfig, path, [f"corpus={json.dumps(str(corpus))}", *steps]), runs)


def make_trajectories(folder: Path, scale: float) -> tuple[Path, Path]:
    train, held_out = folder / "train.jsonl", folder / "held_out.jsonl"
    write_jsonl(train, round(NUM_TRAIN * scale), TRAIN_SEED, "train")
    write_jsonl(held_out, num_held_out(scale), HELD_OUT_SEED, "held_out")
    return train, held_out


def num_held_out(scale: float) -> int:
    """A trial run asks fewer, a longer one no more: an untrained network fills every answer to its bound."""
    return max(1, round(NUM_HELD_OUT * min(scale, 1.0)))


def fine_tune(model: Path, trajectories: Path, runs: Path) -> Path:
    settings = [f"model={json.dumps(str(model))}", f"data.sources.0.path={json.dumps(str(trajectories))}"]
    return run_sft(load(SFTConfig, CONFIGS / "sft" / "nano.toml", settings), runs)


def evaluate(base: Path, agent: Path, corpus: Path, prompts: Path) -> EvalReport:
    """The report on the agent; the base model's is shown."""
    run_eval(_eval_config("nano-base", {"model": base, "held_out.corpus": corpus}), console=Console())
    return run_eval(_eval_config("nano-agent", {"model": agent, "tool_calls.prompts": prompts}), console=Console())


def _eval_config(name: str, paths: dict[str, Path]) -> EvalConfig:
    paths = paths | {"output": paths["model"].parent / "eval"}
    settings = [f"{key}={json.dumps(str(path))}" for key, path in paths.items()]
    return load(EvalConfig, CONFIGS / "eval" / f"{name}.toml", settings)


def show_answer(folder: Path, prompts: Path) -> None:
    """One held-out request, and what the model does with it."""
    record = json.loads(prompts.read_text(encoding="utf-8").splitlines()[0])
    messages = [message_from_openai(message) for message in record["messages"][:2]]
    tools = [tool_from_openai(tool) for tool in record["tools"]]
    tokenizer = load_tokenizer(folder)
    chat = make_format("minimax_m2", tokenizer)
    prompt = chat.render(messages, tools, generation=True).ids
    (ids,) = complete(ModelPredictor(load_model(folder)), [prompt], max_new_tokens=160, stop_ids=chat.stop_ids)
    parser = chat.parser(tools)
    parser.feed(tokenizer.decode_bytes(ids))
    completion = parser.finish()
    print(f"\n{'-' * 80}\nrequest    {messages[-1].content}\ntools      {', '.join(tool.name for tool in tools)}")
    print(f"thinking   {completion.thinking}")
    for call in completion.tool_calls:
        print(f"call       {call.name}({', '.join(f'{key}={value!r}' for key, value in call.arguments.items())})")
    print("-" * 80)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small agent from the text of the standard library.")
    parser.add_argument("--scale", type=float, default=1.0, help="how long to train (default: 1.0)")
    parser.add_argument("--runs", type=Path, default=Path("runs/agent"), help="default: runs/agent")
    parser.add_argument(
        "--text", type=Path, default=Path(sysconfig.get_path("stdlib")), help="default: the standard library"
    )
    args = parser.parse_args()
    if not 0 < args.scale <= 100:
        parser.error(f"--scale {args.scale}: give a number above 0, at most 100")
    runs: Path = args.runs
    seconds: dict[str, float] = {}

    def timed(name: str, stage: Callable[[], Result]) -> Result:
        started_s = time.monotonic()
        result = stage()
        seconds[name] = time.monotonic() - started_s
        return result

    corpus = timed("corpus", lambda: make_corpus(args.text, runs / "corpus"))
    base = timed("pretrain", lambda: pretrain(corpus, runs, args.scale))
    train, held_out = timed("data", lambda: make_trajectories(runs / "trajectories", args.scale))
    agent = timed("sft", lambda: fine_tune(base, train, runs))
    report = timed("eval", lambda: evaluate(base, agent, corpus, held_out))
    show_answer(agent, held_out)
    share = report.score("tool_calls")
    write_atomic(runs / "summary.json", json.dumps({"seconds": seconds, "valid_calls": share}) + "\n")
    print("time       " + ", ".join(f"{name} {passed_s:.0f} s" for name, passed_s in seconds.items()))
    print(f"calls      {share:.1%} of {num_held_out(args.scale)} held-out requests got a well-formed call")
    print(f"model      {agent}, a Hugging Face folder with its tokenizer; the base model is {base}")
    print(f"right      {report.score('tool_calls_equal'):.1%} of the calls also had the values asked for")
    print(f"metrics    metrics.jsonl and TensorBoard events in {base.parent} and {agent.parent}")


if __name__ == "__main__":
    main()
