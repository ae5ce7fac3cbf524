"""A tokenizer of bytes: enough for tasks in English, and every length can be checked by hand."""

from m2forge.evaluate.prompts.scored_sample import Sample


class ByteEncoder:
    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


def decode(ids: list[int]) -> str:
    return bytes(ids).decode(errors="replace")


def answer_ids(sample: Sample) -> list[int]:
    """All answers of a sample, one after another."""
    return [token for answer in sample.answers for token in answer]
