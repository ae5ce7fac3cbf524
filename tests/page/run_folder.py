"""A folder of runs of every stage, as the commands write them."""

import json
from pathlib import Path

from m2forge.config import write_resolved
from m2forge.corpus.manifest import Kind, Manifest, Shard, TokenSet, write_manifest
from m2forge.evaluate.report import DomainLoss, EvalReport, make_cell
from m2forge.pipelines.config import PipelineConfig, QuestionsConfig
from m2forge.pipelines.store import StageYield

START_S = 1_790_000_000.0
CONFIGS = {
    "pretrain": 'corpus = "c"\nmodel = "m2-nano"\n[[phases]]\nsteps = {steps}\n',
    "sft": 'model = "{root}/demo/pretrain/model"\n[data]\n',
    "rl": 'model = "{root}/demo/sft/model"\nnum_steps = {steps}\n[agent]\n[curriculum]\n',
}


def write_run(
    root: Path, name: str, stage: str = "pretrain", num_steps: int = 10, *, is_finished: bool = True, scale: float = 1.0
) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(CONFIGS[stage].format(root=root, steps=num_steps))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, num_steps + 1):
            file.write(metrics_line(step, stage, scale))
            if stage == "sft" and step == 2:
                # A held-out evaluation has a line of its own, only after some steps.
                file.write(json.dumps({"step": step, "time_s": START_S + 2.0 * step, "eval/loss": 1.5}) + "\n")
    if is_finished:
        (folder / "model").mkdir()
    return folder


def metrics_line(step: int, stage: str, scale: float = 1.0) -> str:
    record: dict[str, float] = {"step": step, "time_s": START_S + 2.0 * step, "loss": scale * 8 / step}
    record |= {"grad_norm": 1 / step}
    if stage == "rl":
        record |= {"tokens_computed": 500.0, "reward": step / 20, "perf": step / 40}
    else:
        record |= {"num_tokens": 100.0 * step, "tokens_per_s": 5000.0}
    return json.dumps(record) + "\n"


def write_evaluation(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "eval.toml").write_text('model = "m"\n')
    cells = (make_cell("needle", "needle", [1.0, 0.5], [True, False], length=64),)
    loss = DomainLoss(domain="all", num_tokens=10, nats_per_token=2.5, bits_per_byte=1.25)
    EvalReport(model="runs/base/model", num_parameters=1, max_context=64, seed=0, cells=cells, losses=(loss,)).save(
        folder
    )


def write_corpus(folder: Path) -> None:
    folder.mkdir(parents=True)
    sets = [
        TokenSet(
            domain=domain,
            split="train",
            kind=kind,
            shards=(Shard(name="a", num_documents=3, num_tokens=1000, sha256=""),),
        )
        for domain, kind in (("web", Kind.PLAIN), ("code", Kind.PLAIN), ("web", Kind.LONG))
    ]
    write_manifest(
        folder,
        Manifest(
            fingerprint="f",
            tokenizer="t",
            vocab_size=64,
            token_bytes=2,
            end_of_text_id=None,
            mixture={"web": 0.5, "code": 0.5},
            sets=tuple(sets),
        ),
    )


def write_checks(run_dir: Path, *successes: float) -> None:
    lines = [{"step": 5 * index, "num_tasks": 100, "success": success} for index, success in enumerate(successes)]
    (run_dir / "checks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def make_demo(root: Path) -> Path:
    """Runs of one chain of stages below `root/demo`, beside an evaluation and a corpus."""
    write_run(root, "demo/pretrain")
    write_run(root, "demo/sft", "sft", 6, scale=0.5)
    write_checks(write_run(root, "demo/rl", "rl"), 0.25, 0.75)
    write_evaluation(root / "demo" / "pretrain" / "eval")
    write_corpus(root / "pages")
    return root


def write_pipeline(folder: Path, *, is_finished: bool) -> None:
    """The files of a pipeline's run as `m2forge pipeline` writes them."""
    questions = QuestionsConfig(source="counters")
    write_resolved(PipelineConfig(name="questions", questions=questions), folder / "config.toml")
    stages = [
        StageYield("tasks", 12, 12, 12),
        StageYield("gates", 12, 9, 9, {"reference fails": 2}, {"OSError": 1}, 4, 3, 50, 70, 1.5),
    ]
    found = {"is_finished": is_finished, "num_accepted": 9, "stages": [one.to_json() for one in stages]}
    (folder / "yields.json").write_text(json.dumps(found))
