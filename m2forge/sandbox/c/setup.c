/* Builds the sandbox's own root in fresh namespaces: an overlay over the image's layers, with /proc, /dev and loopback.

   Runs as PID 1, which has all capabilities in its user namespace and none outside. Every path inside the root is
   resolved in the root, because links in an image may lead anywhere. */
#include "sandbox.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/keyctl.h>
#include <linux/mount.h>
#include <linux/openat2.h>
#include <net/if.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* glibc's <sys/mount.h> and <linux/mount.h> define the same names in some versions. */
int mount(const char *source, const char *target, const char *type, unsigned long flags, const void *data);
int umount2(const char *target, int flags);
#define DETACH 2

int upper_fd = -1;
static const char *PLACE = "/tmp"; /* Where the root is built; this mount namespace is the only one that sees it. */
static const char *DEVICES[] = {"null", "zero", "full", "random", "urandom", "tty"};

static int open_in(int root, const char *path, int flags) {
    struct open_how how = {.flags = (uint64_t)(flags | O_CLOEXEC), .resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS};
    return (int)syscall(SYS_openat2, root, path, &how, sizeof how);
}

/* Create the folders of `path` that do not exist, and open the last. */
static int make_folder(int root, const char *path) {
    char part[4096];
    size_t size = strlen(path);
    if (size >= sizeof part) {
        errno = ENAMETOOLONG;
        fail(path);
    }
    int parent = dup(root);
    for (size_t at = 0; at < size;) {
        while (path[at] == '/') at++;
        size_t end = at;
        while (path[end] && path[end] != '/') end++;
        if (end == at) break;
        memcpy(part, path, end);
        part[end] = 0;
        int next = open_in(root, part, O_PATH | O_DIRECTORY);
        if (next < 0 && errno == ENOENT) {
            if (mkdirat(parent, part + at, 0755) < 0) fail(path);
            next = open_in(root, part, O_PATH | O_DIRECTORY);
        }
        if (next < 0) fail(path);
        close(parent);
        parent = next;
        at = end;
    }
    return parent;
}

static const char *fd_path(int fd, char *buffer) {
    sprintf(buffer, "/proc/self/fd/%d", fd);
    return buffer;
}

static void mount_at(int fd, const char *source, const char *type, unsigned long flags, const char *data) {
    char target[32];
    if (mount(source, fd_path(fd, target), type, flags, data) < 0) fail(type ? type : source);
}

/* The layers and the folders to bind are opened with the ids of the starting process: they may lie in its home. */
static int *open_sources(struct setup *s) {
    int *layers = calloc(s->num_layers + 1, sizeof *layers);
    if (!layers) fail("memory");
    for (uint32_t i = 0; i < s->num_layers; i++)
        if ((layers[i] = open(s->layers[i], O_PATH | O_DIRECTORY | O_CLOEXEC)) < 0) fail(s->layers[i]);
    for (uint32_t i = 0; i < s->num_binds; i++)
        if ((s->binds[i].fd = open(s->binds[i].source, O_PATH | O_CLOEXEC)) < 0) fail(s->binds[i].source);
    return layers;
}

static void take_ids(const struct setup *s) {
    if (s->num_ids > 1 && setgroups(0, NULL) < 0) fail("groups");
    if (setresgid(s->gid, s->gid, s->gid) < 0 || setresuid(s->uid, s->uid, s->uid) < 0) fail("user");
    /* A change of ids clears both; the owner's keys must not be in reach of a command. */
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) < 0 || prctl(PR_SET_DUMPABLE, 0) < 0) fail("prctl");
    syscall(SYS_keyctl, KEYCTL_JOIN_SESSION_KEYRING, NULL);
}

/* Mount the overlay of all layers; returns its root. */
static int mount_overlay(const struct setup *s, const int *layers, int disk) {
    char options[4096], path[32];
    snprintf(options, sizeof options, "size=%llu,nr_inodes=%llu,mode=0755", (unsigned long long)s->upper_bytes,
             (unsigned long long)s->upper_inodes);
    if (mount("tmpfs", PLACE, "tmpfs", MS_NOSUID | MS_NODEV, options) < 0) fail("tmpfs");
    if (chdir(PLACE) < 0 || mkdir("root", 0755) < 0) fail(PLACE);
    if (disk >= 0 && fchdir(disk) < 0) fail(s->disk);
    if (mkdir("upper", 0755) < 0 || mkdir("work", 0755) < 0) fail("upper layer");
    if ((upper_fd = open("upper", O_RDONLY | O_DIRECTORY | O_CLOEXEC)) < 0) fail("upper layer");
    size_t size = (size_t)snprintf(options, sizeof options, "userxattr,upperdir=upper,workdir=work,lowerdir=");
    for (uint32_t i = 0; i < s->num_layers && size < sizeof options; i++)
        size += (size_t)snprintf(options + size, sizeof options - size, "%s%s", i ? ":" : "",
                                 fd_path(layers[i], path));
    if (size >= sizeof options) {
        errno = E2BIG;
        fail("layers");
    }
    char root_path[64];
    snprintf(root_path, sizeof root_path, "%s/root", PLACE);
    if (mount("overlay", root_path, "overlay", MS_NOSUID | MS_NODEV, options) < 0) fail("overlay");
    int root = open(root_path, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (root < 0) fail("overlay");
    return root;
}

static void bind_fd(int source, int target, bool is_writable, const char *what) {
    char from[32], to[32];
    if (mount(fd_path(source, from), fd_path(target, to), NULL, MS_BIND | MS_REC, NULL) < 0) fail(what);
    if (is_writable) return;
    /* What is mounted is on top of `target` now, so it is found by opening the path behind the descriptor. */
    char path[4096];
    ssize_t size = readlink(to, path, sizeof path - 1);
    if (size < 0) fail(what);
    path[size] = 0;
    struct mount_attr attributes = {.attr_set = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV};
    if (syscall(SYS_mount_setattr, AT_FDCWD, path, AT_RECURSIVE, &attributes, sizeof attributes) < 0) fail(what);
}

/* A folder or an empty file to mount on. */
static int make_target(int root, const char *path, int source) {
    struct stat status;
    if (fstat(source, &status) < 0) fail(path);
    if (S_ISDIR(status.st_mode)) return make_folder(root, path);
    int target = open_in(root, path, O_PATH);
    if (target >= 0) return target;
    char parent[4096];
    const char *name = strrchr(path, '/');
    if (!name || (size_t)(name - path) >= sizeof parent) fail(path);
    memcpy(parent, path, (size_t)(name - path));
    parent[name - path] = 0;
    int folder = make_folder(root, parent);
    int file = openat(folder, name + 1, O_CREAT | O_EXCL | O_WRONLY | O_NOFOLLOW | O_CLOEXEC, 0644);
    if (file < 0) fail(path);
    close(file);
    target = openat(folder, name + 1, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    close(folder);
    if (target < 0) fail(path);
    return target;
}

static void mount_devices(const struct setup *s, int root) {
    char options[128], path[64];
    int below = make_folder(root, "dev");
    mount_at(below, "tmpfs", "tmpfs", MS_NOSUID | MS_NOEXEC, "size=64k,nr_inodes=256,mode=0755");
    close(below);
    int dev = open_in(root, "dev", O_PATH | O_DIRECTORY);
    for (size_t i = 0; i < sizeof DEVICES / sizeof *DEVICES; i++) {
        snprintf(path, sizeof path, "/dev/%s", DEVICES[i]);
        int source = open(path, O_PATH | O_CLOEXEC);
        if (source < 0) fail(path);
        int file = openat(dev, DEVICES[i], O_CREAT | O_EXCL | O_RDONLY | O_CLOEXEC, 0666);
        if (file < 0) fail(path);
        bind_fd(source, file, true, path);
        close(file);
        close(source);
    }
    mkdirat(dev, "pts", 0755);
    mkdirat(dev, "shm", 01777);
    int pts = openat(dev, "pts", O_PATH | O_DIRECTORY | O_CLOEXEC), shm = openat(dev, "shm", O_PATH | O_CLOEXEC);
    mount_at(pts, "devpts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620");
    snprintf(options, sizeof options, "size=%llu,nr_inodes=65536,mode=1777", (unsigned long long)s->shm_bytes);
    mount_at(shm, "tmpfs", "tmpfs", MS_NOSUID | MS_NODEV, options);
    close(pts);
    close(shm);
    bool is_linked = symlinkat("pts/ptmx", dev, "ptmx") == 0 && symlinkat("/proc/self/fd", dev, "fd") == 0 &&
                     symlinkat("/proc/self/fd/0", dev, "stdin") == 0 &&
                     symlinkat("/proc/self/fd/1", dev, "stdout") == 0 &&
                     symlinkat("/proc/self/fd/2", dev, "stderr") == 0;
    if (!is_linked) fail("/dev");
    close(dev);
}

void bring_up_loopback(void) {
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    struct ifreq request = {.ifr_flags = IFF_UP | IFF_RUNNING};
    strcpy(request.ifr_name, "lo");
    if (fd < 0 || ioctl(fd, SIOCSIFFLAGS, &request) < 0) fail("loopback");
    close(fd);
}

int open_port(uint16_t port) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), yes = 1;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr = {htonl(INADDR_LOOPBACK)}};
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) < 0 ||
        bind(fd, (struct sockaddr *)&address, sizeof address) < 0 || listen(fd, 512) < 0)
        fail("port");
    return fd;
}

void build_root(struct setup *s) {
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0) fail("private mounts");
    int *layers = open_sources(s);
    int disk = s->disk[0] ? open(s->disk, O_PATH | O_DIRECTORY | O_CLOEXEC) : -1;
    if (s->disk[0] && disk < 0) fail(s->disk);
    take_ids(s);
    if (sethostname(s->hostname, strlen(s->hostname)) < 0) fail("hostname");
    bring_up_loopback();
    int root = mount_overlay(s, layers, disk);
    for (uint32_t i = 0; i < s->num_layers; i++) close(layers[i]);
    free(layers);
    if (disk >= 0) close(disk);
    int proc = make_folder(root, "proc");
    mount_at(proc, "proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
    close(proc);
    mount_devices(s, root);
    for (uint32_t i = 0; i < s->num_binds; i++) {
        int target = make_target(root, s->binds[i].target, s->binds[i].fd);
        bind_fd(s->binds[i].fd, target, s->binds[i].is_writable, s->binds[i].source);
        close(target);
        close(s->binds[i].fd);
    }
    if (fchdir(root) < 0 || syscall(SYS_pivot_root, ".", ".") < 0 || umount2(".", DETACH) < 0 || chdir("/") < 0)
        fail("pivot_root");
    close(root);
}

void prepare_root(const struct setup *s) {
    int root = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (root < 0) fail("/");
    close(make_folder(root, "tmp"));
    close(make_folder(root, s->workspace));
    close(root);
    chmod("/tmp", 01777);
    uid_t uid;
    gid_t gid;
    errno = ENOENT;
    if (!find_user(s->user, &uid, &gid)) fail(s->user);
    if (chown(s->workspace, uid, gid) < 0) fail(s->workspace);
}
