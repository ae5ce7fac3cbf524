"""The example data source: sound for the reader, the same every time, held out where it says so, and short."""

import inspect
import json.decoder
import json.encoder
import statistics
from collections import defaultdict
from pathlib import Path

from m2forge.sft.encode import Encoded, encode
from m2forge.sft.report import Report
from m2forge.sft.row_file import read_jsonl
from m2forge.sft.synthetic import TOOLS, Split, generate, write_jsonl
from m2forge.sft.trajectory import Trajectory
from m2forge.text.format import MINIMAX_M2_SPECIALS, make_format
from m2forge.text.tokenizer import Tokenizer, train_tokenizer

PYTHON_TYPE = {"string": str, "integer": int, "boolean": bool}


def read(folder: Path, num: int, split: Split) -> list[Trajectory]:
    path = folder / f"{split}.jsonl"
    write_jsonl(path, num, seed=7, split=split)
    report = Report()
    trajectories = list(read_jsonl(path, report))
    assert len(trajectories) == num
    assert not report.problems
    return trajectories


def test_every_call_fits_the_schema_of_a_tool_on_offer(tmp_path: Path) -> None:
    for trajectory in read(tmp_path, 300, "train"):
        tools = {tool.name: tool for tool in trajectory.tools}
        assert 1 <= len(tools) <= 3
        for message in trajectory.messages:
            for call in message.tool_calls:
                parameters = tools[call.name].parameters
                properties, required = parameters["properties"], parameters["required"]
                assert isinstance(properties, dict)
                assert list(call.arguments) == list(properties) == required
                for name, value in call.arguments.items():
                    assert type(value) is PYTHON_TYPE[properties[name]["type"]]


def test_all_tools_and_shapes_of_conversation_occur(tmp_path: Path) -> None:
    trajectories = read(tmp_path, 300, "train")
    turns = [[message for message in item.messages if message.role == "assistant"] for item in trajectories]
    names = {call.name for item in turns for message in item for call in message.tool_calls}
    assert names == set(TOOLS)
    assert {len(item) for item in turns} == {2, 3}
    assert {len(message.tool_calls) for item in turns for message in item} == {0, 1, 2}
    assert all(message.thinking for item in turns for message in item)
    assert all(item[-1].content and not item[-1].tool_calls for item in turns)


def test_the_held_out_split_uses_values_training_never_shows() -> None:
    values: dict[str, dict[str, set[str]]] = {split: defaultdict(set) for split in ("train", "held_out")}
    splits: tuple[Split, ...] = ("train", "held_out")
    for split in splits:
        for item in generate(2000, seed=1, split=split):
            for message in json.loads(json.dumps(item))["messages"]:
                for call in message.get("tool_calls", ()):
                    for name, value in json.loads(call["function"]["arguments"]).items():
                        if not isinstance(value, bool):
                            values[split][f"{call['function']['name']}.{name}"].add(str(value))
    assert values["train"].keys() == values["held_out"].keys()
    for name, seen in values["train"].items():
        assert seen
        assert not seen & values["held_out"][name], name


def test_it_is_the_same_every_time() -> None:
    assert list(generate(20, 3, "train")) == list(generate(20, 3, "train"))
    assert list(generate(20, 3, "train")) != list(generate(20, 4, "train"))


def test_trajectories_fit_a_small_context_and_are_short(tmp_path: Path) -> None:
    trajectories = read(tmp_path, 200, "train")
    texts = [inspect.getsource(module) for module in (statistics, json.decoder, json.encoder)]
    strange = train_tokenizer(texts, vocab_size=1024, specials=MINIMAX_M2_SPECIALS)
    lengths, rendered = encode_all(trajectories, strange)
    assert max(lengths) < 900
    assert statistics.mean(lengths) < 600
    lengths, _ = encode_all(trajectories, train_tokenizer([*texts, *rendered], 1024, MINIMAX_M2_SPECIALS))
    assert max(lengths) < 500


def encode_all(trajectories: list[Trajectory], tokenizer: Tokenizer) -> tuple[list[int], list[str]]:
    """Length and text of each."""
    chat_format = make_format("minimax_m2", tokenizer)
    encoded = [encode(trajectory, chat_format, 1024) for trajectory in trajectories]
    ids = [item.ids.tolist() for item in encoded if isinstance(item, Encoded) and not item.cut]
    assert len(ids) == len(trajectories)
    return [len(item) for item in ids], [tokenizer.decode(item) for item in ids]
