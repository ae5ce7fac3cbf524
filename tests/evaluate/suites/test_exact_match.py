"""Exact match after normalisation, for plain prompts and conversations."""

import json
from pathlib import Path

import numpy as np
import pytest

from m2forge.errors import DataError
from m2forge.evaluate.config import CompletionConfig
from m2forge.evaluate.prompts.prompt_file import read_prompts
from m2forge.evaluate.prompts.scored_sample import Sample
from m2forge.evaluate.suites.exact_match import AnswerPrompt, matches, normalised, parse_answer_prompt
from m2forge.evaluate.suites.suite import measure_exact_match, render_answer_prompts
from m2forge.records import JsonValue
from m2forge.text.format import MINIMAX_M2_SPECIALS, make_format
from m2forge.text.message import Message
from m2forge.text.tokenizer import train_tokenizer
from tests.evaluate.oracle import Oracle

USER: dict[str, JsonValue] = {"role": "user", "content": "2 + 2?"}


@pytest.mark.parametrize(
    ("completion", "answers", "right"),
    [
        (" Paris.\nThe capital of Spain is", ("Paris",), True),
        ("\n\n  the  Eiffel\ttower!", ("The Eiffel Tower",), True),
        ("Paris, France", ("Paris",), False),
        ("“four”", ("4", "Four"), True),
        ("ﬁve", ("five",), True),
        ("one\ntwo", ("one\ntwo",), True),
        ("", ("x",), False),
        ("-4", ("4",), False),
        (".5", ("5",), False),
        (".5.", (".5",), True),
        ('"Paris."', ("Paris",), True),
        (": Paris", ("Paris",), True),
        ("(a)", ("a",), False),
    ],
)
def test_a_completion_against_its_answers(completion: str, answers: tuple[str, ...], right: bool) -> None:
    assert matches(completion, AnswerPrompt("What?", (), answers)) is right


def test_content_of_a_conversation_counts_whole() -> None:
    prompt = AnswerPrompt("", (Message("user", "What?"),), ("4",))
    assert matches("4\n", prompt)
    assert not matches("4\nor 5", prompt)


def test_normalising_twice_changes_nothing() -> None:
    for text in (" A  b.", "'x'", "¿Qué?", "…"):
        assert normalised(normalised(text)) == normalised(text)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "x"}, "answer: expected"),
        ({"prompt": "x", "answer": []}, "answer: expected"),
        ({"prompt": "x", "answer": 4}, "answer: expected"),
        ({"prompt": "x", "answer": " . "}, "answer: expected"),
        ({"answer": "x"}, "either"),
        ({"prompt": "x", "messages": [USER], "answer": "x"}, "either"),
        ({"messages": [], "answer": "x"}, "conversation"),
        ({"messages": [USER, {"role": "assistant", "content": "4"}], "answer": "4"}, "conversation"),
    ],
)
def test_records_that_ask_nothing_are_refused(record: dict[str, JsonValue], message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_answer_prompt(record)


def test_a_suite_completes_plain_prompts_and_conversations(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["two and two are four, three and three are six"] * 4, 290, MINIMAX_M2_SPECIALS)
    chat = make_format("minimax_m2", tokenizer)
    path = tmp_path / "answers.jsonl"
    lines: list[dict[str, JsonValue]] = [
        {"prompt": "two and two are", "answer": "four"},
        {"prompt": "three and three are", "answer": ["6", "six"]},
        {"prompt": "four and two are", "answer": "six"},
        {"messages": [USER], "answer": "4"},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    file = read_prompts(path, parse_answer_prompt)
    asked = render_answer_prompts(tokenizer, chat, file)
    whole = chat.render([Message("user", "2 + 2?"), Message("assistant", "4", "Two and two.")])
    texts = [("two and two are", " four\nmore"), ("three and three are", " Six."), ("four and two are", " five\n")]
    pairs = [(tokenizer.encode(prompt), tokenizer.encode(rest)) for prompt, rest in texts]
    start = len(chat.render([Message("user", "2 + 2?")], generation=True).ids)
    stop = 1 + max(place for place, trained in enumerate(whole.trained) if trained)
    pairs.append((whole.ids[:start], whole.ids[start:stop]))
    samples = [Sample(np.array(a + b, np.int32), ((len(a), len(a) + len(b)),), 0) for a, b in pairs]
    oracle = Oracle(samples, vocab_size=tokenizer.vocab_size)
    config = CompletionConfig(prompts=path, max_new_tokens=40)
    measured = measure_exact_match(oracle, tokenizer, chat, asked, config, seed=0, max_pack_tokens=1000)
    (cell,) = measured.cells
    assert (cell.score, cell.num_samples) == (0.75, 4)
    assert [failure.line for failure in measured.failures] == [3]
    assert measured.failures[0].completion.startswith(" five\n")
    with pytest.raises(DataError, match="give `chat_format`"):
        render_answer_prompts(tokenizer, None, file)
    begun = render_answer_prompts(tokenizer, chat, file, begin_ids=(5,))
    assert [ids[0] == 5 for ids in begun.ids] == [True, True, True, False]
    assert begun.ids[0][1:] == asked.ids[0]
