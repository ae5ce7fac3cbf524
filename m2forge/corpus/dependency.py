"""Orders the files of a repository by dependency: imported files come before the files that import them.

Imports of Python, JavaScript, TypeScript, C and C++ are found by regular expressions; an import counts if it resolves
to a file of the repository. Cycles are broken at the file with the fewest unmet imports, ties by name.
"""

import heapq
import re
from collections.abc import Mapping, Sequence
from posixpath import dirname, join, normpath

_PYTHON = re.compile(
    r"^[ \t]*(?:from[ \t]+(\.*[\w.]*)[ \t]+import[ \t]+\(?([\w, \t*]*)|import[ \t]+([\w., \t]+))", re.M
)
_SCRIPT = re.compile(r"""(?:\bfrom|\bimport|\brequire\(|\bimport\()\s*['"](\.{1,2}/[^'"]+)['"]""")
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.M)
_SCRIPT_ENDINGS = ("", ".js", ".ts", ".jsx", ".tsx", ".mjs", ".vue", "/index.js", "/index.ts", "/index.tsx")


def dependency_order(files: Mapping[str, str]) -> list[str]:
    """The names of `files` (name → text), each after the files it imports, as far as cycles allow."""
    needs = {name: imports(name, text, files) - {name} for name, text in files.items()}
    needed_by: dict[str, list[str]] = {name: [] for name in files}
    for name, others in needs.items():
        for other in others:
            needed_by[other].append(name)
    # Heap entries of a file whose count has dropped since are stale and skipped.
    waiting = [(len(others), name) for name, others in needs.items()]
    heapq.heapify(waiting)
    open_needs = {name: len(others) for name, others in needs.items()}
    order: list[str] = []
    while waiting:
        count, name = heapq.heappop(waiting)
        if open_needs.get(name) != count:
            continue
        del open_needs[name]
        order.append(name)
        for other in needed_by[name]:
            if other in open_needs:
                open_needs[other] -= 1
                heapq.heappush(waiting, (open_needs[other], other))
    return order


def imports(name: str, text: str, files: Mapping[str, str]) -> set[str]:
    """The files that the file `name` imports."""
    ending = name[name.rfind(".") :].lower()
    if ending in (".py", ".pyi", ".pyx"):
        return _python_imports(name, text, files)
    if ending in (".js", ".jsx", ".ts", ".tsx", ".mjs", ".vue"):
        paths = [normpath(join(dirname(name), target)) for target in _SCRIPT.findall(text)]
        return {found for path in paths if (found := _first(files, [path + end for end in _SCRIPT_ENDINGS]))}
    if ending in (".c", ".cc", ".cpp", ".cxx", ".h", ".hh", ".hpp", ".cu", ".cuh", ".m", ".mm"):
        targets = _INCLUDE.findall(text)
        tried = [[normpath(join(dirname(name), target)), normpath(target)] for target in targets]
        return {found for paths in tried if (found := _first(files, paths))}
    return set()


def _python_imports(name: str, text: str, files: Mapping[str, str]) -> set[str]:
    found: set[str] = set()
    for source, members, modules in _PYTHON.findall(text):
        if modules:
            for module in modules.split(","):
                words = module.split()
                if words:
                    found |= _python_files(name, words[0], files)
            continue
        inside = [member.split()[0] for member in members.split(",") if member.split()]
        dotted = [f"{source}{'' if source.endswith('.') else '.'}{member}" for member in inside]
        # `from package import module` means the module if it exists, else the package itself.
        within = [_python_files(name, target, files) for target in dotted]
        found |= set().union(*within)
        if not within or not all(within):
            found |= _python_files(name, source, files)
    return found


def _python_files(name: str, module: str, files: Mapping[str, str]) -> set[str]:
    """The file of a module, relative to the importing file or in any parent folder."""
    num_dots = len(module) - len(module.lstrip("."))
    path = module.lstrip(".").replace(".", "/")
    folder = dirname(name)
    if num_dots:
        for _ in range(num_dots - 1):
            folder = dirname(folder)
        found = _first(files, _python_paths(join(folder, path).rstrip("/")))
        return {found} if found else set()
    while True:
        if found := _first(files, _python_paths(join(folder, path))):
            return {found}
        if not folder:
            return set()
        folder = dirname(folder)


def _python_paths(path: str) -> list[str]:
    return [f"{path}.py", f"{path}/__init__.py", f"{path}.pyi", f"{path}.pyx"]


def _first(files: Mapping[str, str], paths: Sequence[str]) -> str | None:
    return next((path for path in paths if path in files), None)
