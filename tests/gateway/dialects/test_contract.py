"""Every dialect keeps the contract of dialects."""

import contextlib
from collections.abc import Iterator

import pytest

from tests.gateway import anthropic_client, openai_client
from tests.gateway.dialects.adapter_chat import ChatAdapter
from tests.gateway.dialects.adapter_completions import CompletionsAdapter
from tests.gateway.dialects.adapter_messages import MessagesAdapter
from tests.gateway.dialects.adapter_responses import ResponsesAdapter
from tests.gateway.dialects.dialect_contract import CONTRACT, CONVERSATION_CONTRACT, Adapter, Check

NAMES = ("chat", "completions", "responses", "messages")


@pytest.fixture(scope="module")
def adapters() -> Iterator[dict[str, Adapter]]:
    with contextlib.ExitStack() as stack:
        openai, anthropic = (stack.enter_context(one.connected()) for one in (openai_client, anthropic_client))
        yield {
            "chat": ChatAdapter(*openai),
            "completions": CompletionsAdapter(*openai),
            "responses": ResponsesAdapter(*openai),
            "messages": MessagesAdapter(*anthropic),
        }


def name(check: Check) -> str:
    return check.__name__.removeprefix("check_")


@pytest.mark.parametrize("dialect", NAMES)
@pytest.mark.parametrize("check", CONTRACT, ids=name)
def test_every_dialect_keeps_the_contract(adapters: dict[str, Adapter], dialect: str, check: Check) -> None:
    check(adapters[dialect])


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
@pytest.mark.parametrize("check", CONVERSATION_CONTRACT, ids=name)
def test_dialects_with_messages_keep_their_contract(adapters: dict[str, Adapter], dialect: str, check: Check) -> None:
    check(adapters[dialect])
