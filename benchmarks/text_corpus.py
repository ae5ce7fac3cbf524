"""Token shards of the Python sources installed on this machine, for benchmarks that train."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

from m2forge.corpus.token_set import CorpusWriter
from m2forge.text.tokenizer import END_OF_TEXT, train_tokenizer

DOCUMENTS_PER_BATCH = 256
HELD_OUT_EVERY = 50


def python_sources(max_bytes: int) -> Iterator[str]:
    """Files of the standard library first, then of the installed packages, in a fixed order."""
    paths = sysconfig.get_paths()
    for root in (Path(paths["stdlib"]), Path(paths["purelib"])):
        for path in sorted(root.rglob("*.py")):
            if "site-packages" in path.relative_to(root).parts:
                continue
            text = path.read_text(encoding="utf-8", errors="replace")
            max_bytes -= len(text)
            if max_bytes < 0:
                return
            if text:
                yield text


def write_text_corpus(folder: Path, vocab_size: int, max_bytes: int, unseen_every: int = 0) -> int:
    """Number of tokens written to `folder`, domain "code", some of them held out. One document in `unseen_every` is of
    a domain "unseen" instead, held out too."""
    texts = list(python_sources(max_bytes))
    tokenizer = train_tokenizer(texts[:: 1 + len(texts) // 4000], vocab_size, [END_OF_TEXT])
    assert tokenizer.end_of_text_id is not None
    num_tokens = 0
    with CorpusWriter(folder, vocab_size=vocab_size) as writer:
        for start in range(0, len(texts), DOCUMENTS_PER_BATCH):
            for index, ids in enumerate(tokenizer.encode_batch(texts[start : start + DOCUMENTS_PER_BATCH])):
                is_unseen = unseen_every > 0 and index % unseen_every == 1
                is_held_out = is_unseen or index % HELD_OUT_EVERY == 0
                tokens = [*ids, tokenizer.end_of_text_id]
                writer.add("unseen" if is_unseen else "code", tokens, split="held_out" if is_held_out else "train")
                num_tokens += len(ids) + 1
        writer.finish(end_of_text_id=tokenizer.end_of_text_id)
    return num_tokens
