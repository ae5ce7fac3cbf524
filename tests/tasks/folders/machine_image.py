"""An image with programs of this machine, for task folders whose base cannot be pulled.

It has Python with pytest, a C compiler, git and the usual tools, each with the libraries that it loads: about 200 MB.
"""

import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

PROGRAMS = """
sh bash dash env cat cp mv rm ln ls mkdir rmdir chmod chown touch head tail cut tr sort uniq wc cmp
diff grep sed awk mawk find xargs stat test true false sleep dirname basename mktemp tar gzip seq
tee date id uname readlink expr printf echo git make gcc cc as ld python3
"""
FOLDERS = ("lib/gcc", "include", "lib/git-core", "share/git-core")
UNNEEDED = ("cc1plus", "lto1", "c++", "lib?san*", "lib??san*", "lib???san*", "libgomp*", "libstdc++*")
SMALL = ("*.o", "libc.so*", "libc_nonshared.a", "libm.so*", "libmvec*", "libgcc_s*")
"""What a compiler links."""
MODULES = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "py")


def build_small(root: Path, programs: str) -> None:
    """Write the named programs and their libraries below a folder."""
    _copy_programs(root, programs)
    _copy_libraries(root)


def build(root: Path) -> Path:
    """Write the files of the image below a folder."""
    _copy_programs(root, PROGRAMS)
    for name in FOLDERS:
        _copy(Path("/usr") / name, root)
    python = Path("/usr/bin/python3").resolve()
    _copy(python, root)
    library = Path("/usr/lib") / python.name
    shutil.copytree(
        library, root / str(library)[1:], ignore=shutil.ignore_patterns("test", "__pycache__", "dist-packages")
    )
    for name in MODULES:
        spec = find_spec(name)
        if spec is not None and spec.origin is not None:
            origin, target = Path(spec.origin), root / str(library)[1:]
            if origin.name == "__init__.py":
                shutil.copytree(origin.parent, target / name)
            else:
                shutil.copy2(origin, target)
    _copy_libraries(root)
    return root


def _copy_programs(root: Path, programs: str) -> None:
    for name in ("tmp", "root", "proc", "dev", "etc", "usr/bin", "usr/lib", "usr/lib64"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / name).symlink_to("usr/bin" if "bin" in name else f"usr/{name}")
    (root / "etc" / "passwd").write_text("root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/tmp:/bin/sh\n")
    for name in programs.split():
        if found := shutil.which(name, path="/usr/bin:/bin"):
            _copy(Path(found), root)


def _copy(source: Path, root: Path) -> None:
    target = (
        root / "usr" / source.relative_to("/usr") if source.is_relative_to("/usr") else root / "usr" / str(source)[1:]
    )
    if target.exists() or target.is_symlink() or not source.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns(*UNNEEDED))
    else:
        shutil.copy2(source.resolve(), target)


def _copy_libraries(root: Path) -> None:
    """The libraries that programs load, and those that a compiler links."""
    programs = [path for path in root.rglob("*") if path.is_file() and not path.is_symlink() and _is_elf(path)]
    listed = subprocess.run(["ldd", *map(str, programs)], capture_output=True, text=True).stdout
    found = {Path(name) for name in re.findall(r"(?:=> |\t)(/\S+) \(", listed)}
    loaders = Path("/usr/lib").glob("*-linux-gnu")
    for folder in loaders:
        found |= {path for pattern in SMALL for path in folder.glob(pattern)}
    for path in found:
        target = root / "usr" / re.sub(r"^/(usr/)?", "", str(path))
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path.resolve(), target)


def _is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"
