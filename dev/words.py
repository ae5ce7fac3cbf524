"""How far the house speaks the field's language: counts over m2forge/, printed as a table.

    python dev/words.py

Terms are counted in names, docstrings, comments and messages alike. A module has one importer in its own room if
exactly one other module of that room imports it, and no other room does.
"""

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "m2forge"
FIELD = (
    *("prefill", "decode", "KV cache", "prefix cache", "block table", "evict", "speculative", "acceptance"),
    *("position", "padding", "learning rate", "policy version", "staleness", "rollout", "trajectory", "advantage"),
    *("evaluation", "worker", "request", "retry", "cancel", "micro-batch", "gradient accumulation"),
)
"""The left column of the table of words."""
OURS = (
    *("told", "whoever", "somebody", "nobody", "anew", "under way", "of which", "so many", "place", "check"),
    *("worth", "kept", "rate"),
)
"""The right column, and its kin."""


def count_terms(text: str, terms: tuple[str, ...]) -> dict[str, int]:
    return {term: len(re.findall(rf"\b{re.escape(term)}", text, re.IGNORECASE)) for term in terms}


def count_of(trees: list[ast.Module]) -> tuple[int, int]:
    """Docstrings, those below fields included, and those that begin with "Of"."""
    found = [
        node.value.value
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    return len(found), sum(text.startswith("Of ") for text in found)


def lone_modules(trees: dict[str, ast.Module]) -> list[str]:
    """Modules with one importer, which lies in their own room."""
    importers: dict[str, set[str]] = {name: set() for name in trees}
    packages = {name.rpartition(".")[0] for name in trees}
    for importer, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            for name in names:
                if name in importers and name != importer:
                    importers[name].add(importer)
    return sorted(
        name
        for name, users in importers.items()
        if len(users) == 1 and name.count(".") > 1 and _room(next(iter(users))) == _room(name) and name not in packages
    )


def _room(module: str) -> str:
    return ".".join(module.split(".")[1:2])


def main() -> None:
    paths = sorted(PACKAGE.rglob("*.py"))
    texts = {".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text("utf-8") for path in paths}
    trees = {name.removesuffix(".__init__"): ast.parse(text) for name, text in texts.items()}
    whole = "\n".join(texts.values())
    for title, terms in (("the field's", FIELD), ("ours", OURS)):
        counts = count_terms(whole, terms)
        print(f"{title}: {sum(counts.values())}   " + ", ".join(f"{term} {num}" for term, num in counts.items()))
    num, num_of = count_of(list(trees.values()))
    print(f"docstrings: {num}, beginning with Of: {num_of}")
    lone = lone_modules(trees)
    rooms = Counter(_room(name) for name in lone)
    print(f"modules: {len(trees)}, with one importer in their own room: {len(lone)}   {dict(rooms.most_common())}")


if __name__ == "__main__":
    main()
