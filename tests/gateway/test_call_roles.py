"""Which conversation a recorded call belongs to: main, a sub-agent's, or a request on the side."""

from collections.abc import Sequence
from pathlib import Path

import httpx2

from m2forge.gateway.admin import describe_calls
from m2forge.gateway.config import GatewayConfig
from m2forge.gateway.episodes.episode import Episode
from m2forge.records import JsonValue
from tests.gateway.dialogue import minimax
from tests.gateway.live import Live, live

TOOL: JsonValue = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


class Client:
    """Sends conversations under one key."""

    def __init__(self, gateway: Live) -> None:
        self.gateway, self.num_sent = gateway, 0
        self.episode, self._key = gateway.episode()

    def ask(self, messages: Sequence[JsonValue], *, has_tools: bool = True) -> list[JsonValue]:
        """The conversation with the answer."""
        body = {"model": "m", "messages": [*messages], "max_tokens": 6} | ({"tools": [TOOL]} if has_tools else {})
        headers = {"Authorization": f"Bearer {self._key}"}
        answer = httpx2.post(f"{self.gateway.url}/v1/chat/completions", json=body, headers=headers).raise_for_status()
        return [*messages, answer.json()["choices"][0]["message"]]

    def roles(self) -> list[tuple[str, int]]:
        calls = self.gateway.run(lambda: describe_calls(self.episode))["calls"]
        assert isinstance(calls, list)
        return [(call["role"], call["conversation"]) for call in calls]


def user(text: str) -> JsonValue:
    return {"role": "user", "content": text}


def system(text: str) -> JsonValue:
    return {"role": "system", "content": text}


def test_titles_are_side_calls_and_other_roots_sub_agents() -> None:
    with live(minimax(), config=GatewayConfig(port=0)) as gateway:
        client = Client(gateway)
        client.ask([system("Title it."), user("Do the work.")], has_tools=False)
        main = client.ask([system("Work."), user("Do the work.")])
        part = client.ask([system("Work on a part."), user("Do a part.")])
        client.ask([*part, user("Sure?")])
        main = client.ask([*main, user("Go on.")])
        notes = client.ask([system("Take notes."), user("One.")], has_tools=False)
        client.ask([*notes, user("Two.")], has_tools=False)
        client.ask([system("A commit message."), user("The diff.")], has_tools=False)
        client.ask([*main, user("And now?")])
        assert client.roles() == [
            ("side", 0),
            ("main", 1),
            ("sub_agent", 2),
            ("sub_agent", 2),
            ("main", 1),
            ("sub_agent", 3),
            ("sub_agent", 3),
            ("side", 4),
            ("main", 1),
        ]
        described = gateway.run(lambda: describe_calls(client.episode))
    assert isinstance(described["messages"], list)
    assert [message["content"] for message in described["messages"] if message["role"] == "user"] == [
        "Do the work.",
        "Go on.",
        "And now?",
    ]


def test_without_tools_anywhere_no_call_is_on_the_side() -> None:
    with live(minimax(), config=GatewayConfig(port=0)) as gateway:
        client = Client(gateway)
        client.ask([user("One.")], has_tools=False)
        client.ask([user("Another.")], has_tools=False)
        assert client.roles() == [("main", 0), ("sub_agent", 1)]


def test_a_conversation_whose_context_is_cut_stays_the_same() -> None:
    """A window that drops turns, and notes that replace all of them."""
    with live(minimax(), config=GatewayConfig(port=0)) as gateway:
        client = Client(gateway)
        messages = client.ask([system("Work."), user("Do the work.")])
        messages = client.ask([*messages, user("Go on.")])
        client.ask([*messages[:2], *messages[3:], user("Further.")])
        client.ask([*messages[:2], {"role": "assistant", "content": "Notes."}, user("Further.")])
        assert client.roles() == [("main", 0)] * 4


def test_a_restored_episode_describes_its_calls_as_before(tmp_path: Path) -> None:
    folder = str(tmp_path)
    with live(minimax(), config=GatewayConfig(port=0, journal=folder)) as gateway:
        client = Client(gateway)
        client.ask([user("Title.")], has_tools=False)
        client.ask([user("Do the work.")])
        before, id = gateway.run(lambda: describe_calls(client.episode)), client.episode.id
    with live(minimax(), config=GatewayConfig(port=0, journal=folder)) as gateway:

        def describe() -> dict[str, JsonValue]:
            episode = gateway.episodes.get(id)
            assert isinstance(episode, Episode)
            return describe_calls(episode)

        assert gateway.run(describe) == before
