"""The real OpenAI client against a gateway whose chat format is a model's own template: what is recorded is what was
sampled, and a template that rewrites its prefix branches, counted as such."""

import json
import logging
from pathlib import Path
from typing import Any

import openai
import pytest

from m2forge.errors import FormatError
from m2forge.gateway.config import GatewayConfig
from m2forge.gateway.format import load_format
from m2forge.gateway.history.history import Divergence
from m2forge.text.message import Message, tool_to_openai
from tests.gateway.dialogue import call
from tests.gateway.live import Live, check_recorded, live, num_new_tokens
from tests.text.draw import TOOLS
from tests.text.own_template import CODER, LLAMA, QWEN, R1, template_format, tokenizer_of

CHAT_TOOLS: list[Any] = [tool_to_openai(tool) for tool in TOOLS]
SAYS = [
    Message("assistant", "Looking.", "First a, then b.", (call(query="a"), call(query="b ß💥", limit=3))),
    Message("assistant", "All found.", "Done."),
    Message("assistant", "You are welcome.", "Polite."),
]
BARE = [Message("assistant", "", "", (call(query="a", limit=3),)), Message("assistant", "Found."), SAYS[1]]


def converse(gateway: Live, key: str, says: list[Message], *, is_streamed: bool) -> None:
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Find."}]
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0, timeout=20) as client:
        for number, said in enumerate(says):
            options: Any = {"model": "m", "messages": messages, "tools": CHAT_TOOLS}
            if is_streamed:
                with client.chat.completions.stream(**options) as stream:
                    received: Any = stream.get_final_completion().choices[0].message
            else:
                received = client.chat.completions.create(**options).choices[0].message
            calls = [json.loads(made.function.arguments) for made in received.tool_calls or []]
            assert ((received.content or ""), calls) == (said.content, [dict(one.arguments) for one in said.tool_calls])
            messages.append(received.model_dump(exclude_none=True, exclude={"parsed": True}))
            messages += [
                {"role": "tool", "tool_call_id": made.id, "content": f"result {number}"}
                for made in received.tool_calls or []
            ]
            if not received.tool_calls:
                messages.append({"role": "user", "content": f"Thanks {number}"})


@pytest.mark.parametrize(
    ("template", "says", "is_streamed"), [(CODER, SAYS, True), (LLAMA, BARE[:2], True), (LLAMA, BARE[:2], False)]
)
def test_a_conversation_is_recorded_as_sampled(template: str, says: list[Message], is_streamed: bool) -> None:
    format = template_format(template)
    with live(format, says) as gateway:
        episode, key = gateway.episode()
        converse(gateway, key, says, is_streamed=is_streamed)
        check_recorded(gateway, episode)
        assert gateway.counts.num_encoded == num_new_tokens(format, gateway.engine.seen())
        assert not any(episode.num_divergences.values())


def test_a_rewriting_template_branches_and_is_counted() -> None:
    with live(template_format(QWEN), SAYS) as gateway:
        episode, key = gateway.episode()
        converse(gateway, key, SAYS, is_streamed=False)
        check_recorded(gateway, episode)
        assert {kind: num for kind, num in episode.num_divergences.items() if num} == {Divergence.TEMPLATE: 1}


def test_tools_that_the_template_cannot_take_are_refused() -> None:
    with live(template_format(R1)) as gateway:
        _, key = gateway.episode()
        with (
            openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0) as client,
            pytest.raises(openai.BadRequestError, match="takes no tools"),
        ):
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}], tools=CHAT_TOOLS)


def test_the_config_allows_or_refuses_rewrites(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer_of(R1).save(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert load_format(tmp_path, GatewayConfig()).name == "template"
    (record,) = caplog.records
    assert "follows an answer (" in record.getMessage()
    assert "divergence `template`" in record.getMessage()
    with pytest.raises(FormatError, match="refuse"):
        load_format(tmp_path, GatewayConfig(prefix_rewrites="refuse"))
