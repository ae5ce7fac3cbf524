"""An agent of the OpenHands SDK, unmodified: `openhands_agent.py URL KEY`, in the workspace.

The conversation is stored after the first answer and resumed from the disk. Prints both answers as a JSON list.
"""

import json
import sys
import uuid
from pathlib import Path

from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.sdk.conversation.response_utils import get_agent_final_response
from openhands.tools.terminal import TerminalTool

url, key = sys.argv[1:]
llm = LLM(model="openai/policy", base_url=f"{url}/v1", api_key=key, num_retries=0, usage_id="agent")
id, folder = uuid.uuid4(), Path.home() / "conversations"
answers = []
for said in ("How many lines has f?", "And now?"):
    agent = Agent(llm=llm, tools=[Tool(name=TerminalTool.name)])
    conversation = Conversation(
        agent, workspace=".", persistence_dir=folder, conversation_id=id, visualizer=None, delete_on_close=False
    )
    conversation.send_message(said)
    conversation.run()
    answers.append(get_agent_final_response(conversation.state.events))
    conversation.close()
print(json.dumps(answers))
