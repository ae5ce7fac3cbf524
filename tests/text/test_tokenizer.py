"""Tokenizers: trained, saved, loaded from folders and GGUF files, and always exact to the byte."""

import copy
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from m2forge.errors import DataError, NotFoundError
from m2forge.text.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from m2forge.text.vocabulary import byte_of_sign
from tests.bounds import within
from tests.text.draw import TRAINING_TEXTS, hostile_text, m2_tokenizer, with_chat_template


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# -- text and bytes ---------------------------------------------------------------------------------------------------


@given(hostile_text)
def test_every_text_comes_back_byte_for_byte(text: str) -> None:
    tokenizer = m2_tokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert tokenizer.decode(ids) == text
    assert b"".join(tokenizer.decode_bytes([id]) for id in ids) == text.encode()
    assert tokenizer.encode_batch([text, "", text]) == [ids, [], ids]


@given(hostile_text)
def test_text_never_becomes_a_special_token(text: str) -> None:
    assert not set(m2_tokenizer().encode(text)) & set(m2_tokenizer().special_ids.values())


def test_special_tokens_are_placed_by_name() -> None:
    tokenizer = m2_tokenizer()
    assert tokenizer.special("<|endoftext|>") == tokenizer.end_of_text_id == 0
    assert tokenizer.decode_bytes([tokenizer.special("]~b]"), *tokenizer.encode("ai")]) == b"]~b]ai"
    with pytest.raises(NotFoundError, match="no special token '<thinks>'; did you mean '<think>'"):
        tokenizer.special("<thinks>")


def test_ids_outside_the_vocabulary_are_refused() -> None:
    for id in (-1, m2_tokenizer().vocab_size, 2**40):
        with pytest.raises(NotFoundError, match=f"token id {id} is not in the vocabulary"):
            m2_tokenizer().decode([id])


def test_text_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(DataError, match=r"text 1 of 2 .* lone surrogate U\+D800 at character 1"):
        m2_tokenizer().encode_batch(["a", "b\ud800"])
    with pytest.raises(DataError, match="lone surrogate"):
        train_tokenizer(["\udfff"], 300, [])


def test_a_copy_for_another_process_escapes_special_tokens() -> None:
    for copied in (pickle.loads(pickle.dumps(m2_tokenizer())), copy.deepcopy(m2_tokenizer())):
        assert copied.encode("]~b]ai") == m2_tokenizer().encode("]~b]ai")
        assert copied.special_ids == m2_tokenizer().special_ids


def test_ids_may_come_from_an_array() -> None:
    ids = np.array(m2_tokenizer().encode("naïve"), dtype=np.int32)
    assert m2_tokenizer().decode(ids) == "naïve"  # type: ignore[arg-type]  # what a token shard gives


# -- training ---------------------------------------------------------------------------------------------------------


def test_training_is_deterministic(tmp_path: Path) -> None:
    for name in ("a", "b"):
        train_tokenizer(iter(TRAINING_TEXTS), 380, ["<|endoftext|>", "<x>"]).save(tmp_path / name)
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_training_learns_words_and_leaves_long_numbers_in_threes() -> None:
    tokenizer = train_tokenizer(["counting 123456 " * 50], 400, [])
    assert len(tokenizer.encode(" counting")) == 1
    assert [tokenizer.decode([id]) for id in tokenizer.encode("123456")] == ["123", "456"]
    assert tokenizer.end_of_text_id is None


@pytest.mark.parametrize(
    ("vocab_size", "specials", "message"),
    [
        (257, ["<a>", "<b>"], "vocab_size: expected at least 258, .* received 257"),
        (300, ["<a>", "<a>"], "must be different"),
        (300, [""], "not empty"),
    ],
)
def test_a_vocabulary_that_cannot_be_is_refused(vocab_size: int, specials: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        train_tokenizer(TRAINING_TEXTS, vocab_size, specials)


# -- folders ----------------------------------------------------------------------------------------------------------


@given(st.lists(hostile_text, max_size=4))
def test_a_saved_tokenizer_is_the_same_here_and_in_transformers(texts: list[str]) -> None:
    ours, loaded, peer = saved_and_loaded()
    for text in texts:
        # A peer told not to look for special tokens in the text takes it as we do.
        expected = peer.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert ours.encode(text) == loaded.encode(text) == expected


_SAVED: list[tuple[Tokenizer, Tokenizer, Any]] = []


def saved_and_loaded() -> tuple[Tokenizer, Tokenizer, Any]:
    if not _SAVED:
        import tempfile

        tokenizer = with_chat_template(m2_tokenizer(), "{{ messages[0].content }}")
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save(Path(folder))
            _SAVED.append((tokenizer, load_tokenizer(Path(folder)), AutoTokenizer.from_pretrained(folder)))
    return _SAVED[0]


def test_names_specials_and_template_survive_saving() -> None:
    ours, loaded, peer = saved_and_loaded()
    assert loaded.special_ids == ours.special_ids
    assert (loaded.vocab_size, loaded.end_of_text_id, loaded.names) == (ours.vocab_size, 0, ours.names)
    assert loaded.chat_template == ours.chat_template == peer.chat_template
    assert (len(peer), peer.eos_token_id) == (ours.vocab_size, 0)
    assert peer.encode("]~b]ai", add_special_tokens=False)[0] == ours.special("]~b]")


def test_saving_without_a_template_removes_an_old_one(tmp_path: Path) -> None:
    with_chat_template(m2_tokenizer(), "x").save(tmp_path)
    m2_tokenizer().save(tmp_path)
    assert load_tokenizer(tmp_path).chat_template is None


def edit(path: Path, change: Callable[[Any], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_added_tokens_that_are_not_special_are_escaped_too(tmp_path: Path) -> None:
    m2_tokenizer().save(tmp_path)
    edit(
        tmp_path / "tokenizer.json", lambda content: [token.update(special=False) for token in content["added_tokens"]]
    )
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.special("<think>") not in tokenizer.encode("a <think> b")
    tokenizer.save(tmp_path / "again")
    assert not json.loads((tmp_path / "again" / "tokenizer.json").read_text())["added_tokens"][0]["special"]


def test_added_runs_of_spaces_are_text(tmp_path: Path) -> None:
    m2_tokenizer().save(tmp_path)
    id = m2_tokenizer().vocab_size
    spaces = {"id": id, "content": " " * 8, "single_word": False, "lstrip": False, "rstrip": False}
    added = spaces | {"normalized": True, "special": False}
    edit(tmp_path / "tokenizer.json", lambda content: content["added_tokens"].append(added))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode(" " * 8) == [id]
    assert tokenizer.decode_bytes([id]) == b" " * 8
    assert " " * 8 not in tokenizer.special_ids


def test_what_folders_of_models_hold_is_understood(tmp_path: Path) -> None:
    m2_tokenizer().save(tmp_path)
    settings = {
        "eos_token": {"content": "[e~[", "lstrip": False},
        "bos_token": None,
        "chat_template": [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.names.eos, tokenizer.names.bos, tokenizer.chat_template) == ("[e~[", None, "d")
    (tmp_path / "chat_template.jinja").write_text("j")
    assert load_tokenizer(tmp_path).chat_template == "j"
    (tmp_path / "tokenizer_config.json").unlink()
    assert load_tokenizer(tmp_path / "tokenizer.json").special_ids == tokenizer.special_ids


def overwrite(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def change(update: Callable[[Any], object]) -> Callable[[Path], object]:
    return lambda folder: edit(folder / "tokenizer.json", update)


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda folder: shutil.rmtree(folder), NotFoundError, "does not exist"),
        (lambda folder: (folder / "tokenizer.json").unlink(), NotFoundError, "holds no tokenizer.json"),
        (overwrite("tokenizer.json", "{"), DataError, "tokenizer.json: not a tokenizer"),
        (lambda folder: (folder / "tokenizer.json").write_bytes(b"\xff"), DataError, "tokenizer.json: not UTF-8"),
        (overwrite("tokenizer_config.json", "{"), DataError, "tokenizer_config.json: not valid JSON"),
        (overwrite("tokenizer_config.json", "[]"), DataError, "expected a JSON object, received list"),
        (overwrite("tokenizer_config.json", '{"eos_token": "<no>"}'), DataError, "eos_token '<no>' is not a token"),
        (
            change(lambda content: content.update(model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"})),
            DataError,
            "tokenizer model 'WordLevel' is not supported",
        ),
        (
            change(lambda content: content.update(pre_tokenizer={"type": "Whitespace"})),
            DataError,
            "pre-tokenizer Whitespace is not supported",
        ),
        (
            change(lambda content: content["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True)),
            DataError,
            "adds a space",
        ),
        (
            change(lambda content: content["model"]["vocab"].update({"▁the": 9999})),
            DataError,
            "1 tokens are not spelt in bytes, such as '▁the'",
        ),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused(
    tmp_path: Path, damage: Callable[[Path], object], error: type[Exception], message: str
) -> None:
    m2_tokenizer().save(tmp_path / "t")
    damage(tmp_path / "t")
    with pytest.raises(error, match=message):
        load_tokenizer(tmp_path / "t")


# -- GGUF -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("id", [1 << 24, 1 << 31, (1 << 32) - 1])
def test_a_vocabulary_with_an_id_far_beyond_its_size_is_refused(tmp_path: Path, id: int) -> None:
    train_tokenizer(["hello"], 300, ["<|endoftext|>"]).save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["vocab"]["z"] = id
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with within(), pytest.raises(DataError, match=f"has a token with the id {id}, and 16777215 is the largest"):
        load_tokenizer(tmp_path)


Changes = dict[str, Any]


def write_gguf(path: Path, changes: Changes | None = None) -> None:
    signs = sorted(byte_of_sign())
    fields: Changes = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [*signs, "ab", "<think>", "<eos>"],
        "merges": ["a b"],
        "token_type": [1] * 257 + [4, 3],
        "eos_token_id": 258,
    }
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (fields | (changes or {})).items():
        if isinstance(value, str):
            writer.add_string(f"tokenizer.ggml.{key}", value)
        elif isinstance(value, list):
            writer.add_array(f"tokenizer.ggml.{key}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("split", ["gpt-2", "smollm", "qwen2", "llama-bpe", "minimax-m2"])
def test_a_small_file_gives_its_tokens(tmp_path: Path, split: str) -> None:
    write_gguf(tmp_path / "a.gguf", {"pre": split})
    tokenizer = load_tokenizer(tmp_path / "a.gguf")
    assert tokenizer.special_ids == {"<think>": 257, "<eos>": 258}
    assert tokenizer.end_of_text_id == 258
    assert tokenizer.encode("ab")[0] == 256
    assert tokenizer.decode(tokenizer.encode("It's ab 12 é\n <eos>")) == "It's ab 12 é\n <eos>"
    assert tokenizer.chat_template is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, "its tokenizer is 'llama'; from GGUF only 'gpt2'"),
        ({"model": None}, "it has none; from GGUF only 'gpt2'"),
        ({"pre": "smolm"}, "pre-tokenizer 'smolm' is not supported; did you mean 'smollm'"),
        ({"pre": None}, "pre-tokenizer None is not supported"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"merges": [1, 2]}, "tokenizer.ggml.merges is not a list of strings"),
        ({"merges": ["a x y"]}, "do not fit together"),
        ({"token_type": [1, 1]}, "does not say the kind of each of 259 tokens"),
        ({"tokens": [*sorted(byte_of_sign()), "ab", "a", "<eos>"]}, "1 tokens occur twice in its vocabulary"),
        ({"eos_token_id": 259}, "eos_token_id is 259, expected an id below 259"),
    ],
)
def test_a_file_whose_tokenizer_cannot_be_used_is_refused(tmp_path: Path, changes: Changes, message: str) -> None:
    write_gguf(tmp_path / "a.gguf", changes)
    with pytest.raises(DataError, match=message):
        load_tokenizer(tmp_path / "a.gguf")


def test_a_broken_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(DataError, match="is not a complete GGUF file"):
        load_tokenizer(tmp_path / "a.gguf")
