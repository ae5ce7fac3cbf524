"""Writes Posts.xml and labels.jsonl from the questions in questions/*.md.

    python examples/terminal/build.py

A question begins with `=== ID | SCORE | TAGS | DATE | AUTHOR`, then come `title:`, `label:` (sound or decoy, and why)
and the text; an answer begins with `--- [accepted] SCORE | AUTHOR`. Texts are Markdown. An author that ends in a number
has an account with that id; other authors have only a name, as in posts whose account was deleted.
"""

import html
import json
import re
from pathlib import Path
from xml.sax.saxutils import quoteattr

HERE = Path(__file__).parent
QUESTION = re.compile(r"^=== (\d+) \| (-?\d+) \| (<.*?>|\|.*?\|) \| (\S+) \| (.+)$")
ANSWER = re.compile(r"^--- (accepted )?(-?\d+) \| (.+)$")
INLINE = (
    (re.compile(r"\*\*(.+?)\*\*"), r"<strong>\1</strong>"),
    (re.compile(r"\*(\S.*?)\*"), r"<em>\1</em>"),
    (re.compile(r"\[(.+?)\]\((.+?)\)"), r'<a href="\2">\1</a>'),
)


def inline(text: str) -> str:
    """One paragraph's Markdown as HTML; code spans are taken literally."""
    parts = re.split(r"`(.+?)`", text)
    for index, part in enumerate(parts):
        if index % 2:
            parts[index] = f"<code>{html.escape(part, quote=False)}</code>"
            continue
        plain = html.escape(part, quote=False).replace("&lt;kbd&gt;", "<kbd>").replace("&lt;/kbd&gt;", "</kbd>")
        for pattern, replacement in INLINE:
            plain = pattern.sub(replacement, plain)
        parts[index] = plain
    return "".join(parts)


def code(lines: list[str], language: str = "") -> str:
    opening = f'<pre class="lang-{language} prettyprint-override"><code>' if language else "<pre><code>"
    return opening + html.escape("\n".join(lines), quote=False) + "\n</code></pre>\n"


def markdown(text: str) -> str:
    """Paragraphs, lists, indented and fenced code as the HTML that a dump holds."""
    lines, out = text.strip("\n").split("\n"), []
    position = 0
    while position < len(lines):
        line = lines[position]
        if not line.strip():
            position += 1
        elif line.startswith("```"):
            end = lines.index("```", position + 1)
            out.append(code(lines[position + 1 : end], line[3:]))
            position = end + 1
        elif line.startswith("    "):
            end = position
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
            out.append(code("\n".join(part[4:] for part in lines[position:end]).rstrip("\n").split("\n")))
            position = end
        else:
            end = position
            while end < len(lines) and lines[end].strip() and not lines[end].startswith("```"):
                end += 1
            out.append(paragraph(lines[position:end]))
            position = end
    return "\n".join(out)


def paragraph(lines: list[str]) -> str:
    for tag, mark in (("ul", r"^ ?- "), ("ol", r"^ ?\d+\. ")):
        if all(re.match(mark, line) for line in lines):
            items = "".join(f"<li>{inline(re.sub(mark, '', line))}</li>\n" for line in lines)
            return f"<{tag}>\n{items}</{tag}>\n"
    return f"<p>{inline(chr(10).join(lines))}</p>\n"


def owner(author: str) -> dict[str, str]:
    name, _, number = author.rpartition(" ")
    return {"OwnerUserId": number} if name and number.isdigit() else {"OwnerDisplayName": author}


def row(attributes: dict[str, str]) -> str:
    text = " ".join(f"{name}={quoteattr(value)}" for name, value in attributes.items())
    return f"  <row {text} />\n"


def posts(block: str) -> tuple[list[dict[str, str]], dict[str, object]]:
    """The rows of one question and its answers, and the question's label."""
    question, *answers = re.split(r"^(?=--- )", block, flags=re.M)
    head, title, label, body = question.split("\n", 3)
    match = QUESTION.match(head)
    if not match:
        raise SystemExit(f"not the head of a question: {head!r}; see the docstring of {Path(__file__).name}")
    number, score, tags, date, author = match.groups()
    kind, why = label.removeprefix("label: ").split(": ", 1)
    first = {"Id": number, "PostTypeId": "1", "CreationDate": date, "Score": score, "Body": markdown(body)}
    first |= owner(author) | {"Title": title.removeprefix("title: "), "Tags": tags, "AnswerCount": str(len(answers))}
    rows = [first | {"ContentLicense": "CC0 1.0"}]
    for index, text in enumerate(answers, start=1):
        head, body = text.split("\n", 1)
        match = ANSWER.match(head)
        if not match:
            raise SystemExit(f"not the head of an answer: {head!r}; see the docstring of {Path(__file__).name}")
        accepted, score, author = match.groups()
        answer = {"Id": f"{number}{index:02}", "PostTypeId": "2", "ParentId": number, "CreationDate": date}
        rows.append(answer | {"Score": score, "Body": markdown(body)} | owner(author) | {"ContentLicense": "CC0 1.0"})
        if accepted:
            rows[0]["AcceptedAnswerId"] = answer["Id"]
    return rows, {"id": int(number), "sound": kind == "sound", "why": why}


def build() -> tuple[str, str]:
    """The texts of Posts.xml and labels.jsonl: questions by date, each followed by its answers."""
    parsed = []
    for path in sorted((HERE / "questions").glob("*.md")):
        blocks = re.split(r"^(?==== )", path.read_text(), flags=re.M)
        parsed += [posts(block) for block in blocks if block.strip()]
    parsed.sort(key=lambda entry: entry[0][0]["CreationDate"])
    rows = "".join(row(attributes) for entry in parsed for attributes in entry[0])
    labels = "".join(json.dumps(label) + "\n" for _, label in parsed)
    return f'<?xml version="1.0" encoding="utf-8"?>\n<posts>\n{rows}</posts>\n', labels


def main() -> None:
    xml, labels = build()
    (HERE / "Posts.xml").write_text(xml)
    (HERE / "labels.jsonl").write_text(labels)


if __name__ == "__main__":
    main()
