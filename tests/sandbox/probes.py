"""Attempts to leave a sandbox, as Python programs: one that reaches its end has succeeded.

Each is run outside too, where it succeeds, so that a probe that cannot succeed anywhere is noticed. None of them
changes anything on the machine outside that it does not undo.
"""

PRELUDE = """
import ctypes, errno, fcntl, glob, os, platform, resource, signal, socket, stat, subprocess, sys, time
libc = ctypes.CDLL(None, use_errno=True)
ARM = platform.machine() == "aarch64"

def call(number, *arguments):
    value = libc.syscall(ctypes.c_long(number), *[
        ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
    if value < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return value

def known(number, *arguments):
    # The kernel looked at the arguments, which are wrong, instead of refusing the call.
    try:
        call(number, *arguments)
    except OSError as error:
        assert error.errno not in (errno.EPERM, errno.ENOSYS, errno.EACCES), error

def private_mounts():
    # Outside, mounts are tried in a copy of the mount namespace.
    if libc.unshare(0x20000) == 0:
        assert libc.mount(None, b"/", None, 0x44000, None) == 0

def mount(*arguments):
    if libc.mount(*arguments):
        raise OSError(ctypes.get_errno(), "mount")

PARENT = os.getppid()

def pick(arm, intel):
    return arm if ARM else intel
"""

RUNNER = """
import json

def succeeds(code):
    child = os.fork()
    if child == 0:
        try:
            exec(code, globals())
            os._exit(0)
        except SyntaxError:
            os._exit(2)
        except BaseException:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert status != 2 << 8, code
    return status == 0

print(json.dumps([name for name, code in PROBES.items() if succeeds(code)]))
"""
"""Runs each probe in a process of its own, and prints the names of those that succeed."""

PROBES = {
    # other processes and /proc
    "environ_of_a_process": "assert 'VICTIM_KEY' in open(f'/proc/{VICTIM}/environ').read()",
    "command_lines": "assert any(b'4711' * 2 in open(p, 'rb').read() for p in glob.glob('/proc/[0-9]*/cmdline'))",
    "root_of_a_process": "open(f'/proc/{VICTIM}/root{SECRET}').read()",
    "folder_of_a_process": "assert os.readlink(f'/proc/{VICTIM}/cwd') == '/'",
    "signal_a_process": "os.kill(VICTIM, 0)",
    "signal_the_parent": "os.kill(PARENT, 0)",
    "environ_of_the_parent": "assert open(f'/proc/{PARENT}/environ').read()",
    "memory_of_the_parent": "open(f'/proc/{PARENT}/mem', 'rb')",
    "descriptors_of_the_parent": "os.listdir(f'/proc/{PARENT}/fd')",
    "ptrace": "call(pick(117, 101), 0, 0, 0, 0)",
    "read_memory_by_call": "call(pick(270, 310), os.getpid(), 0, 0, 0, 0, 0)",
    "pidfd_getfd": "call(438, call(434, os.getpid(), 0), 1, 0)",
    "raise_priority": "os.nice(-5)",
    "raise_limits": "resource.setrlimit(resource.RLIMIT_CORE, (4096, 4096))",
    # files
    "file_by_path": "open(SECRET).read()",
    "file_by_dots": "open('../' * 60 + SECRET).read()",
    "file_by_link": "os.symlink(SECRET, f'link{os.getpid()}'); open(f'link{os.getpid()}').read()",
    "shadow": "open('/etc/shadow').read()",
    "home": "assert os.listdir(HOST_HOME)",
    "write_system_folder": "p = f'/usr/m2forge-{os.getpid()}'; open(p, 'w').close(); os.unlink(p)",
    "file_by_handle": """
buffer = ctypes.create_string_buffer(136); ctypes.c_uint.from_buffer(buffer).value = 128
number = ctypes.c_int()
call(pick(264, 303), -100, b'/usr', buffer, ctypes.byref(number), 0)
call(pick(265, 304), os.open('/usr', os.O_RDONLY), buffer, os.O_RDONLY)""",
    "block_device": "p = f'node{os.getpid()}'; os.mknod(p, stat.S_IFBLK | 0o600, os.makedev(1, 0)); os.unlink(p)",
    "character_device": "p = f'node{os.getpid()}'; os.mknod(p, stat.S_IFCHR | 0o600, os.makedev(1, 1)); os.unlink(p)",
    "kernel_messages": "os.open('/dev/kmsg', os.O_RDONLY | os.O_NONBLOCK)",
    "devices": "assert len(os.listdir('/dev')) > 16",
    "sysfs": "assert os.listdir('/sys/class')",
    "kernel_settings": "os.open('/proc/sys/kernel/core_pattern', os.O_WRONLY)",
    "sysrq": "os.open('/proc/sysrq-trigger', os.O_WRONLY)",
    "kernel_memory": "os.open('/proc/kcore', os.O_RDONLY)",
    "chroot": "os.chroot('.')",
    # mounts and namespaces
    "mount": "os.makedirs('m', exist_ok=True); private_mounts(); mount(b'tmpfs', b'm', b'tmpfs', 0, None)",
    "bind_mount": "os.makedirs('b', exist_ok=True); private_mounts(); mount(b'/', b'b', None, 0x1000, None)",
    "remount_writable": "private_mounts(); mount(b'/usr', b'/usr', None, 0x1000, None);"
    "mount(None, b'/usr', None, 0x1020, None)",
    "new_mount_calls": "call(430, b'tmpfs', 0)",
    "open_tree": "call(428, -100, b'/', 1)",
    "user_namespace": "assert libc.unshare(0x10000000) == 0",
    "mount_namespace": "assert libc.unshare(0x20000) == 0",
    "network_namespace": "assert libc.unshare(0x40000000) == 0",
    "namespace_by_clone": "os.waitpid(p, 0) if (p := call(pick(220, 56), 0x10000011, 0, 0, 0, 0)) else os._exit(0)",
    "enter_a_namespace": "assert libc.setns(os.open('/proc/self/ns/uts', os.O_RDONLY), 0) == 0",
    "hostname": "name = socket.gethostname().encode(); assert libc.sethostname(name, len(name)) == 0",
    "cgroup": "os.mkdir(CGROUP); os.rmdir(CGROUP)",
    # rights
    "become_root": "os.setuid(0)",
    "setuid_program": "assert not os.statvfs('/usr/bin').f_flag & os.ST_NOSUID",
    "capabilities": "assert libc.prctl(23, 21) == 1",
    "new_privileges": "assert libc.prctl(39, 0, 0, 0, 0) == 0",
    "add_a_key": "call(pick(217, 248), b'user', b'm2forge-probe', b'x', 1, -2)",
    "session_keys": "call(pick(219, 250), 0, -3, 0)",
    "keys_in_proc": "assert os.access('/proc/keys', os.R_OK) and call(pick(219, 250), 0, -3, 1)",
    # the kernel
    "bpf": "known(pick(280, 321), 0, 0, 0)",
    "perf": "known(pick(241, 298), 0, 0, -1, -1, 0)",
    "userfaultfd": "call(pick(282, 323), 0)",
    "io_uring": "known(425, 1, 0)",
    "load_a_module": "known(pick(105, 175), 0, 0, b'')",
    "swap": "known(pick(224, 167), b'/nowhere', 0)",
    "accounting": "known(pick(89, 163), b'/nowhere')",
    "kernel_log": "call(pick(116, 103), 10, 0, 0)",
    "terminal_input": "a, b = os.openpty(); os.setsid(); fcntl.ioctl(b, 0x540E, 0); fcntl.ioctl(b, 0x5412, b'x')",
    # network and sockets
    "loopback": "socket.create_connection(('127.0.0.1', TCP_PORT), 2)",
    "loopback_datagram": """
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(1)
s.sendto(b'ping', ('127.0.0.1', UDP_PORT)); assert s.recv(10) == b'pong'""",
    "host_address": "assert HOST_IP and socket.create_connection((HOST_IP, TCP_PORT), 2)",
    "interfaces": "assert {name for _, name in socket.if_nameindex()} > {'lo'}",
    "abstract_socket": "s = socket.socket(socket.AF_UNIX); s.connect('\\0' + ABSTRACT)",
    "socket_in_a_folder": "s = socket.socket(socket.AF_UNIX); s.connect(SOCKET)",
    "name_server": "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.sendto(bytes(12), (NAME_SERVER, 53))",
    "raw_socket": "socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)",
    "packet_socket": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "vsock": "socket.socket(40, socket.SOCK_STREAM)",
    "crypto_socket": "socket.socket(38, socket.SOCK_SEQPACKET)",
    # what this process has
    "inherited_descriptor": "assert any(os.readlink(p) == SECRET for p in glob.glob('/proc/self/fd/*') "
    "if os.path.lexists(p))",
    "inherited_variable": "assert os.environ['HOST_SECRET']",
}
