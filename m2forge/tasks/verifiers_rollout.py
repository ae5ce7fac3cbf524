"""Runs one rollout of an environment of the library verifiers, as the program of an attempt.

    python -P verifiers_rollout.py ENV INDEX                the task at INDEX of the environment's task set

The environment drives the rollout: its harness calls the policy at OPENAI_BASE_URL with OPENAI_API_KEY. The last line
of standard output is one JSON object: the reward, its parts, the metrics and the errors. This file imports nothing of
m2forge, because it runs in the attempt's workspace.
"""

import asyncio
import importlib
import json
import os
import sys


async def roll_out(env_id: str, index: int) -> dict[str, object]:
    vf = importlib.import_module("verifiers.v1")
    loaders = importlib.import_module("verifiers.v1.utils.loaders")
    agent = importlib.import_module("verifiers.v1.configs.agent").AgentConfig
    fields = loaders.env_config_type(env_id).model_fields
    # In the attempt's workspace, not in the library's cloud.
    roles = {name: {"runtime": {"type": "subprocess"}} for name in fields if isinstance(fields[name].default, agent)}
    env = loaders.load_environment(loaders.resolve_env_config({"taskset": {"id": env_id}, **roles}))
    task = next(iter(env.taskset.include(idx=[f"{index}:{index + 1}"])))
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    context = vf.ModelContext(model=os.environ["M2FORGE_MODEL"], client=client)
    async with env.serving():
        episode = await env.run_episode(task, context)
    traces = list(episode.traces)
    return {
        "ok": episode.ok,
        "reward": sum(trace.reward for trace in traces),
        "rewards": {name: part and part.value for trace in traces for name, part in trace.rewards.items()},
        "metrics": {name: value for trace in traces for name, value in trace.metrics.items()},
        "errors": [
            {"type": error.type, "message": error.message[-500:], "status": error.status_code}
            for error in [*episode.errors, *(error for trace in traces for error in trace.errors)]
        ],
    }


def main() -> None:
    env_id, index = sys.argv[1:]
    # The library and the environment may print; only the last line counts.
    print(f"\n{json.dumps(asyncio.run(roll_out(env_id, int(index))))}", flush=True)


if __name__ == "__main__":
    main()
