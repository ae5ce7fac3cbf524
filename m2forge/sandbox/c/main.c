/* The supervisor: reads what to build, creates the namespaces with PID 1 in them, waits for its end and cleans up.

   It stays outside the sandbox, because only there it can remove cgroups and the upper layer after a `kill -9` of the
   process that started it. */
#include "sandbox.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/loop.h>
#include <linux/sched.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef CLONE_NEWTIME
#define CLONE_NEWTIME 0x80
#endif

static void write_file(const char *path, const char *text, const char *what) {
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0 || write(fd, text, strlen(text)) != (ssize_t)strlen(text)) fail(what);
    close(fd);
}

static const char **get_texts(struct reader *r, uint32_t *count) {
    *count = get_u32(r);
    if (*count > 4096) {
        errno = E2BIG;
        fail("setup");
    }
    const char **texts = calloc(*count + 1, sizeof *texts);
    if (!texts) fail("memory");
    for (uint32_t i = 0; i < *count; i++) texts[i] = get_text(r);
    return texts;
}

static struct setup parse_setup(struct reader *r) {
    struct setup s = {.uid = get_u32(r), .gid = get_u32(r)};
    s.outer_uid = get_u32(r);
    s.outer_gid = get_u32(r);
    s.num_ids = get_u32(r);
    s.hostname = get_text(r);
    s.workspace = get_text(r);
    s.user = get_text(r);
    s.disk = get_text(r);
    s.upper_bytes = get_u64(r);
    s.upper_inodes = get_u64(r);
    s.shm_bytes = get_u64(r);
    s.layers = get_texts(r, &s.num_layers);
    uint32_t num_targets;
    const char **sources = get_texts(r, &s.num_binds), **targets = get_texts(r, &num_targets);
    s.binds = calloc(s.num_binds + 1, sizeof *s.binds);
    if (!s.binds || num_targets != s.num_binds) fail("setup");
    for (uint32_t i = 0; i < s.num_binds; i++) {
        /* A source that begins with `+` stays writable: a device. */
        bool is_writable = sources[i][0] == '+';
        s.binds[i] = (struct bind){sources[i] + is_writable, targets[i], is_writable, -1};
    }
    s.num_ports = get_u32(r);
    if (s.num_ports > MAX_PORTS) fail("setup");
    for (uint32_t i = 0; i < s.num_ports; i++) s.ports[i] = (uint16_t)get_u32(r);
    s.cgroups = get_texts(r, &s.num_cgroups);
    s.files = get_texts(r, &s.num_writes);
    s.values = get_texts(r, &num_targets);
    if (num_targets != s.num_writes) fail("setup");
    return s;
}

/* PID 1 in its namespaces, and in the cgroup of version 2 if there is one. */
static pid_t clone_init(int cgroup) {
    uint64_t flags =
        CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP;
    struct clone_args args = {.flags = flags | CLONE_NEWTIME, .exit_signal = SIGCHLD};
    if (cgroup >= 0) args.flags |= CLONE_INTO_CGROUP, args.cgroup = (uint64_t)cgroup;
    pid_t child = (pid_t)syscall(SYS_clone3, &args, sizeof args);
    if (child >= 0 || errno != EINVAL) return child;
    args.flags &= ~(uint64_t)CLONE_NEWTIME; /* a kernel without time namespaces */
    return (pid_t)syscall(SYS_clone3, &args, sizeof args);
}

static void write_maps(pid_t child, const struct setup *s) {
    char path[64], text[64];
    bool is_range = s->num_ids > 1;
    if (!is_range) {
        snprintf(path, sizeof path, "/proc/%d/setgroups", child);
        write_file(path, "deny", "setgroups");
    }
    snprintf(path, sizeof path, "/proc/%d/gid_map", child);
    snprintf(text, sizeof text, "%u %u %u", is_range ? 0 : s->gid, s->outer_gid, s->num_ids);
    write_file(path, text, "gid map");
    snprintf(path, sizeof path, "/proc/%d/uid_map", child);
    snprintf(text, sizeof text, "%u %u %u", is_range ? 0 : s->uid, s->outer_uid, s->num_ids);
    write_file(path, text, "uid map");
}

/* The upper layer on disk is a file system in a file of fixed size beside the folder on which it is mounted, because
   nothing else limits what a sandbox writes. The device is freed with its last mount. */
static void mount_disk(const struct setup *s) {
    char path[4200], device[32];
    snprintf(path, sizeof path, "%s.img", s->disk);
    int file = open(path, O_RDWR | O_CLOEXEC), control = open("/dev/loop-control", O_RDWR | O_CLOEXEC), loop = -1;
    if (file < 0 || control < 0) fail("disk");
    for (int attempt = 0; loop < 0 && attempt < 100; attempt++) {
        int number = ioctl(control, LOOP_CTL_GET_FREE);
        snprintf(device, sizeof device, "/dev/loop%d", number);
        if (number < 0 || (loop = open(device, O_RDWR | O_CLOEXEC)) < 0) fail("disk");
        struct loop_config config = {.fd = (uint32_t)file, .info = {.lo_flags = LO_FLAGS_AUTOCLEAR}};
        if (ioctl(loop, LOOP_CONFIGURE, &config) == 0) continue;
        if (errno != EBUSY) fail("disk");
        close(loop); /* Another process was faster. */
        loop = -1;
    }
    if (loop < 0 || unshare(CLONE_NEWNS) < 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0 ||
        mount(device, s->disk, "ext4", MS_NOSUID | MS_NODEV, "noinit_itable,discard") < 0)
        fail("disk");
    close(loop);
    close(control);
    close(file);
}

static struct setup *cleaned;
static pid_t init_pid;

static void clean_up(void) {
    const struct setup *s = cleaned;
    if (init_pid > 0 && kill(init_pid, SIGKILL) == 0) waitpid(init_pid, NULL, 0);
    for (uint32_t i = s->num_cgroups; i-- > 0;)
        for (int attempt = 0; rmdir(s->cgroups[i]) < 0 && errno == EBUSY && attempt < 200; attempt++) usleep(5000);
    if (!s->disk[0]) return;
    char path[4200];
    snprintf(path, sizeof path, "%s.img", s->disk);
    umount2(s->disk, MNT_DETACH);
    unlink(path);
    rmdir(s->disk);
}

/* Ways into the cgroups of a sandbox for which the kernel need not wait until every processor has seen the move, which
   takes 15 ms: in version 1 a thread moves itself, in version 2 it is cloned into its group. */
struct entrances {
    int tasks[MAX_CGROUPS], num_tasks, unified;
};

static struct entrances make_cgroups(const struct setup *s) {
    struct entrances e = {.unified = -1};
    char path[4200];
    if (s->num_cgroups > MAX_CGROUPS) fail("setup");
    for (uint32_t i = 0; i < s->num_cgroups; i++)
        if (mkdir(s->cgroups[i], 0755) < 0 && errno != EEXIST) fail(s->cgroups[i]);
    for (uint32_t i = 0; i < s->num_writes; i++) write_file(s->files[i], s->values[i], s->files[i]);
    for (uint32_t i = 0; i < s->num_cgroups; i++) {
        snprintf(path, sizeof path, "%s/tasks", s->cgroups[i]);
        int fd = open(path, O_WRONLY | O_CLOEXEC);
        if (fd >= 0) e.tasks[e.num_tasks++] = fd;
        else if (errno != ENOENT || (e.unified = open(s->cgroups[i], O_PATH | O_DIRECTORY | O_CLOEXEC)) < 0) fail(path);
    }
    return e;
}

/* Move another process; what the kernel refuses is reported by its reason. */
static void move_into(int group, pid_t child) {
    char text[16];
    int fd = openat(group, "cgroup.procs", O_WRONLY | O_CLOEXEC), size = snprintf(text, sizeof text, "%d", child);
    if (fd < 0 || write(fd, text, (size_t)size) != size) fail("cgroup");
    close(fd);
}

static void enter_cgroups(const struct entrances *e) {
    for (int i = 0; i < e->num_tasks; i++) {
        if (write(e->tasks[i], "0", 1) != 1) fail("cgroup");
        close(e->tasks[i]);
    }
    if (e->unified >= 0) close(e->unified);
}

/* The process that made the socket, which is the parent, as a descriptor that can be polled for its end. */
static int open_owner(void) {
    struct ucred peer;
    socklen_t size = sizeof peer;
    if (getsockopt(control_fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) < 0) fail("owner");
    int fd = (int)syscall(SYS_pidfd_open, getppid(), 0);
    if (fd < 0) fail("owner");
    if (getppid() != peer.pid) _exit(1); /* It is gone already. */
    return fd;
}

static void report_ready(const struct setup *s) {
    prepare_root(s);
    int ports[MAX_PORTS];
    for (uint32_t i = 0; i < s->num_ports; i++) ports[i] = open_port(s->ports[i]);
    send_frame(control_fd, READY, 0, NULL, 0, ports, (int)s->num_ports);
    for (uint32_t i = 0; i < s->num_ports; i++) close(ports[i]);
}

static _Noreturn void run_init(struct setup *s, const struct entrances *e, int go, int owner) {
    char byte;
    if (read(go, &byte, 1) != 1) _exit(1); /* The supervisor has failed and reported it. */
    close(go);
    enter_cgroups(e);
    build_root(s);
    report_ready(s);
    serve(owner);
}

/* PID 1 of a container: namespaces, root and limits are the runtime's. The end of the stream ends it. */
static int contain(const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof address.sun_path) return 2;
    strcpy(address.sun_path, path);
    control_fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (control_fd < 0 || connect(control_fd, (struct sockaddr *)&address, sizeof address) < 0) {
        perror(path);
        return 1;
    }
    uint32_t size;
    char *frame = receive_frame(control_fd, &size);
    if (!frame || frame[0] != SETUP) return 1;
    struct reader r = {frame + 5, frame + size};
    struct setup s = parse_setup(&r);
    if (setgroups(0, NULL) < 0 || prctl(PR_SET_DUMPABLE, 0) < 0) fail("privileges");
    report_ready(&s);
    serve(-1);
}

/* Wait for PID 1, and kill it if the owner is gone or has closed its socket: commands may keep PID 1 busy with their
   orphans, so that it sees neither. */
static void wait_for_end(pid_t child, int owner) {
    int pidfd = (int)syscall(SYS_pidfd_open, child, 0);
    struct pollfd polled[3] = {{pidfd, POLLIN, 0}, {owner, POLLIN, 0}, {control_fd, 0, 0}};
    if (pidfd < 0) kill(child, SIGKILL);
    while (pidfd >= 0 && !polled[0].revents && !polled[1].revents && !polled[2].revents) {
        if (poll(polled, 3, -1) < 0 && errno != EINTR) break;
    }
    if (!polled[0].revents) kill(child, SIGKILL);
    while (waitpid(child, NULL, 0) < 0 && errno == EINTR) {
    }
}

static int start(void) {
    uint32_t size;
    char *frame = receive_frame(control_fd, &size);
    if (!frame || frame[0] != SETUP) return 1;
    struct reader r = {frame + 5, frame + size};
    struct setup s = parse_setup(&r);
    int owner = open_owner(), go[2];
    if (pipe2(go, O_CLOEXEC) < 0) fail("pipe");
    cleaned = &s;
    before_failing = clean_up;
    if (s.disk[0]) mount_disk(&s);
    struct entrances entrances = make_cgroups(&s);
    pid_t child = clone_init(entrances.unified);
    bool is_outside = child < 0 && entrances.unified >= 0;
    if (is_outside) child = clone_init(-1); /* The namespaces may have been refused, or the group. */
    if (child < 0) fail("namespaces");
    if (!child) {
        before_failing = NULL;
        close(go[1]);
        run_init(&s, &entrances, go[0], owner);
    }
    close(go[0]);
    init_pid = child;
    write_maps(child, &s);
    if (is_outside) move_into(entrances.unified, child);
    if (write(go[1], "", 1) != 1) fail("pipe");
    close(go[1]);
    wait_for_end(child, owner);
    init_pid = 0;
    close(control_fd); /* Its reader sees the end before the removal of files, which may take long. */
    clean_up();
    return 0;
}

int main(int argc, char **argv) {
    umask(022);
    signal(SIGPIPE, SIG_IGN);
    if (argc == 3 && !strcmp(argv[1], "contain")) return contain(argv[2]);
    if (argc != 3 || strcmp(argv[1], "start")) return 2;
    control_fd = atoi(argv[2]);
    /* The terminal's interrupt key must reach the process that started this one alone, which then closes it. */
    setsid();
    fcntl(control_fd, F_SETFD, FD_CLOEXEC);
    if (control_fd > 3) syscall(SYS_close_range, 3u, (unsigned)control_fd - 1, 0u);
    syscall(SYS_close_range, (unsigned)control_fd + 1, ~0u, 0u);
    return start();
}
