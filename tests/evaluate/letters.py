"""A tokenizer of bytes: enough for tasks in English, and every length can be checked by hand."""


class ByteEncoder:
    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


def decode(ids: list[int]) -> str:
    return bytes(ids).decode(errors="replace")
