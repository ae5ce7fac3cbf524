"""The real mini-swe-agent, LiteLLM inside, runs unmodified against the gateway. (In ChatML: test_cli_agent.py.)"""

from pathlib import Path

import pytest

from m2forge.text.message import Message
from tests.agents.program import run_example, says, tool
from tests.gateway.dialogue import call

# It fetches no prices, tells nobody, keeps its settings in the workspace, and gives up at the first error.
ENV = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_GLOBAL_CONFIG_DIR": ".mini",
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
}
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo three"
LAST = Message("assistant", "", "Done.", (call("bash", command=SUBMIT),))


@pytest.mark.slow
def test_mini_swe_agent_is_recorded_token_for_token(tmp_path: Path) -> None:
    answer = run_example(
        "mini_swe_agent.py",
        format_name="minimax_m2",
        folder=tmp_path,
        script=says("bash", LAST),
        tools=[tool("bash", "Execute a bash command")],
        env=ENV,
    )
    assert answer.text == "three\n\n"
    assert (tmp_path / "attempt" / "workspace" / "g").read_text() == "ß💥\n"
