/* The seccomp filter of commands: a denylist of calls that reach the kernel's rarely used parts, other namespaces, other
   processes' memory or keys. A denied call returns EPERM; clone3 returns ENOSYS, so that libraries use clone, whose flags
   can be checked. */
#include "sandbox.h"

#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/sched.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#if defined(__x86_64__)
#define ARCH AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define ARCH AUDIT_ARCH_AARCH64
#else
#error "no seccomp filter for this architecture"
#endif

#define NEW_NAMESPACES                                                                                       \
    (CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET | 0x80)
#define CLONE_FLAGS (NEW_NAMESPACES & ~0x80) /* clone's lowest byte is a signal */

/* Calls that older headers do not name have the same number on every architecture. */
#ifndef SYS_mount_setattr
#define SYS_mount_setattr 442
#endif
#ifndef SYS_quotactl_fd
#define SYS_quotactl_fd 443
#endif
#ifndef SYS_open_tree_attr
#define SYS_open_tree_attr 467
#endif

static const int DENIED[] = {
    /* mounts and namespaces */
    SYS_mount, SYS_umount2, SYS_pivot_root, SYS_chroot, SYS_setns, SYS_fsopen, SYS_fsconfig, SYS_fsmount, SYS_fspick,
    SYS_move_mount, SYS_open_tree, SYS_open_tree_attr, SYS_mount_setattr, SYS_open_by_handle_at, SYS_quotactl, SYS_quotactl_fd,
    SYS_fanotify_init,
    /* other processes */
    SYS_ptrace, SYS_process_vm_readv, SYS_process_vm_writev, SYS_pidfd_getfd, SYS_kcmp, SYS_userfaultfd,
    /* keys */
    SYS_keyctl, SYS_add_key, SYS_request_key,
    /* the kernel itself */
    SYS_bpf, SYS_perf_event_open, SYS_io_uring_setup, SYS_io_uring_enter, SYS_io_uring_register, SYS_init_module,
    SYS_finit_module, SYS_delete_module, SYS_kexec_load, SYS_kexec_file_load, SYS_reboot, SYS_swapon, SYS_swapoff,
    SYS_acct, SYS_syslog, SYS_settimeofday, SYS_clock_settime, SYS_adjtimex, SYS_clock_adjtime, SYS_vhangup,
    SYS_nfsservctl, SYS_lookup_dcookie, SYS_migrate_pages, SYS_move_pages,
#if defined(__x86_64__)
    SYS_iopl, SYS_ioperm, SYS_modify_ldt, SYS_uselib, SYS_sysfs, SYS__sysctl, SYS_create_module, SYS_get_kernel_syms,
    SYS_query_module,
#endif
};
static const int FAMILIES[] = {AF_UNIX, AF_INET, AF_INET6, AF_NETLINK};
static const unsigned TERMINAL[] = {0x5412 /* TIOCSTI */, 0x541C /* TIOCLINUX */};

enum { MAX_LENGTH = 512 };
static struct sock_filter program[MAX_LENGTH];
static unsigned short length;

#define LOAD(field) add(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field), 0, 0)
#define ARGUMENT_LOW(n) (offsetof(struct seccomp_data, args) + 8 * (n)) /* both architectures are little endian */
#define DENY(code) (SECCOMP_RET_ERRNO | (code))

static void add(unsigned short code, unsigned value, unsigned char if_true, unsigned char if_false) {
    program[length++] = (struct sock_filter){code, if_true, if_false, value};
}

static void deny(int call, int code) {
    add(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)call, 0, 1);
    add(BPF_RET | BPF_K, DENY(code), 0, 0);
}

/* Deny `call` if argument `n` has one of the bits of `mask`. The number of the call is loaded before and after. */
static void deny_bits(int call, int n, unsigned mask) {
    add(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)call, 0, 4);
    add(BPF_LD | BPF_W | BPF_ABS, (unsigned)ARGUMENT_LOW(n), 0, 0);
    add(BPF_JMP | BPF_JSET | BPF_K, mask, 0, 1);
    add(BPF_RET | BPF_K, DENY(EPERM), 0, 0);
    add(BPF_RET | BPF_K, SECCOMP_RET_ALLOW, 0, 0);
}

/* Deny `call` unless, or if, argument `n` is one of `values`. */
static void deny_values(int call, int n, const unsigned *values, unsigned char count, bool are_allowed, int code) {
    add(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)call, 0, (unsigned char)(count + 3));
    add(BPF_LD | BPF_W | BPF_ABS, (unsigned)ARGUMENT_LOW(n), 0, 0);
    for (unsigned char i = 0; i < count; i++)
        add(BPF_JMP | BPF_JEQ | BPF_K, values[i], (unsigned char)(count - i), 0);
    add(BPF_RET | BPF_K, are_allowed ? DENY((unsigned)code) : SECCOMP_RET_ALLOW, 0, 0);
    add(BPF_RET | BPF_K, are_allowed ? SECCOMP_RET_ALLOW : DENY((unsigned)code), 0, 0);
}

bool install_filter(void) {
    length = 0;
    LOAD(arch);
    add(BPF_JMP | BPF_JEQ | BPF_K, ARCH, 1, 0); /* Calls of another architecture have other numbers. */
    add(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS, 0, 0);
    LOAD(nr);
#if defined(__x86_64__)
    add(BPF_JMP | BPF_JGE | BPF_K, 0x40000000, 0, 1); /* x32 */
    add(BPF_RET | BPF_K, DENY(ENOSYS), 0, 0);
#endif
    for (size_t i = 0; i < sizeof DENIED / sizeof *DENIED; i++) deny(DENIED[i], EPERM);
    deny(SYS_clone3, ENOSYS);
    deny_bits(SYS_clone, 0, CLONE_FLAGS);
    deny_bits(SYS_unshare, 0, NEW_NAMESPACES);
    deny_values(SYS_socket, 0, (const unsigned *)FAMILIES, sizeof FAMILIES / sizeof *FAMILIES, true, EAFNOSUPPORT);
    deny_values(SYS_ioctl, 1, TERMINAL, sizeof TERMINAL / sizeof *TERMINAL, false, EPERM);
    add(BPF_RET | BPF_K, SECCOMP_RET_ALLOW, 0, 0);
    struct sock_fprog filter = {length, program};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}
