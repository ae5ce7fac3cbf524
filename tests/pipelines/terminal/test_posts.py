"""The reader of Posts.xml: joins, gates on attributes, both notations of tags, cut and hostile dumps."""

import gzip
import runpy
from pathlib import Path

import pytest

from m2forge.errors import DataError, NotFoundError
from m2forge.pipelines.config import PipelineConfig
from m2forge.pipelines.stage import Item, Rejection
from m2forge.pipelines.terminal.config import TerminalConfig
from m2forge.pipelines.terminal.posts import PostsSource, read_rows, read_tags

SAMPLE = Path(__file__).parent.parent.parent.parent / "examples" / "terminal"
HEAD, END = '<?xml version="1.0" encoding="utf-8"?>\n<posts>\n', "</posts>\n"


def question(id: int, tags: str = "&lt;bash&gt;", accepted: int | None = None, score: int = 5) -> str:
    answer = f' AcceptedAnswerId="{accepted}"' if accepted is not None else ""
    return (
        f'<row Id="{id}" PostTypeId="1"{answer} Score="{score}" Tags="{tags}" Title="T{id}" Body="&lt;p&gt;q&#xA;{id}"'
        f' OwnerUserId="3" ContentLicense="CC BY-SA 4.0" />\n'
    )


def answer(id: int, parent: int) -> str:
    return f'<row Id="{id}" PostTypeId="2" ParentId="{parent}" Score="1" Body="a{id}" OwnerDisplayName="Eve" />\n'


def read(tmp_path: Path, text: str) -> list[Item | Rejection]:
    path = tmp_path / "Posts.xml"
    path.write_text(text)
    return list(PostsSource(path, TerminalConfig(posts=str(path))).questions())


def test_questions_are_joined_with_their_accepted_answers(tmp_path: Path) -> None:
    rows = [question(1, accepted=12), question(2, "|awk|", accepted=10), answer(10, 2), answer(11, 1), answer(12, 1)]
    first, second = read(tmp_path, HEAD + "".join(rows) + END)
    assert isinstance(first, Item)
    assert isinstance(second, Item)
    assert (first.id, second.id) == ("2", "1")
    assert (first.data["answer"], second.data["answer"]) == ("a10", "a12")
    assert second.data["question"] == "<p>q\n1"
    assert second.data["licence"] == "CC BY-SA 4.0 and unknown"
    assert second.data["authors"] == ["user 3", "Eve"]


def test_attributes_that_do_not_pass_are_rejected_with_evidence(tmp_path: Path) -> None:
    rows = [question(1), question(2, accepted=9, score=1), question(3, "|css|", accepted=9), question(4, accepted=8)]
    found = read(tmp_path, HEAD + "".join(rows) + answer(7, 4) + END)
    assert [(one.reason, one.id, dict(one.evidence)) for one in found if isinstance(one, Rejection)] == [
        ("no accepted answer", "1", {"answers": "0"}),
        ("low score", "2", {"score": 1}),
        ("no terminal tag", "3", {"tags": ["css"]}),
        ("accepted answer missing", "4", {"answer": "8"}),
    ]
    assert len(found) == 4


def test_a_damaged_row_is_rejected_and_the_rest_goes_on(tmp_path: Path) -> None:
    rows = [question(1, accepted=9), question(2, accepted=9), question(3, accepted=8).replace(' Id="3"', "")]
    found = read(tmp_path, HEAD + "".join(rows) + answer(9, 1) + END)
    reasons = [one.reason if isinstance(one, Rejection) else one.id for one in found]
    assert reasons == ["answer of another question", "no id", "1"]


def test_licences_of_question_and_answer_are_kept(tmp_path: Path) -> None:
    other = answer(2, 1).replace(" />", ' ContentLicense="CC BY-SA 3.0" />')
    (found,) = read(tmp_path, HEAD + question(1, accepted=2) + other + END)
    assert isinstance(found, Item)
    assert found.data["licence"] == "CC BY-SA 4.0 and CC BY-SA 3.0"


@pytest.mark.parametrize("text", ["<bash><command-line>", "|bash|command-line|"])
def test_tags_are_read_in_both_notations(text: str) -> None:
    assert read_tags(text) == ["bash", "command-line"]


def test_a_cut_dump_is_one_message_and_the_rest_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = HEAD + question(1, accepted=2) + answer(2, 1) + question(3, accepted=4) + answer(4, 3)
    for cut in (whole, whole[:-40], whole[:-40] + "\x00<"):
        caplog.clear()
        found = read(tmp_path, cut)
        assert isinstance(found[0], Item)
        assert found[0].id == "1"
        (message,) = [record.getMessage() for record in caplog.records]
        assert "cut or damaged after" in message


def test_a_cut_compressed_dump_is_one_message(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "Posts.xml.gz"
    rows = "".join(question(id, accepted=id + 1) + answer(id + 1, id) for id in range(1, 40_000, 2))
    path.write_bytes(gzip.compress((HEAD + rows + END).encode())[:-2000])
    assert len(list(read_rows(path))) > 100
    assert len(caplog.records) == 1


def test_a_dump_with_entities_of_its_own_is_refused(tmp_path: Path) -> None:
    bomb = '<!DOCTYPE posts [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]>\n<posts><row Id="&b;"/></posts>'
    with pytest.raises(DataError, match="defines entities"):
        read(tmp_path, bomb)


def test_a_missing_or_packed_dump_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such file"):
        PostsSource(tmp_path / "Posts.xml", TerminalConfig(posts="x")).fingerprint()
    with pytest.raises(DataError, match=r"unpack Posts\.xml first"):
        list(read_rows(tmp_path / "posts.7z"))


def test_models_and_sources_of_the_table_are_checked() -> None:
    for table, problem in (
        ({"posts": "x", "solver": {"model": "m"}}, r"terminal: no table models\.m"),
        ({"posts": "x", "repair_model": "m"}, r"terminal: no table models\.m"),
        ({"posts": "x", "solver": {}}, "expected one of model and command"),
        ({"posts": "x", "eg": "y"}, "expected one of posts, eg and intercode, received posts, eg"),
    ):
        with pytest.raises(ValueError, match=problem):
            PipelineConfig.model_validate({"name": "n", "terminal": table})


def test_the_sample_is_what_its_sources_say() -> None:
    xml, labels = runpy.run_path(str(SAMPLE / "build.py"))["build"]()
    assert (SAMPLE / "Posts.xml").read_text() == xml
    assert (SAMPLE / "labels.jsonl").read_text() == labels
    assert (labels.count('"sound": true'), labels.count('"sound": false')) == (80, 40)
