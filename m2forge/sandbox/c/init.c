/* PID 1 of a sandbox: runs commands as its children, ends them at their time limit, and reaps every orphan.

   A command is a session of its own, with the streams that came with its frame. It has no capability, no way to gain
   one, and no descriptor but its streams. What it leaves running lives until the sandbox ends. */
#include "sandbox.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { EXECUTE = 0, PACK = 1, UNPACK = 2, PACK_UPPER = 3, BUILD = 4 };
enum { NUM_LIMITS = 5, MAX_WORDS = 1 << 16 };
static const int LIMITS[NUM_LIMITS] = {RLIMIT_AS, RLIMIT_CPU, RLIMIT_FSIZE, RLIMIT_NPROC, RLIMIT_NOFILE};

struct command {
    uint32_t id;
    pid_t pid;
    uint64_t deadline_ms, grace_ms; /* deadline_ms: of the next signal */
    bool is_timeout, is_requested, is_upper;
};

struct order {
    uint8_t mode;
    uint64_t timeout_ms, grace_ms, limits[NUM_LIMITS];
    const char *user, *folder;
    char **argv, **env;
    int argc;
};

static struct command *commands;
static size_t num_commands, max_commands;
static bool is_packing; /* the upper layer: all commands are stopped, and no other may start */

static uint64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

/* -- processes -------------------------------------------------------------------------------------------------- */

/* State and session of a process; false if it is gone. */
static bool read_process(const char *pid, char *state, int *session) {
    char path[64], text[512];
    snprintf(path, sizeof path, "/proc/%.20s/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    ssize_t size = read(fd, text, sizeof text - 1);
    close(fd);
    if (size <= 0) return false;
    text[size] = 0;
    char *end = strrchr(text, ')'); /* The name before it may hold anything. */
    return end && sscanf(end + 1, " %c %*d %*d %d", state, session) == 2;
}

/* Kill every process of a session. A second look finds what a process started meanwhile. */
static void kill_session(pid_t leader) {
    kill(-leader, SIGKILL);
    for (int round = 0, num_found = 1; round < 20 && num_found; round++) {
        num_found = 0;
        DIR *folder = opendir("/proc");
        for (struct dirent *entry; folder && (entry = readdir(folder));) {
            char state;
            int session;
            if (!isdigit((unsigned char)entry->d_name[0])) continue;
            if (!read_process(entry->d_name, &state, &session) || session != leader || state == 'Z') continue;
            if (kill(atoi(entry->d_name), SIGKILL) == 0) num_found++;
        }
        if (folder) closedir(folder);
    }
}

/* A command that has just been forked does not lead its session yet. */
static void kill_command(const struct command *c) {
    kill(c->pid, SIGKILL);
    kill_session(c->pid);
}

/* Stop every process, so that the upper layer does not change while it is read. */
static void stop_all(void) {
    kill(-1, SIGSTOP);
    for (int round = 0; round < 1000; round++) {
        bool is_moving = false;
        DIR *folder = opendir("/proc");
        for (struct dirent *entry; folder && (entry = readdir(folder));) {
            char state;
            int session;
            if (!isdigit((unsigned char)entry->d_name[0]) || !strcmp(entry->d_name, "1")) continue;
            if (read_process(entry->d_name, &state, &session) && !strchr("TtZX", state)) is_moving = true;
        }
        if (folder) closedir(folder);
        if (!is_moving) return;
        kill(-1, SIGSTOP); /* one that was started meanwhile */
        usleep(1000);
    }
}

/* Kill every process but this one; returns how many there were. The kernel lets no process with a fatal signal fork, so
   one look finds all; it takes them a moment to end. */
static uint64_t kill_all(void) {
    uint64_t num_first = 0;
    for (int round = 0, num_found = 1; round < 5000 && num_found; round++) {
        if (round) usleep(round < 10 ? 100 : 1000);
        if (round) kill(-1, SIGKILL);
        num_found = 0;
        DIR *folder = opendir("/proc");
        for (struct dirent *entry; folder && (entry = readdir(folder));) {
            char state;
            int session;
            if (!isdigit((unsigned char)entry->d_name[0]) || !strcmp(entry->d_name, "1")) continue;
            if (read_process(entry->d_name, &state, &session) && !strchr("ZX", state)) num_found++;
        }
        if (folder) closedir(folder);
        if (!round) num_first = (uint64_t)num_found;
    }
    return num_first;
}

/* -- a command's own process ------------------------------------------------------------------------------------- */

bool find_user(const char *text, uid_t *uid, gid_t *gid) {
    char *end;
    unsigned long number = strtoul(text, &end, 10);
    if (isdigit((unsigned char)text[0]) && (!*end || *end == ':')) {
        *uid = *gid = (uid_t)number;
        if (*end == ':') *gid = (gid_t)strtoul(end + 1, &end, 10);
        return !*end;
    }
    FILE *file = fopen("/etc/passwd", "re");
    char line[1024];
    size_t size = strlen(text);
    bool is_found = false;
    while (file && !is_found && fgets(line, sizeof line, file)) {
        if (strncmp(line, text, size) || line[size] != ':') continue;
        unsigned user, group;
        is_found = sscanf(line + size, ":%*[^:]:%u:%u:", &user, &group) == 2;
        if (is_found) *uid = user, *gid = group;
    }
    if (file) fclose(file);
    if (!is_found && !strcmp(text, "root")) *uid = *gid = 0, is_found = true;
    return is_found;
}

static _Noreturn void refuse(const char *what, int status) {
    dprintf(2, "%s: cannot be run: %s\n", what, strerror(errno));
    _exit(status);
}

/* A command has no capability, even as root. Our own code reads and writes the caller's files for root, and root may
   install programs where an image is built. */
static uint32_t capabilities_of(const struct order *o, uid_t uid) {
    uint32_t files = 1u << CAP_DAC_OVERRIDE | 1u << CAP_FOWNER;
    uint32_t install = files | 1u << CAP_CHOWN | 1u << CAP_FSETID | 1u << CAP_SETUID | 1u << CAP_SETGID;
    return uid || o->mode == EXECUTE ? 0 : o->mode == BUILD ? install : files;
}

static void drop_privileges(const struct order *o) {
    uid_t uid;
    gid_t gid;
    errno = ENOENT;
    if (!find_user(o->user, &uid, &gid)) refuse(o->user, 126);
    uint32_t granted = capabilities_of(o, uid);
    for (int capability = 0; prctl(PR_CAPBSET_READ, capability) >= 0; capability++)
        if (capability >= 32 || !(granted & 1u << capability)) prctl(PR_CAPBSET_DROP, capability);
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
    if (uid != getuid() || gid != getgid()) {
        /* A sandbox of an ordinary user has one id, and no call to drop groups. */
        if (setgroups(0, NULL) < 0 && errno != EPERM) refuse(o->user, 126);
        if (setresgid(gid, gid, gid) < 0 || setresuid(uid, uid, uid) < 0) refuse(o->user, 126);
    }
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct own[2] = {{granted, granted, 0}, {0, 0, 0}};
    if (syscall(SYS_capset, &header, own) < 0) refuse("capabilities", 126);
}

static void set_limits(const struct order *o) {
    struct rlimit none = {0, 0};
    setrlimit(RLIMIT_CORE, &none);
    for (int i = 0; i < NUM_LIMITS; i++) {
        if (o->limits[i] == UINT64_MAX) continue;
        struct rlimit limit = {o->limits[i], o->limits[i]}, current;
        /* One second between the signal that a program may catch and the one that it cannot. */
        if (LIMITS[i] == RLIMIT_CPU) limit.rlim_max++;
        if (getrlimit(LIMITS[i], &current) == 0 && current.rlim_max < limit.rlim_max) {
            limit.rlim_max = current.rlim_max;
            if (limit.rlim_cur > limit.rlim_max) limit.rlim_cur = limit.rlim_max;
        }
        if (setrlimit(LIMITS[i], &limit) < 0) refuse("limits", 126);
    }
}

static void try_path(const struct order *o) {
    const char *name = o->argv[0], *path = NULL;
    int problem = ENOENT;
    if (strchr(name, '/')) {
        execve(name, o->argv, o->env);
        return;
    }
    for (char **variable = o->env; *variable; variable++)
        if (!strncmp(*variable, "PATH=", 5)) path = *variable + 5;
    for (const char *at = path ? path : "/usr/local/bin:/usr/bin:/bin"; at;) {
        const char *end = strchrnul(at, ':');
        char program[4096];
        if (snprintf(program, sizeof program, "%.*s/%s", (int)(end - at), at, name) < (int)sizeof program) {
            execve(program, o->argv, o->env);
            if (errno == EACCES || errno == ENOEXEC) problem = errno;
        }
        at = *end ? end + 1 : NULL;
    }
    errno = problem;
}

/* Out of memory, the kernel kills a command rather than PID 1. While a process is not dumpable its files in /proc are
   those of the machine's root. Other commands cannot reach into this process: it still has capabilities. */
static void prefer_as_victim(void) {
    prctl(PR_SET_DUMPABLE, 1);
    int adjust = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (adjust >= 0 && write(adjust, "500", 3) != 3) errno = 0;
    if (adjust >= 0) close(adjust);
    prctl(PR_SET_DUMPABLE, 0);
}

static _Noreturn void become(const struct order *o, const int *streams) {
    setsid();
    signal(SIGPIPE, SIG_DFL);
    sigset_t nothing;
    sigemptyset(&nothing);
    sigprocmask(SIG_SETMASK, &nothing, NULL);
    for (int i = 0; i < 3; i++)
        if (dup2(streams[i], i) < 0) _exit(126);
    if (o->mode == PACK_UPPER) _exit(pack_upper());
    syscall(SYS_close_range, 3u, ~0u, 0u);
    prefer_as_victim();
    drop_privileges(o);
    if (chdir(o->folder) < 0) refuse(o->folder, 126);
    set_limits(o);
    /* No process of the same user may reach into one that reads or writes files for the caller. */
    if (o->mode == PACK || o->mode == UNPACK) prctl(PR_SET_DUMPABLE, 0);
    if (o->mode == PACK) _exit(pack_main(o->argc, o->argv));
    if (o->mode == UNPACK) _exit(unpack_main(o->argc, o->argv));
    if (!install_filter()) refuse("seccomp", 126);
    try_path(o);
    int problem = errno;
    refuse(o->argv[0], problem == ENOENT || problem == ENOTDIR ? 127 : 126);
}

/* -- frames ------------------------------------------------------------------------------------------------------ */

static char **get_words(struct reader *r, int *count) {
    uint32_t size = get_u32(r);
    if (size > MAX_WORDS) _exit(1);
    char **words = calloc((size_t)size + 1, sizeof *words);
    if (!words) _exit(1);
    for (uint32_t i = 0; i < size; i++) words[i] = (char *)get_text(r);
    if (count) *count = (int)size;
    return words;
}

static void free_words(char **words) {
    for (char **word = words; *word; word++) free(*word);
    free(words);
}

static void run(uint32_t id, struct reader *r) {
    struct order o = {.mode = get_u8(r), .timeout_ms = get_u64(r), .grace_ms = get_u64(r)};
    for (int i = 0; i < NUM_LIMITS; i++) o.limits[i] = get_u64(r);
    o.user = get_text(r);
    o.folder = get_text(r);
    o.argv = get_words(r, &o.argc);
    o.env = get_words(r, NULL);
    int streams[3] = {take_fd(), take_fd(), take_fd()};
    if (streams[2] < 0 || !o.argc) _exit(1);
    if (num_commands == max_commands) {
        max_commands = max_commands * 2 + 8;
        commands = realloc(commands, max_commands * sizeof *commands);
        if (!commands) _exit(1);
    }
    if (o.mode == PACK_UPPER) stop_all();
    pid_t pid = fork();
    if (!pid) become(&o, streams);
    if (pid < 0) dprintf(streams[2], "%s: cannot be run: %s\n", o.argv[0], strerror(errno));
    for (int i = 0; i < 3; i++) close(streams[i]);
    is_packing = pid > 0 && o.mode == PACK_UPPER;
    if (pid < 0 && o.mode == PACK_UPPER) kill(-1, SIGCONT);
    if (pid < 0) {
        int32_t status = 126 << 8;
        char payload[22] = {0};
        memcpy(payload, &status, 4);
        send_frame(control_fd, EXIT, id, payload, sizeof payload, NULL, 0);
    } else {
        uint64_t deadline_ms = o.timeout_ms == UINT64_MAX ? UINT64_MAX : now_ms() + o.timeout_ms;
        commands[num_commands++] =
            (struct command){id, pid, deadline_ms, o.grace_ms, false, false, o.mode == PACK_UPPER};
    }
    free((void *)o.user);
    free((void *)o.folder);
    free_words(o.argv);
    free_words(o.env);
}

static void handle_frame(void) {
    uint32_t size, id;
    char *frame = receive_frame(control_fd, &size);
    if (!frame) _exit(0); /* The kernel kills every process of the namespace with its PID 1. */
    memcpy(&id, frame + 1, sizeof id);
    struct reader r = {frame + 5, frame + size};
    if (frame[0] == RUN) run(id, &r);
    if (frame[0] == KILL && !id) {
        char payload[22] = {0};
        uint64_t num_killed = kill_all();
        memcpy(payload + 6, &num_killed, 8);
        send_frame(control_fd, EXIT, 0, payload, sizeof payload, NULL, 0);
    }
    for (size_t i = 0; frame[0] == KILL && i < num_commands; i++) {
        if (commands[i].id != id) continue;
        commands[i].is_requested = true;
        kill_command(&commands[i]);
    }
    drop_fds();
    free(frame);
}

static void report(const struct command *c, int status, const struct rusage *usage) {
    int32_t wait_status = status;
    uint64_t cpu_us = (uint64_t)(usage->ru_utime.tv_sec + usage->ru_stime.tv_sec) * 1000000 +
                      (uint64_t)(usage->ru_utime.tv_usec + usage->ru_stime.tv_usec);
    uint64_t max_bytes = (uint64_t)usage->ru_maxrss * 1024;
    char payload[22];
    memcpy(payload, &wait_status, 4);
    payload[4] = c->is_timeout;
    payload[5] = c->is_requested;
    memcpy(payload + 6, &cpu_us, 8);
    memcpy(payload + 14, &max_bytes, 8);
    send_frame(control_fd, EXIT, c->id, payload, sizeof payload, NULL, 0);
}

/* Reap processes that have ended; false if there may be more, so that a storm of orphans does not hold up frames. */
static bool reap(void) {
    struct rusage usage;
    int status;
    for (int count = 0; count < 256; count++) {
        pid_t pid = wait4(-1, &status, WNOHANG, &usage);
        if (pid <= 0) return true;
        for (size_t i = 0; i < num_commands; i++) {
            if (commands[i].pid != pid) continue;
            struct command ended = commands[i];
            commands[i] = commands[--num_commands];
            if (ended.is_upper) {
                is_packing = false;
                kill(-1, SIGCONT);
            }
            if (ended.is_timeout || ended.is_requested) kill_session(pid);
            report(&ended, status, &usage);
            break;
        }
    }
    return false;
}

/* Signal commands whose time is over; returns milliseconds until the next is. */
static int enforce_deadlines(void) {
    uint64_t now = now_ms(), next = UINT64_MAX;
    for (size_t i = 0; i < num_commands; i++) {
        struct command *c = &commands[i];
        if (is_packing && !c->is_upper) continue; /* A signal would let it go on. */
        if (c->deadline_ms <= now) {
            if (c->is_timeout || !c->grace_ms) {
                kill_command(c);
                c->deadline_ms = UINT64_MAX;
            } else {
                if (kill(-c->pid, SIGTERM) < 0) kill(c->pid, SIGTERM); /* It may not lead its session yet. */
                kill(-c->pid, SIGCONT);
                c->deadline_ms = now + c->grace_ms;
            }
            c->is_timeout = true;
        }
        if (c->deadline_ms < next) next = c->deadline_ms;
    }
    if (next == UINT64_MAX) return -1;
    return next - now > 1000000 ? 1000000 : (int)(next - now) + 1;
}

_Noreturn void serve(int owner_pidfd) {
    sigset_t watched;
    sigemptyset(&watched);
    sigaddset(&watched, SIGCHLD);
    sigprocmask(SIG_BLOCK, &watched, NULL);
    int signals = signalfd(-1, &watched, SFD_CLOEXEC | SFD_NONBLOCK);
    if (signals < 0) fail("signals");
    struct pollfd polled[3] = {{control_fd, POLLIN, 0}, {signals, POLLIN, 0}, {owner_pidfd, POLLIN, 0}};
    for (bool is_reaped = true;;) {
        int wait_ms = enforce_deadlines();
        polled[0].events = is_packing ? 0 : POLLIN;
        if (poll(polled, 3, is_reaped ? wait_ms : 0) < 0) {
            if (errno != EINTR) _exit(1);
            continue;
        }
        if (polled[2].revents) _exit(0);
        struct signalfd_siginfo info;
        while (polled[1].revents && read(signals, &info, sizeof info) > 0) {
        }
        if (polled[1].revents || !is_reaped) is_reaped = reap();
        if (polled[0].revents & POLLIN) handle_frame();
        else if (polled[0].revents) _exit(0);
    }
}
