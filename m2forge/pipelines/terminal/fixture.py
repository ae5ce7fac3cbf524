"""Builds fixtures: the samples of a question and the operands of its answer in, a script that creates the files out.

A fixture is a bash script that runs in an empty workspace. The kind `SHOWN` holds the question's samples as they are;
other kinds hold longer texts of the same form, other names and other numbers, by their seed. Files that the question
does not show are generated from the operands of the answer: the texts that it searches for, the names that its patterns
match and do not match, and the properties that `find` tests (sizes, times, modes, links, empty folders).

Longer texts of a sample's form replace its numbers and some of its words, by the same replacement in all files of a
fixture, so that keys that occur in two files still match.
"""

import fnmatch
import hashlib
import json
import posixpath
import random
import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from m2forge.pipelines.terminal.operand import Operand, Role
from m2forge.pipelines.terminal.sample_file import Shown, file_names
from m2forge.pipelines.terminal.shell import SimpleCommand
from m2forge.records import JsonValue

SHOWN, TASK, SECOND = 0, 1, 2
"""Kinds of fixtures, and their seeds."""
_OLD, _NEW = "2001-02-03 04:05:06 UTC", "2037-01-02 03:04:05 UTC"
"""Times of files that tests of age see as old and as new, whenever they run."""
_TIME = "2020-01-02 03:04:05 UTC"
"""Time of all other files."""
_WRITTEN = (
    "find . -mindepth 1 -not -path '*/.git/*' -newermt '-1 day' -not -newermt '+1 day' -exec touch -h -d '{}' {{}} +"
)
"""Gives a time to the files that the fixture has written and whose time is still that."""
_FILE_MODES = ("0777", "0666", "0600", "0755", "0644", "0640")
_LITERAL = re.compile(r"[A-Za-z][\w=@-]{2,}(?:[ .:][A-Za-z][\w=@-]+)*")
_LONG, _SHORT = 260, 40
"""Lines of a generated text: more than the counts that a script names."""
_DELIMITER = "END_OF_FILE"
_WORDS = (
    *("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "harbor", "iris", "juniper", "koala", "lotus"),
    *("maple", "nectar", "olive", "prairie", "quartz", "raven", "saffron", "thistle", "umber", "violet", "willow"),
    *("yarrow", "zephyr", "anchor", "beacon", "copper", "dune", "echo", "falcon", "garnet", "hazel", "indigo"),
)
_NUM_COPIES = 3
_NUMBER = re.compile(r"(?<![\w.:/\-@#])\d+(?![\w:/\-]|\.\d)")
_ADDRESS = re.compile(r"(?<![\d.])(\d{1,3}\.\d{1,3}\.\d{1,3})\.\d{1,3}(?![\d.])")
_WORD = re.compile(r"(?<![\w<>/\\\[{$&%-])[A-Za-z]{3,}(?![\w:=>(\[\]}/-])")


@dataclass(slots=True)
class _Files:
    """The files of a fixture, by path."""

    texts: dict[str, str] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    """Commands that follow: links, sizes, modes, times, archives."""

    def render(self) -> str:
        lines = ["umask 022"]
        folders = sorted({*self.folders, *(posixpath.dirname(path) for path in self.texts)} - {"", "."})
        parents = {parent for path in [*self.texts, *(f"{name}/x" for name in folders)] for parent in _parents(path)}
        if folders:
            lines.append("mkdir -p -- " + " ".join(map(shlex.quote, folders)))
        for path, content in self.texts.items():
            if path in parents:
                continue
            end = "" if content.endswith("\n") or not content else "\n"
            target = shlex.quote(f"./{path}" if path.startswith("-") else path)
            lines.append(f"cat > {target} <<'{_DELIMITER}'\n{content}{end}{_DELIMITER}")
        # Programs such as diff print the times of files.
        return "\n".join([*lines, *self.after, _WRITTEN.format(_TIME)]) + "\n"


def _parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:number]) for number in range(1, len(parts))]


@dataclass(frozen=True, slots=True)
class Request:
    """The inputs of one candidate's fixtures."""

    script: str
    commands: Sequence[SimpleCommand]
    operands: Sequence[Operand]
    shown: Shown
    question: str
    """All text of the question."""


def at_another_time(made: str) -> str:
    """The fixture with other times for files whose time it does not set, as if it had run at another time."""
    return f"{made}\n{_WRITTEN.format('2010-06-07 08:09:10 UTC')}\n"


def build(request: Request, kind: int) -> str:
    return _Builder(request, kind).build()


class _Builder:
    def __init__(self, request: Request, kind: int) -> None:
        self._request, self._kind = request, kind
        self._rng = random.Random(_hashed(kind, request.script))
        self._files = _Files()
        self._literals = literals(request.commands)
        self._names = file_names(request.question) + request.shown.listing
        self._tests = [text for command in request.commands if command.program == "find" for text in command.texts]
        self._num_folders = 0

    def build(self) -> str:
        request = self._request
        if any(command.program == "git" for command in request.commands) and not request.shown.setup:
            return self._repository()
        prefix = f"{request.shown.setup}\n" if request.shown.setup else ""
        unnamed = list(request.shown.unnamed)
        inputs = [operand for operand in request.operands if operand.role is not Role.OUTPUT]
        for name in request.shown.listing:
            if name.endswith("/"):
                self._files.folders.append(name.rstrip("/"))
            else:
                self._files.texts.setdefault(name, self._content(name))
        for operand in inputs:
            self._input(operand, unnamed, inputs)
        for name, sample in request.shown.files.items():
            if name not in self._files.texts and any(_matches(name, operand) for operand in inputs):
                self._files.texts[name] = self._of_sample(sample)
        self._links()
        if any(command.program == "rm" for command in request.commands):
            # Files that must not be removed.
            self._files.texts.setdefault(f"{self._rng.choice(_WORDS)}.keep", self._content("keep"))
        return prefix + self._files.render()

    def _input(self, operand: Operand, unnamed: list[str], inputs: Sequence[Operand]) -> None:
        path = operand.path
        if operand.is_glob:
            self._glob(path)
        elif operand.role is Role.ARCHIVE:
            self._archive(operand)
        elif self._is_folder(operand, inputs):
            self._folder(path)
        elif path in self._request.shown.files:
            self._files.texts[path] = self._of_sample(self._request.shown.files[path])
        elif unnamed and "/" not in path:
            self._files.texts[path] = self._of_sample(unnamed.pop(0))
        elif path not in self._files.texts:
            self._files.texts[path] = self._content(path)
            self._compress(path)
        self._edits(path, inputs)

    def _is_folder(self, operand: Operand, inputs: Sequence[Operand]) -> bool:
        if operand.role is Role.FOLDER:
            return True
        name = operand.path.rpartition("/")[2]
        names = [*self._names, *(other.path for other in inputs)]
        if any(other.startswith(f"{operand.path}/") for other in names):
            return True
        return operand.role is Role.ANY and "." not in name.lstrip(".-") and not name.startswith("-")

    # -- contents ------------------------------------------------------------------------------------------------------

    def _of_sample(self, sample: str) -> str:
        if self._kind == SHOWN:
            return sample + "\n"
        keep = {word for literal in self._literals for word in re.findall(r"\w+", literal)}
        keep |= set(re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", self._request.question))))
        return vary(sample, self._kind, keep)

    def _content(self, path: str) -> str:
        stem = re.sub(r"\.(?:orig|old|bak)$", "", path.rpartition("/")[2])
        rng = random.Random(_hashed(self._kind, stem))
        match stem.rpartition(".")[2].lower():
            case "py":
                return _code(rng, self._literals)
            case "csv":
                return _table(rng, self._literals)
            case "json":
                return _objects(rng)
        numbers = [int(digits) for digits in re.findall(r"\b\d{2,4}\b", self._request.script)]
        num_lines = _LONG if any(40 <= number <= 250 for number in numbers) else _SHORT
        has_returns = "\\r" in self._request.script
        return _prose(rng, self._literals, num_lines, has_returns=has_returns)

    def _edits(self, path: str, inputs: Sequence[Operand]) -> None:
        """A file beside its original differs from it."""
        paths = {operand.path for operand in inputs}
        if path in self._files.texts and any(f"{path}{ending}" in paths for ending in (".orig", ".old", ".bak")):
            lines = self._files.texts[path].split("\n")
            lines[3:5] = ["an edited line", f"another {self._rng.choice(_WORDS)}"]
            self._files.texts[path] = "\n".join(lines)

    def _compress(self, path: str) -> None:
        if path.endswith(".gz") and not path.endswith((".tar.gz", ".tgz")):
            plain = path.removesuffix(".gz")
            self._files.texts[plain] = self._files.texts.pop(path)
            self._files.after.append(f"gzip -n -- {shlex.quote(plain)}")

    # -- names ---------------------------------------------------------------------------------------------------------

    def _glob(self, pattern: str) -> None:
        """Files that a glob matches, those that the question names first, and some that it does not."""
        folder, _, last = pattern.rpartition("/")
        if folder and re.search(r"[*?\[]", folder):
            folder = fill(folder, self._rng, 0)
        known = [name for name in self._names if fnmatch.fnmatch(name, pattern)]
        if not known and folder:
            known = [f"{folder}/{name}" for name in self._names if fnmatch.fnmatch(name, last) and "/" not in name]
        made = [posixpath.join(folder, fill(last, self._rng, index)) for index in range(3)]
        others = [posixpath.join(folder, f"{self._rng.choice(_WORDS)}.dat")]
        others += [name for name in self._names if "/" not in name and not folder and last != "*"]
        is_all = last == "*"
        if is_all:
            made = [posixpath.join(folder, name) for name in ("Amber.TXT", "birch.txt", "Cedar Two.Log")]
            known = [name for name in self._names if "/" not in name or name.startswith(f"{folder}/")]
        shown = known if self._kind == SHOWN and len(known) > 1 else known + made
        for name in dict.fromkeys(shown + ([] if is_all else others)):
            if name not in self._files.texts and name not in {o.path for o in self._request.operands if not o.is_glob}:
                sample = self._request.shown.files.get(name)
                self._files.texts[name] = self._content(name) if sample is None else self._of_sample(sample)
                self._compress(name)

    def _folder(self, folder: str) -> None:
        """A tree with names that the tests of `find` match and others, by the same names in every folder."""
        number, self._num_folders = self._num_folders, self._num_folders + 1
        rng = random.Random(_hashed(self._kind, "tree"))
        inside = "" if folder == "." else f"{folder}/"
        named = [name for name in self._names if name.startswith(inside) and inside]
        branches = [inside, f"{inside}{rng.choice(_WORDS)}/", f"{inside}sub two/{rng.choice(_WORDS)}/"]
        paths = list(named)
        for pattern in self._patterns():
            paths += [branches[index % 3] + fill(pattern, rng, index) for index in range(4)]
        for index, ending in enumerate(("txt", "log", "csv", "md", "dat", "txt")):
            paths.append(f"{branches[index % 3]}{rng.choice(_WORDS)}{index}.{ending}")
        paths.append(f"{branches[1]}plain")
        for index, path in enumerate(dict.fromkeys(paths)):
            if path in self._files.texts:
                continue
            content = self._content(path if number == 0 else f"{branches[index % 3]}{path.rpartition('/')[2]}")
            self._files.texts[path] = content if index % 4 != 3 else f"the same content {self._kind}\n"
        if number:
            changed = next(path for path in paths if path in self._files.texts)
            self._files.texts[changed] += "one more line\n"
            self._files.texts[f"{inside}only_{number}.txt"] = self._content("only.txt")
        self._features(inside, list(dict.fromkeys(paths)))

    def _patterns(self) -> list[str]:
        tests, found = self._tests, list[str]()
        for position, test in enumerate(tests[:-1]):
            is_negated = position > 0 and tests[position - 1] in ("!", "-not")
            if test in ("-name", "-iname") and not is_negated and re.search(r"[\w~]", tests[position + 1]):
                found.append(tests[position + 1])
        excluded = re.findall(r"--(?:ex|in)clude=['\"]?([^'\"\s]+)", self._request.script)
        return found + [pattern for pattern in excluded if "/" not in pattern]

    def _features(self, inside: str, paths: Sequence[str]) -> None:
        """Properties that the tests of `find` and the programs of the script depend on, besides names."""
        tests, after = set(self._tests), self._files.after
        first, second, third = random.Random(_hashed(self._kind, "features")).sample(_WORDS, 3)
        programs = {command.program for command in self._request.commands}
        if tests & {"-empty", "-delete"} or "rmdir" in programs:
            self._files.folders += [f"{inside}hollow", f"{inside}nested/inner/deep"]
        if tests & {"-xtype", "-lname", "-L"} or "readlink" in programs or "l" in self._values("-type"):
            target = paths[0].removeprefix(inside)
            links = ((f"{first}-link", target), (f"{second}-link", "missing.txt"), (f"{third} link", "../nowhere/file"))
            for name, to in links:
                after.append(f"ln -s -- {shlex.quote(to)} {shlex.quote(inside + name)}")
        for value in self._values("-size"):
            size = self._bytes(value)
            sizes = ((f"{first}.bin", size + 5000), (f"{second} 2.bin", 2 * size + 1), (f"{third}.bin", size // 3))
            for name, num in sizes:
                after.append(f"truncate -s {num} -- {shlex.quote(inside + name)}")
        quoted = [shlex.quote(path) for path in paths if path in self._files.texts]
        if tests & {"-perm"} or "chmod" in programs:
            for index, path in enumerate(quoted):
                after.append(f"chmod {_FILE_MODES[(index + self._kind) % len(_FILE_MODES)]} -- {path}")
            if inside:
                after.append(f"find {shlex.quote(inside.rstrip('/'))} -type d -exec chmod 0777 {{}} +")
        if tests & {"-mtime", "-mmin", "-newer", "-newermt", "-atime", "-ctime"}:
            for index, path in enumerate(quoted):
                after.append(f"touch -d '{_OLD if index % 2 else _NEW}' -- {path}")

    def _values(self, test: str) -> list[str]:
        return [value for name, value in zip(self._tests, self._tests[1:], strict=False) if name == test]

    @staticmethod
    def _bytes(value: str) -> int:
        match = re.match(r"[+-]?(\d+)([cwbkMG]?)", value)
        if match is None:
            return 4096
        unit = {"c": 1, "w": 2, "b": 512, "": 512, "k": 1 << 10, "M": 1 << 20, "G": 1 << 30}[match[2]]
        return min(int(match[1]) * unit, 16 << 20)

    def _links(self) -> None:
        """`ln -sf TARGET LINK` replaces a link, so there is one to another target."""
        for command in self._request.commands:
            if command.program != "ln" or not any(re.match(r"-\w*f", text) for text in command.texts):
                continue
            plain = [text for text in command.texts if not text.startswith("-")]
            if len(plain) == 2 and plain[0] in self._files.folders + [o.path for o in self._request.operands]:
                parent = posixpath.dirname(plain[0])
                siblings = [n for n in self._names if posixpath.dirname(n) == parent and n != plain[0] and parent]
                other = siblings[0] if siblings else posixpath.join(parent, "previous")
                self._files.texts.pop(other, None)
                self._files.folders.append(other)
                self._files.after.append(f"ln -s -- {shlex.quote(other)} {shlex.quote(plain[1])}")

    # -- archives and repositories -------------------------------------------------------------------------------------

    def _archive(self, operand: Operand) -> None:
        members = [name for name in operand.members if "*" not in name] or ["notes/a.txt"]
        names = [*members, "other/readme.txt", f"other/{self._rng.choice(_WORDS)}.txt"]
        lines = list[str]()
        for name in names:
            content = self._content(name)
            lines.append(f"mkdir -p -- .pack/{shlex.quote(posixpath.dirname(name) or '.')}")
            lines.append(f"cat > .pack/{shlex.quote(name)} <<'{_DELIMITER}'\n{content}{_DELIMITER}")
        path = operand.path
        letter = "z" if path.endswith(("gz", "tgz")) else "j" if path.endswith("bz2") else "J" if "xz" in path else ""
        listed = " ".join(shlex.quote(name) for name in dict.fromkeys(names))
        if folder := posixpath.dirname(path):
            lines.append(f"mkdir -p -- {shlex.quote(folder)}")
        lines.append(f"tar -C .pack --mtime='{_TIME}' -c{letter}f {shlex.quote(path)} {listed}")
        self._files.after += [*lines, "rm -r .pack"]

    def _repository(self) -> str:
        """A repository with three commits, the files of the answer in the last but one."""
        wanted = [
            o.path for o in self._request.operands if o.role is not Role.OUTPUT and o.path != "." and not o.is_glob
        ]
        wanted = [path for path in wanted if not path.startswith(".git") and path != "HEAD"]
        lines = [
            "umask 022",
            "export GIT_AUTHOR_DATE='2020-01-02T03:04:05Z' GIT_COMMITTER_DATE='2020-01-02T03:04:05Z'",
            "git init -q -b main",
            "git config user.name Agent",
            "git config user.email agent@example.org",
        ]
        first, second = self._rng.sample(_WORDS, 2)
        groups = [[f"{first}.txt", "README.md"], [*wanted, f"src/{second}.py"], [f"{first}.txt", f"{second}.txt"]]
        for number, names in enumerate(groups):
            for name in names:
                files = _Files({name: self._content(f"{number}{name}")})
                lines += files.render().rstrip("\n").split("\n")[1:]
            lines += ["git add -A", f"git commit -q -m 'Change {number + 1}: {first}'"]
        return "\n".join(lines) + "\n"


def _matches(name: str, operand: Operand) -> bool:
    return fnmatch.fnmatch(name, operand.path) if operand.is_glob else name.startswith(f"{operand.path}/")


def literals(commands: Sequence[SimpleCommand]) -> list[str]:
    """Texts that a script searches for, which a fixture must contain."""
    return list(dict.fromkeys(_literals(commands)))


def _literals(commands: Sequence[SimpleCommand]) -> Iterator[str]:
    for command in commands:
        texts = [word.text for word in command.arguments if word.is_quoted or command.program.endswith("grep")]
        match command.program:
            case "sed":
                for text in texts:
                    for found in re.findall(r"(?:^|[;{\s])s(\W)(.+?)\1|/((?:[^/\\]|\\.)+)/", text):
                        yield from _plain(found[1] or found[2])
            case "awk" | "mawk" | "perl":
                for text in texts:
                    for pattern in re.findall(r"/((?:[^/\\]|\\.)+)/", text):
                        yield from _plain(pattern)
            case "grep" | "egrep" | "fgrep" | "zgrep":
                plain = [text for text in texts if not text.startswith("-")]
                for text in plain[:1]:
                    yield from _plain(text)


def _plain(pattern: str) -> Iterator[str]:
    """Parts of a regular expression that match themselves."""
    cleaned = re.sub(r"\[\[?[^\]]*\]?\]|\\[a-zA-Z]|[\^$]", " \0 ", pattern).replace("\\", "")
    yield from _LITERAL.findall(cleaned)


# -- generated contents and names --------------------------------------------------------------------------------------


def _hashed(*parts: object) -> int:
    return int.from_bytes(hashlib.sha256("\0".join(map(str, parts)).encode()).digest()[:8], "big")


def vary(text: str, seed: int, keep: Collection[str]) -> str:
    """A text of the same form. `keep`: words that stay. Sorted lines stay sorted."""
    if (as_json := _vary_json(text, seed, keep)) is not None:
        return as_json
    lines = text.rstrip("\n").split("\n")
    is_whole = any(re.match(r"\s*(?:\[[^\]]+\]\s*$|<[\w/?!]|\S.*[{;]\s*$|/\*)", line) for line in lines)
    if is_whole:
        return _replaced(text.rstrip("\n"), f"{seed}/1", keep) + "\n"
    has_header = len(lines) > 2 and not re.search(r"\d", lines[0]) and all(re.search(r"\d", one) for one in lines[1:])
    head, body = (lines[:1], lines[1:]) if has_header else ([], lines)
    rows = list(body)
    for copy in range(1, _NUM_COPIES + 1):
        rows += [_replaced(line, f"{seed}/{copy}", keep) for line in body]
    if len(body) > 2 and all(line.strip().isdigit() for line in body) and body == sorted(body, key=int):
        rows = sorted(set(rows), key=int)
    elif len(body) > 2 and body == sorted(body):
        rows.sort()
    return "\n".join(head + rows) + "\n"


def _vary_json(text: str, seed: int, keep: Collection[str]) -> str | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    if isinstance(value, list):
        copies = [_vary_value(one, f"{seed}/{copy}", keep) for copy in range(1, _NUM_COPIES + 1) for one in value]
        return json.dumps([*value, *copies], indent=2) + "\n"
    return json.dumps(_vary_value(value, f"{seed}/1", keep), indent=2) + "\n" if isinstance(value, dict) else None


def _vary_value(value: JsonValue, seed: str, keep: Collection[str]) -> JsonValue:
    match value:
        case dict():
            return {name: _vary_value(one, seed, keep) for name, one in value.items()}
        case list():
            return [_vary_value(one, seed, keep) for one in value]
        case str():
            return _replaced(value, seed, keep)
        case bool() | None | float():
            return value
    return int(_other_number(str(value), seed))


def _replaced(text: str, seed: str, keep: Collection[str]) -> str:
    def number(match: re.Match[str]) -> str:
        return match[0] if match[0] in keep else _other_number(match[0], seed)

    def word(match: re.Match[str]) -> str:
        return match[0] if match[0] in keep else _other_word(match[0], seed)

    def address(match: re.Match[str]) -> str:
        return f"{match[1]}.{_hashed(seed, match[0]) % 250 + 2}"

    return _ADDRESS.sub(address, _WORD.sub(word, _NUMBER.sub(number, text)))


def _other_number(digits: str, seed: str) -> str:
    zeros = len(digits) - len(digits.lstrip("0"))
    rest = digits[zeros:]
    if not rest:
        return digits
    low = 10 ** (len(rest) - 1)
    return "0" * zeros + str(low + _hashed(seed, digits) % (9 * low))


def _other_word(word: str, seed: str) -> str:
    """Another word in the same case, or the same word: half of them stay, so that groups have several members."""
    draw = _hashed(seed, word.lower())
    if draw % 2 or word.isupper():
        return word
    other = _WORDS[(draw // 2) % len(_WORDS)]
    return other.capitalize() if word[0].isupper() else other


def _prose(rng: random.Random, literals: Sequence[str], num_lines: int, *, has_returns: bool = False) -> str:
    """Prose that contains the literals, repeated lines, blank lines, white space of all kinds and long lines."""
    lines = list[str]()
    for number in range(num_lines):
        kind = rng.randrange(12)
        words = [rng.choice(_WORDS) for _ in range(rng.randrange(2, 9))]
        if literals and rng.randrange(3) == 0:
            words.insert(rng.randrange(len(words)), rng.choice(list(literals)))
        line = " ".join(words)
        if kind == 0 and lines:
            line = rng.choice(lines)
        elif kind == 1:
            line = rng.choice(("", "   ", "\t"))
        elif kind == 2:
            line = f"\t{line}\t# {rng.choice(_WORDS)}"
        elif kind == 3:
            line += rng.choice((" ", "  ", "\t"))
        elif kind == 4:
            line = line.upper()
        elif kind == 5:
            line = " ".join(rng.choice(_WORDS) for _ in range(20))
        elif kind == 6:
            line = f"{rng.randrange(1, 1000)},{line.replace(' ', ',', 1)},{number}"
        lines.append(line)
    for position, literal in enumerate(literals[:num_lines]):
        lines[(position * 5 + 2) % num_lines] += f" {literal}"
    end = "\r\n" if has_returns else "\n"
    return "".join(line + end for line in lines)


def _code(rng: random.Random, literals: Sequence[str]) -> str:
    """A small Python file, with trailing white space."""
    lines = ["import os", ""]
    for number in range(rng.randrange(2, 5)):
        name = rng.choice(_WORDS)
        lines += [f"def {name}_{number}(value):" + rng.choice(("", "  ", "\t")), f"    return value + {number} "]
    lines += [f"# {literal}" for literal in literals]
    return "\n".join(lines) + "\n"


def _table(rng: random.Random, literals: Sequence[str]) -> str:
    """A CSV table with a header."""
    lines = ["id,name,amount"]
    for number in range(1, 13):
        name = rng.choice([*_WORDS, *literals])
        lines.append(f"{number},{name},{rng.randrange(1, 500)}")
    return "\n".join(lines) + "\n"


def _objects(rng: random.Random) -> str:
    found = [{"id": number, "name": rng.choice(_WORDS), "amount": rng.randrange(100)} for number in range(1, 6)]
    return json.dumps(found, indent=2) + "\n"


def fill(pattern: str, rng: random.Random, index: int) -> str:
    """A name that matches a glob."""
    has_space = index == 1 and pattern.startswith("*") and len(pattern) > 1
    out, position = "", 0
    while position < len(pattern):
        sign = pattern[position]
        if sign == "*":
            word = rng.choice(_WORDS)
            out += f"{word} {rng.choice(_WORDS)}" if has_space and not out else f"{word}{index}"
        elif sign == "?":
            out += str(rng.randrange(10))
        elif sign == "[" and (end := pattern.find("]", position + 2)) > 0:
            inside = pattern[position + 1 : end]
            out += inside[-1] if inside[0] not in "!^" else "z"
            position = end
        else:
            out += sign
        position += 1
    return out
