"""A post's HTML as blocks: paragraphs of text, and blocks of code."""

import re
from dataclasses import dataclass
from html.parser import HTMLParser

_PARAGRAPHS = frozenset(("p", "li", "h1", "h2", "h3", "blockquote", "br", "hr", "ul", "ol", "div"))


@dataclass(frozen=True, slots=True)
class Block:
    text: str
    """Code as it is; in a paragraph, code spans stand between backticks."""
    is_code: bool = False
    language: str = ""
    """That a code block declares, or empty."""

    @property
    def spans(self) -> list[str]:
        """The code spans of a paragraph."""
        return [] if self.is_code else re.findall(r"`([^`\n]+)`", self.text)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[Block] = []
        self._text: list[str] = []
        self._is_code, self._language, self._item = False, "", ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "pre":
            self._flush()
            found = re.search(r"lang-(\w+)", dict(attrs).get("class") or "")
            self._is_code, self._language = True, found[1] if found else ""
        elif tag == "code" and not self._is_code:
            self._text.append("`")
        elif tag in _PARAGRAPHS and not self._is_code:
            self._flush()
            self._item = "- " if tag == "li" else ""

    def handle_endtag(self, tag: str) -> None:
        if tag == "pre":
            self._flush()
        elif tag == "code" and not self._is_code:
            self._text.append("`")
        elif tag in _PARAGRAPHS and not self._is_code:
            self._flush()

    def handle_data(self, data: str) -> None:
        self._text.append(data)

    def close(self) -> None:
        super().close()
        self._flush()

    def _flush(self) -> None:
        text = "".join(self._text)
        self._text.clear()
        if self._is_code:
            self.blocks.append(Block(text.removesuffix("\n"), True, self._language))
            self._is_code, self._language = False, ""
        elif text.strip():
            self.blocks.append(Block(self._item + " ".join(text.split())))
        self._item = ""


def read_blocks(html: str) -> list[Block]:
    reader = _Reader()
    reader.feed(html)
    reader.close()
    return reader.blocks


def plain(blocks: list[Block]) -> str:
    """All text, code included."""
    return "\n".join(block.text for block in blocks)


def markdown(blocks: list[Block]) -> str:
    parts = [f"```{block.language}\n{block.text}\n```" if block.is_code else block.text for block in blocks]
    return "\n\n".join(parts)
