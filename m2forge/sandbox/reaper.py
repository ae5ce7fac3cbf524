"""The reaper process between a sandbox and a command: starts the command, waits for it, and kills all it started.

A standalone module, run as `python -I -S -c "import reaper; reaper.main()" CONTROL STATUS` with two inherited sockets:

    CONTROL ──▶ a length and an `Order`                closing it kills the command
    STATUS  ◀── `STARTED` at once, `REPORT` at the end

Messages on STATUS are fixed structs that begin with the order's secret, which the command does not have. The command
inherits neither socket, and no process can open a socket through /proc; a reaper is not dumpable, so that a command of
the same user can neither trace it nor take its file descriptors.

As a subreaper it adopts every descendant whose parent dies, so a command's processes cannot escape by forking twice or
starting a session. It kills all of them when the command ends, when it times out, and when CONTROL closes, because the
sandbox stops the command or dies of any signal.

It imports little, because every command starts one: `signal` imports enum, and `ctypes` defines dozens of types, which
together take longer than the rest, so it uses the modules below them. As an imported module it is compiled once, a
script each time.
"""

import _ctypes
import _signal as signal  # type: ignore[import-not-found]  # typeshed has only `signal`
import errno
import os
import resource
import select
import struct
import sys
import time

SECRET_BYTES = 16
LIMITS = ("RLIMIT_AS", "RLIMIT_CPU", "RLIMIT_FSIZE", "RLIMIT_NPROC", "RLIMIT_CORE")
"""Names of the limits in `resource`, in the order of the packed `Order`."""
STARTED = struct.Struct(f"<{SECRET_BYTES}sq")
"""Secret, the command's process id."""
REPORT = struct.Struct(f"<{SECRET_BYTES}sH??dq")
"""Secret, wait status, whether it timed out, whether the sandbox requested the kill, CPU seconds, peak memory bytes."""
_ORDER = struct.Struct(f"<{SECRET_BYTES}sdd{len(LIMITS)}qII")
"""Secret, timeout and grace in seconds, limits (-1: none), number of arguments and of variables. Length-prefixed texts
follow: folder, arguments, names and values of environment variables."""
_LENGTH = struct.Struct("<I")


class Order:
    """The command to run, and its limits."""

    def __init__(
        self,
        secret: bytes,
        argv: list[str],
        env: dict[str, str],
        folder: str,
        limits: dict[str, int],
        timeout_s: float,
        grace_s: float,
    ) -> None:
        self.secret, self.argv, self.env, self.folder = secret, argv, env, folder
        self.limits, self.timeout_s, self.grace_s = limits, timeout_s, grace_s

    def pack(self) -> bytes:
        limits = (self.limits.get(name, -1) for name in LIMITS)
        head = _ORDER.pack(self.secret, self.timeout_s, self.grace_s, *limits, len(self.argv), len(self.env))
        texts = [self.folder, *self.argv, *(text for item in self.env.items() for text in item)]
        # A text that is not valid UTF-8 fails at exec, like one that contains a null byte.
        encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
        return head + b"".join(_LENGTH.pack(len(text)) + text for text in encoded)

    @classmethod
    def unpack(cls, data: bytes) -> "Order":
        secret, timeout_s, grace_s, *limits, num_argv, num_env = _ORDER.unpack_from(data)
        texts, start = [], _ORDER.size
        for _ in range(1 + num_argv + 2 * num_env):
            (length,) = _LENGTH.unpack_from(data, start)
            start += _LENGTH.size + length
            texts.append(data[start - length : start].decode("utf-8", "surrogatepass"))
        variables = texts[1 + num_argv :]
        env = dict(zip(variables[::2], variables[1::2], strict=True))
        set_limits = {name: most for name, most in zip(LIMITS, limits, strict=True) if most >= 0}
        return cls(secret, texts[1 : 1 + num_argv], env, texts[0], set_limits, timeout_s, grace_s)


SUBREAPER, DEATH_SIGNAL, DUMPABLE = 36, 1, 4
"""Options of prctl."""
GIVE_UP_S = 5.0
"""Processes that survive SIGKILL for this long are stuck in the kernel."""
PARENT_POLL_S = 1.0
"""Poll interval for the parent's death: a fork of the parent may keep CONTROL open after its death."""
CANNOT_RUN, NOT_FOUND = 126, 127


def main() -> None:
    control, status = int(sys.argv[1]), int(sys.argv[2])
    parent = os.getppid()
    order = Order.unpack(_read_order(control))
    program = _ctypes.dlopen(None, os.RTLD_NOW)  # type: ignore[arg-type]  # None is this program, as for dlopen(3)
    prctl = _ctypes.dlsym(program, "prctl")
    _ctypes.call_function(prctl, (DUMPABLE, 0, 0, 0, 0))
    if _ctypes.call_function(prctl, (SUBREAPER, 1, 0, 0, 0)):
        sys.exit("a process cannot adopt its descendants here; Linux 3.4 or later is needed")
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    command = os.fork()
    if not command:
        _become(order, {control, status, woken, wake}, prctl)
    os.write(status, STARTED.pack(order.secret, command))
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)  # Only the command holds its streams, so that they end with it.
    reaper = Reaper(command, control, woken, parent)
    reaper.watch(order.timeout_s, order.grace_s)
    reaper.kill_all()
    report = (reaper.wait_status, reaper.is_timeout, reaper.is_requested, reaper.cpu_s, reaper.max_memory_bytes)
    try:  # noqa: SIM105  (contextlib takes long to import)
        os.write(status, REPORT.pack(order.secret, *report))
    except BrokenPipeError:
        pass  # The sandbox has died.
    os._exit(0)  # The sandbox waits for the exit; the interpreter's clean-up would take milliseconds.


class Reaper:
    def __init__(self, command: int, control: int, woken: int, parent: int) -> None:
        self._command, self._control, self._woken, self._parent = command, control, woken, parent
        self._is_over, self._has_children = False, True
        self.wait_status: int = signal.SIGKILL
        self.is_timeout, self.is_requested = False, False
        self.cpu_s, self.max_memory_bytes = 0.0, 0

    def watch(self, timeout_s: float, grace_s: float) -> None:
        """Wait until the command ends or must be killed."""
        end_s = time.monotonic() + timeout_s
        self._reap()
        while not self._is_over:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                if self.is_timeout or not grace_s:
                    self.is_timeout = True
                    return
                self.is_timeout = True
                end_s += grace_s
                self._terminate_all()
                continue
            ready, _, _ = select.select([self._control, self._woken], [], [], min(left_s, PARENT_POLL_S))
            if self._control in ready or os.getppid() != self._parent or self._has_command():
                self.is_requested = True
                return
            self._reap()

    def kill_all(self) -> None:
        """Kill and reap all descendants; the children of each become ours when it dies."""
        end_s = time.monotonic() + GIVE_UP_S
        self._reap()
        while self._has_children and time.monotonic() < end_s:
            for process in descendants(os.getpid()):
                _signal(process, signal.SIGKILL)
            select.select([self._woken], [], [], 0.01)
            self._has_command()
            self._reap()

    def _terminate_all(self) -> None:
        for process in descendants(os.getpid()):
            _signal(process, signal.SIGTERM)

    def _has_command(self) -> bool:
        """Whether this process received a termination signal."""
        try:
            numbers = os.read(self._woken, 4096)
        except BlockingIOError:
            return False
        return any(number != signal.SIGCHLD for number in numbers)

    def _reap(self) -> None:
        while True:
            try:
                process, wait_status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                self._has_children = False
                return
            if not process:
                return
            self.cpu_s += usage.ru_utime + usage.ru_stime
            self.max_memory_bytes = max(self.max_memory_bytes, usage.ru_maxrss << 10)
            if process == self._command:
                self._is_over, self.wait_status = True, wait_status


def descendants(ancestor: int) -> list[int]:
    """Pids of all current descendants of a process."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208  (pathlib takes long to import)
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                    # The process name, in brackets, may contain anything.
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue
            children.setdefault(parent, []).append(int(name))
    below_ancestor: list[int] = []
    waiting = [ancestor]
    while waiting:
        below = children.get(waiting.pop(), [])
        below_ancestor += below
        waiting += below
    return below_ancestor


def _become(order: Order, pipes: set[int], prctl: int) -> None:
    """Exec the command in the child; never returns."""
    argv = order.argv
    try:
        os.setsid()  # Its pid is now also its session id and group id.
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        # If the reaper itself is killed, at least its child dies with it.
        _ctypes.call_function(prctl, (DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0))
        for pipe in pipes:
            os.close(pipe)
        os.chdir(order.folder)
        for name, most in order.limits.items():
            kind = getattr(resource, name)
            hard = resource.getrlimit(kind)[1]
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(kind, (most, most))
        os.execvpe(argv[0], argv, order.env)
    except OSError as error:
        os.write(2, f"{argv[0]}: cannot be run: {error.strerror}\n".encode())
        os._exit(NOT_FOUND if error.errno == errno.ENOENT else CANNOT_RUN)
    except BaseException as error:  # noqa: BLE001  (the child must not go on as a second reaper)
        os.write(2, f"{argv[0]}: cannot be run: {error}\n".encode())
        os._exit(CANNOT_RUN)


def _signal(process: int, number: int) -> None:
    try:  # noqa: SIM105
        os.kill(process, number)
    except (ProcessLookupError, PermissionError):
        pass  # It ended, or its pid now belongs to another user.


def _read_order(control: int) -> bytes:
    size = int.from_bytes(_read_exactly(control, 8), "little")
    return _read_exactly(control, size)


def _read_exactly(source: int, size: int) -> bytes:
    parts = []
    while size:
        part = os.read(source, size)
        if not part:
            sys.exit("the order ended early")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
