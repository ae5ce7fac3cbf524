"""Rules, domains, topics and the classifier on texts of which one knows what they are."""

import re
from pathlib import Path

import numpy as np
import pytest

from m2forge.corpus.config import CorpusConfig, QualityConfig, Rule, Source
from m2forge.corpus.judge.classifier import load_classifier, train_classifier
from m2forge.corpus.judge.feature import Feature, FeatureArray, count_features
from m2forge.corpus.judge.quality import PASSED, broken_rules, rule_scores
from m2forge.corpus.judge.scan import Scanner, domain_of_name, recognise
from m2forge.corpus.judge.topic import group, sketch, sketch_sums
from m2forge.corpus.judge.words import cut, shingles
from m2forge.errors import DataError

PROSE = """The river had risen in the night, and by morning it stood at the foot of the garden wall. Nobody in the house
had slept much. They had carried the carpets upstairs, and then the books, and had waited for what would come next.
In the kitchen the old clock went on as if the matter did not concern it at all. Breakfast was bread and cold tea."""
CODE = """def read(path):
    with open(path) as file:
        return [line.strip() for line in file if line]

class Reader:
    def __init__(self, path):
        self.lines = read(path)
"""


def features_of(*texts: str) -> FeatureArray:
    batch = cut([text.encode() for text in texts])
    return count_features(batch, shingles(batch, 5))


def broken(text: str, *, is_code: bool = False, config: QualityConfig | None = None) -> Rule | None:
    index = int(broken_rules(features_of(text), np.array([is_code]), config or QualityConfig())[0])
    return None if index == PASSED else list(Rule)[index]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (PROSE, None),
        ("Too short to say.", Rule.TOO_SHORT),
        ("a b c d e f " * 20, Rule.WORD_LENGTH),
        ("#tag " + "word and " * 1 + "#other thing " * 15 + PROSE[:80], Rule.SYMBOLS),
        (" ".join(f"{n} {n * 7919}" for n in range(100, 200)), Rule.ALPHABETIC),
        ("\n".join(f"- item {word} here is listed" for word in PROSE.split()[:60]), Rule.BULLETS),
        ("\n".join(f"{line}..." for line in PROSE.split(",")), Rule.ELLIPSES),
        ("\n".join([PROSE.replace("\n", " "), *["Click on this line."] * 4]), Rule.REPEATED_LINES),
        ("the same seven words come here again " * 20, Rule.REPEATED_WORDS),
        (PROSE + " cookie cookies login subscribe newsletter lorem ipsum", Rule.BOILERPLATE),
        (PROSE[:150] + "A" * 200, Rule.BLOB),
    ],
)
def test_each_rule_drops_what_it_is_for(text: str, rule: Rule | None) -> None:
    assert broken(text) == rule


def test_code_is_judged_by_rules_of_its_own() -> None:
    assert broken(CODE, is_code=True) is None
    assert broken("x = [" + "1234567, " * 400 + "]", is_code=True) in (Rule.ALPHABETIC, Rule.BLOB)
    assert broken("var a=1;" * 300 + "function f(){}", is_code=True) in (Rule.BLOB, Rule.REPEATED_WORDS)
    assert broken("x", is_code=True) == Rule.TOO_SHORT


def test_only_rules_in_force_drop() -> None:
    config = QualityConfig(rules=(Rule.BLOB,))
    assert broken("Too short to say.", config=config) is None


def test_scores_rank_prose_above_noise() -> None:
    noise = "buy $$$ {} [] 0x1 0x2 = = = now\n" * 5
    scores = rule_scores(features_of(PROSE, noise), np.array([False, False]))
    assert scores[0] > 0.9 > scores[1]


def test_features_count_what_they_name() -> None:
    (row,) = features_of("Hello, the World 42!\n- one two\n- one two\nand so...")
    assert row[Feature.WORDS] == 10
    assert row[Feature.DIGITS] == 2
    assert row[Feature.LINES] == 4
    assert row[Feature.BULLET_LINES] == 2
    assert row[Feature.REPEATED_LINES] == 1
    assert row[Feature.ELLIPSIS_LINES] == 1
    assert row[Feature.STOPPED_LINES] == 2
    assert row[Feature.STOP] == 2


def test_a_document_in_windows_counts_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    scanner = Scanner(CorpusConfig(sources=(Source(path="x"),)), None)
    texts = [PROSE.encode(), (PROSE * 3).encode(), b"short"]
    whole = scanner.measure(texts)
    monkeypatch.setattr("m2forge.corpus.judge.scan.windows", lambda text: re.findall(rb".{1,200}\s|.+", text))
    cut_up = scanner.measure(texts)
    assert len(cut_up.features) == 3
    for feature in (Feature.WORDS, Feature.STOP, Feature.LETTERS):
        assert cut_up.features[:, feature].tolist() == whole.features[:, feature].tolist()
    # Only shingles across the cuts are lost, a few in a hundred.
    assert float((cut_up.signature == whole.signature).mean()) > 0.7


def test_domains_are_recognised() -> None:
    maths = (
        "Theorem. Let p be a prime. Proof. By the lemma the polynomial has an integral root, and the corollary holds."
    )
    academic = (
        "Abstract. We test the hypothesis of Smith et al. Keywords: sleep. References: doi 10.1, arXiv 2, Journal of X."
    )
    qa = "Question: what is it? Answer: a thing. Question: why? Answer: because. Question: who? Answer: me."
    book = ("Chapter one. " + PROSE) * 100
    found = recognise(features_of(PROSE, CODE * 4, maths, academic, qa, book))
    assert found.tolist() == ["web", "code", "maths", "academic", "qa", "books"]
    assert domain_of_name("src/Main.JAVA") == "code"
    assert domain_of_name("notes.txt") is None


def test_documents_on_one_topic_fall_into_one_group() -> None:
    rng = np.random.default_rng(0)
    vocabulary = [[f"{topic}word{n}" for n in range(60)] for topic in ("alpha", "beta", "gamma")]
    topic = rng.integers(0, 3, 90)
    texts = [" ".join(rng.choice(vocabulary[t], 80)) for t in topic]
    member, likeness = group(sketch(sketch_sums(cut([text.encode() for text in texts]))), 3)
    pairs = {(int(t), int(m)) for t, m in zip(topic, member, strict=True)}
    assert len(pairs) == 3
    assert likeness.min() > 0.5


def test_the_classifier_learns_and_survives_saving(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    words = PROSE.split()
    good = [" ".join(rng.choice(words, 60)).encode() for _ in range(40)]
    bad = [" ".join(rng.choice([*words[:20], "casino", "viagra", "jackpot"], 60)).encode() for _ in range(40)]
    classifier = train_classifier(good[:30], bad[:30])
    again = train_classifier(good[:30], bad[:30])
    assert np.array_equal(classifier.weight, again.weight)
    classifier.save(tmp_path / "classifier.bin")
    loaded = load_classifier(tmp_path / "classifier.bin")
    scores = loaded.scores(loaded.sums(cut([*good[30:], *bad[30:]])))
    assert np.array_equal(scores, classifier.scores(classifier.sums(cut([*good[30:], *bad[30:]]))))
    assert scores[:10].min() > 0.6
    assert scores[10:].max() < 0.4
    with pytest.raises(DataError, match="examples of both classes"):
        train_classifier(good, [])
