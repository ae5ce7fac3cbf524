"""One side of the comparison on a CPU, in a process of its own: completes batches of prompts and says how long it took.

Started by rollout_cpu.py under each side's own Python. One JSON object a line comes in, {"prompts": [[id, ...], ...],
"num_new": n}, and one goes out, the fields of `Timed`, behind a mark, because libraries print lines of their own. All
requests of a batch arrive at once. Greedy; no token ends a completion early.

    python benchmarks/rollout_side.py m2forge|vllm|transformers FOLDER DTYPE NUM_THREADS [eager]
"""

import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rollout_watch import Timed, Watch

MAX_REQUESTS, MAX_CONTEXT = 32, 256
STEP_TOKENS = 1024
"""Token budget of a step, for sides that have such a setting: larger ones were not faster."""
MARK = "timed: "

Complete = Callable[[Sequence[Sequence[int]], int], Timed]


def m2forge_side(folder: Path, dtype: str) -> Complete:
    import numpy as np

    from m2forge.model.checkpoint import load_model
    from m2forge.protocols import Prompt
    from m2forge.records import PolicyVersion, Sampling
    from m2forge.rollout.config import RolloutConfig
    from m2forge.rollout.core import Core

    num_blocks = MAX_REQUESTS * MAX_CONTEXT // 16
    config = RolloutConfig(block_tokens=16, num_blocks=num_blocks, step_tokens=STEP_TOKENS, max_running=MAX_REQUESTS)
    core = Core(load_model(folder, dtype=getattr(torch, dtype)), config, PolicyVersion("benchmark", 0))

    def complete(prompts: Sequence[Sequence[int]], num_new: int) -> Timed:
        watch = Watch(len(prompts), num_new)
        for place, ids in enumerate(prompts):
            core.add(str(place), Prompt(np.array(ids, np.int32), num_new, Sampling(temperature=0.0)))
        while not core.is_idle:
            for id, chunk in core.step():
                watch.ids[int(id)] += chunk.ids.tolist()
            watch.note_step()
        return watch.timed()

    return complete


def vllm_side(folder: Path, dtype: str, *modes: str) -> Complete:
    # One process: an engine in a second one would take turns with it on the same cores.
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))[: torch.get_num_threads()])),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    vllm = importlib.import_module("vllm")  # by name: it is not there where types are checked
    engine = vllm.LLM(
        str(folder),
        dtype=dtype,
        max_model_len=MAX_CONTEXT,
        max_num_seqs=MAX_REQUESTS,
        max_num_batched_tokens=STEP_TOKENS,
        enforce_eager="eager" in modes,
    ).llm_engine
    num_batches = 0

    def complete(prompts: Sequence[Sequence[int]], num_new: int) -> Timed:
        nonlocal num_batches
        num_batches += 1
        params = vllm.SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True, detokenize=False)
        watch = Watch(len(prompts), num_new)
        for place, ids in enumerate(prompts):
            engine.add_request(f"{num_batches}.{place}", {"prompt_token_ids": list(ids)}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                watch.ids[int(output.request_id.split(".")[1].split("-")[0])] = list(output.outputs[0].token_ids)
            watch.note_step()
        return watch.timed()

    return complete


def transformers_side(folder: Path, dtype: str) -> Complete:
    from transformers import AutoModelForCausalLM, StoppingCriteria

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    model.generation_config.eos_token_id = None

    class Note(StoppingCriteria):
        """Called after every step with all tokens so far; ends nothing."""

        def __init__(self, watch: Watch, num_prompt: int) -> None:
            self.watch, self.num_prompt = watch, num_prompt

        def __call__(self, input_ids: torch.Tensor, scores: object, **options: object) -> torch.Tensor:
            self.watch.ids = input_ids[:, self.num_prompt :].tolist()
            self.watch.note_step()
            return torch.zeros(len(input_ids), dtype=torch.bool)

    def complete(prompts: Sequence[Sequence[int]], num_new: int) -> Timed:
        watch, tokens_BL = Watch(len(prompts), num_new), torch.tensor(prompts)
        model.generate(
            tokens_BL,
            attention_mask=torch.ones_like(tokens_BL),
            max_new_tokens=num_new,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=[Note(watch, tokens_BL.shape[1])],
        )
        return watch.timed()

    return complete


SIDES: dict[str, Callable[..., Complete]] = {
    "m2forge": m2forge_side,
    "vllm": vllm_side,
    "transformers": transformers_side,
}


def main() -> None:
    name, folder, dtype, num_threads, *modes = sys.argv[1:]
    torch.set_num_threads(int(num_threads))
    complete = SIDES[name](Path(folder), dtype, *modes)
    print(MARK, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        print(MARK + json.dumps(asdict(complete(order["prompts"], order["num_new"]))), flush=True)


if __name__ == "__main__":
    main()
