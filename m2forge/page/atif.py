"""Recorded attempts as ATIF-v1.8, Harbor's Agent Trajectory Interchange Format, with token ids: a run in, files out.

An attempt's calls form chains: each call of a chain continues where the one before it ended. A chain is one trajectory.
That of the last call of the main conversation is the document; the others (sub-agents, side calls, conversations that
an agent branched or rewrote) are embedded in `subagent_trajectories`, in the order of their first calls.

    a call                          an agent step: what the parser reads of its completion, and in `metrics` the ids of
                                    its prompt and completion and the completion's logprobs, exactly as recorded
    prompt tokens before it         system and user steps; results of tools are the observation of the agent step before
    turns of the assistant that     agent steps with `is_copied_context`, which training leaves out
    another chain has sampled

`prompt_token_ids` + `completion_token_ids` of a step are the prefix of the next step's prompt in the same trajectory.
Texts are read back from tokens by the run's chat format. A prompt that it cannot split into turns is one user step.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import numpy as np
from sqlalchemy import select

import m2forge
from m2forge.errors import ConfigError, DataError, M2ForgeError
from m2forge.files import staged_folder
from m2forge.page.episode_list import JOINED
from m2forge.page.episode_view import tools_of
from m2forge.page.message_part import LOOK_BACK, TokenText, cut_prompt
from m2forge.page.pool_reader import PoolReader
from m2forge.page.run_folder import Run
from m2forge.page.tree_outline import Trajectory
from m2forge.pool.lifecycle import EpisodeState
from m2forge.pool.queue import read_queue
from m2forge.pool.stored import TOOLS, StoredEpisode, read_roles, read_units
from m2forge.pool.tables import episode_table, unit_table
from m2forge.records import CallRole, JsonValue
from m2forge.text.format import ChatFormat
from m2forge.text.message import Message, Tool, ToolCall, tool_from_openai, tool_to_openai
from m2forge.text.parser import THINK_OPEN
from m2forge.tree.token_tree import Sample

VERSION = "ATIF-v1.8"
THINK_LEAD = f"{THINK_OPEN}\n"
MAX_SPLITS = 64
"""Places at which a system turn may divide into prompt and tools."""
_RESULT = re.compile(r"<(tool_response|response)>\n?(.*?)\n?</\1>", re.DOTALL)
Json = dict[str, JsonValue]


def write_atif(run_dir: Path, dest: Path, num: int | None = None, least: float | None = None) -> int:
    """Write one file for each attempt in the run's pool that has ended, and return how many. `num`: only that many, the
    newest. `least`: only those with at least that reward."""
    run = Run(run_dir)
    config, format = run.pool_config(), run.format()
    if config is None:
        raise ConfigError(f"{run_dir}: no run with a pool of attempts; give the directory of an RL run")
    if format is None:
        raise DataError(f"{run_dir}: the tokenizer of its model cannot be read, and attempts are stored as tokens")
    reader, num_written = PoolReader(config), 0
    try:
        with staged_folder(dest) as folder:
            for stored in _episodes(reader, num, least):
                document = convert(stored, format, _agent(run), run.name)
                (folder / f"{stored.name}.json").write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")
                num_written += 1
            if not num_written:
                raise DataError(f"{run_dir}: none of its attempts has ended{'' if least is None else ' so'}; try later")
    finally:
        reader.close()
    return num_written


def _episodes(reader: PoolReader, num: int | None, least: float | None) -> Iterator[StoredEpisode]:
    episode = episode_table.c
    query = select(episode.id, unit_table.c.id.label("unit")).select_from(JOINED).order_by(episode.id.desc())
    query = query.where(episode.num_calls > 0, episode.state.not_in((EpisodeState.QUEUED, EpisodeState.RUNNING)))
    if least is not None:
        query = query.where(episode.reward_total >= least)
    with reader.read() as connection:
        vocab_size = read_queue(connection).vocab_size
        wanted = connection.execute(query if num is None else query.limit(num)).all()
    ids = {row.id for row in wanted}
    for unit in dict.fromkeys(row.unit for row in wanted):
        with reader.read() as connection:
            (stored,) = read_units(connection, [unit], vocab_size)
            found = connection.execute(select(episode.id).where(episode.unit == unit).order_by(episode.id)).scalars()
            named = list(zip(found, stored.episodes, strict=True))
        yield from (attempt for id, attempt in named if id in ids)


def _agent(run: Run) -> Json:
    settings, model = run.config().get("agent"), run.config().get("model")
    table = settings if isinstance(settings, dict) else {}
    name = next((str(table[key]) for key in ("preset", "kind") if table.get(key)), "agent")
    agent: Json = {"name": name, "version": f"m2forge {m2forge.__version__}"}
    return agent | ({"model_name": model} if isinstance(model, str) else {})


# -- one attempt ------------------------------------------------------------------------------------------------------


def convert(stored: StoredEpisode, format: ChatFormat, agent: Mapping[str, JsonValue], session: str) -> Json:
    """The document of one attempt. `agent`: name, version and model. `session`: the run."""
    trajectory = Trajectory(stored.tree())
    tools = _tools(stored)
    roles = read_roles(stored.artifacts) or [str(CallRole.MAIN)] * len(trajectory.legs)
    chains: dict[int, list[int]] = {}
    for call, chain in enumerate(trajectory.chains):
        chains.setdefault(chain, []).append(call)
    mains = [call for call, role in enumerate(roles) if role == CallRole.MAIN] or [len(trajectory.legs) - 1]
    root = trajectory.chains[mains[-1]]
    if tools:
        agent = {**agent, "tool_definitions": [tool_to_openai(tool) for tool in tools]}
    documents: dict[int, Json] = {}
    for first, calls in chains.items():
        steps = _Chain(trajectory, format, tools).steps(calls)
        documents[first] = {
            "schema_version": VERSION,
            "session_id": session,
            "trajectory_id": stored.name if first == root else f"{stored.name}/{first}",
            "agent": dict(agent),
            "steps": steps,
            "final_metrics": _totals(trajectory, calls, len(steps)),
            "extra": {"role": roles[first], "calls": calls},
        }
    document = documents.pop(root)
    extra: Json = {"task": stored.task.id, "domain": str(stored.task.domain), "instruction": stored.task.instruction}
    if stored.reward is not None:
        extra |= {"reward": stored.reward.total, "perf": stored.reward.perf}
    if stored.failure is not None:
        extra["failure"] = stored.failure
    if "verdict" in stored.artifacts:
        extra["verdict"] = json.loads(stored.artifacts["verdict"])
    document["extra"] = {"role": roles[root], "calls": chains[root], **extra}
    if documents:
        document["subagent_trajectories"] = [documents[first] for first in sorted(documents)]
    return document


def _tools(stored: StoredEpisode) -> tuple[Tool, ...]:
    try:
        if TOOLS in stored.artifacts:
            return tuple(tool_from_openai(tool) for tool in json.loads(stored.artifacts[TOOLS]))
        return tools_of(stored.task) or ()
    except (M2ForgeError, ValueError):
        return ()


def _totals(trajectory: Trajectory, calls: Sequence[int], num_steps: int) -> Json:
    legs = [trajectory.legs[call] for call in calls]
    return {
        "total_prompt_tokens": sum(leg.num_prompt for leg in legs),
        "total_completion_tokens": sum(leg.num_tokens - leg.num_prompt for leg in legs),
        "total_steps": num_steps,
    }


@dataclass
class _Chain:
    """Builds the steps of one chain."""

    trajectory: Trajectory
    format: ChatFormat
    tools: tuple[Tool, ...]
    found: list[Json] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    """Ids of the calls of tools whose results have not been seen."""

    def steps(self, calls: Sequence[int]) -> list[JsonValue]:
        start = 0
        for call in calls:
            self._add_prompt(call, start)
            self._add_completion(call)
            start = self.trajectory.legs[call].num_tokens
        return list(self.found)

    def _add(self, source: str, message: str, **values: JsonValue) -> Json:
        step: Json = {"step_id": len(self.found) + 1, "source": source, "message": message}
        self.found.append(step | {key: value for key, value in values.items() if value is not None})
        return self.found[-1]

    def _add_prompt(self, call: int, start: int) -> None:
        """The turns of a prompt from token `start` on."""
        leg, text = self.trajectory.legs[call], TokenText(self.format)
        ids = self.trajectory.tokens(call, start, leg.num_prompt).tolist()
        before = self.trajectory.tokens(call, max(0, start - LOOK_BACK), start).tolist()
        texts = text.texts(ids)
        parts = cut_prompt(ids, texts, before, self.format)
        # Where the generation prompt opens thinking, completions begin inside it, and turns of the history do not.
        lead = THINK_LEAD if "".join(texts).endswith(THINK_LEAD) else ""
        for part in parts:
            turn = "".join(texts[part.start : part.end])
            match part.kind:
                case "system":
                    if (prompt := _system_prompt(self.format, turn, self.tools)) is not None:
                        self._add("system", prompt)
                case "observation":
                    self._add_results(turn)
                case "assistant":
                    self._add_answer(turn.removeprefix(lead), f"copied_{len(self.found)}", is_copied_context=True)
                case "user" | "context":
                    self._add("user", turn)

    def _add_completion(self, call: int) -> None:
        leg, sample = self.trajectory.legs[call], self.trajectory.samples[call]
        ids = self.trajectory.tokens(call, leg.num_prompt, leg.num_tokens).tolist()
        metrics: Json = {
            "prompt_tokens": leg.num_prompt,
            "completion_tokens": len(ids),
            "prompt_token_ids": self.trajectory.tokens(call, 0, leg.num_prompt).tolist(),
            "completion_token_ids": ids,
            # The shortest decimals that are the same float32.
            "logprobs": [float(str(value)) for value in np.asarray(sample.logprobs, np.float32)],
            "extra": _sampled(sample),
        }
        self._add_answer(
            "".join(TokenText(self.format).texts(ids)),
            f"call_{call}",
            timestamp=datetime.fromtimestamp(sample.started_s, UTC).isoformat(),
            metrics=metrics,
            llm_call_count=1,
        )

    def _add_answer(self, text: str, name: str, **values: JsonValue) -> None:
        parser = self.format.parser(self.tools)
        parser.feed(text)
        completion = parser.finish()
        calls = [_call(call, f"{name}_{index}") for index, call in enumerate(completion.tool_calls)]
        self.waiting = [str(call["tool_call_id"]) for call in calls]
        thinking = completion.thinking or None
        self._add("agent", completion.content, reasoning_content=thinking, tool_calls=calls or None, **values)

    def _add_results(self, turn: str) -> None:
        """Results of tools, which answer the calls before them in order."""
        contents = [match[2] for match in _RESULT.finditer(turn)]
        if not contents or len(contents) > max(1, len(self.waiting)):
            contents = [turn]
        results: list[JsonValue] = []
        for content in contents:
            linked: Json = {"source_call_id": self.waiting.pop(0)} if self.waiting else {}
            results.append(linked | {"content": content})
        agent = self.found[-1] if self.found and self.found[-1]["source"] == "agent" else None
        if agent is None:
            self._add("user", "\n\n".join(contents))
            return
        observation = agent.setdefault("observation", {"results": []})
        assert isinstance(observation, dict)
        observation["results"] = [*observation["results"], *results]


def _call(call: ToolCall, id: str) -> Json:
    return {"tool_call_id": id, "function_name": call.name, "arguments": dict(call.arguments)}


def _sampled(sample: Sample) -> Json:
    """How the tokens were sampled; the policy's versions as runs of [version, number of tokens]."""
    changes = [0, *(np.flatnonzero(np.diff(sample.versions)) + 1).tolist(), sample.versions.size]
    versions: list[JsonValue] = [
        [int(sample.versions[start]), end - start] for start, end in pairwise(changes) if end > start
    ]
    return {
        "finish_reason": str(sample.finish_reason),
        "temperature": sample.sampling.temperature,
        "policy_versions": versions,
        "seconds": round(sample.finished_s - sample.started_s, 6),
    }


def _system_prompt(format: ChatFormat, turn: str, tools: tuple[Tool, ...]) -> str | None:
    """The system message that the chat format renders as this turn, with the tools' definitions; None if it renders so
    without a system message; the turn itself if no such message is found."""
    ends = [match.start() for match in re.finditer("\n", turn)][:MAX_SPLITS]
    for prompt in (None, turn, "", *(turn[:end] for end in ends)):
        messages = [Message("user", "x")] if prompt is None else [Message("system", prompt), Message("user", "x")]
        try:
            ids = [int(id) for id in format.render(messages, tools).ids]
        except M2ForgeError:
            continue
        texts = TokenText(format).texts(ids)
        parts = cut_prompt(ids, texts, [], format)
        if any(part.kind == "system" and "".join(texts[part.start : part.end]) == turn for part in parts):
            return prompt
    return turn
