"""mini-swe-agent, as its own bindings start it; LiteLLM inside finds URL and key in its environment.

LITELLM_LOCAL_MODEL_COST_MAP=True keeps LiteLLM from fetching prices, MSWEA_COST_TRACKING=ignore_errors has the agent do
without them.
"""

import os

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

SYSTEM = "You solve tasks by bash commands. When done: echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT, then the answer."


def main() -> None:
    model = LitellmModel(model_name="openai/policy")
    agent = DefaultAgent(model, LocalEnvironment(), system_template=SYSTEM, instance_template="{{task}}", step_limit=30)
    print(agent.run(os.environ["M2FORGE_TASK"])["submission"])


if __name__ == "__main__":
    main()
