/* A tree of files as a stream, written (`pack`) and read (`unpack`) by a process inside the sandbox.

   Each entry is a header, its name, the target of a link, and its content. Names are relative, without `..`. Neither side
   follows a link below the folder that it was given. */
#include "sandbox.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/xattr.h>
#include <unistd.h>

enum { IS_OPAQUE = 1, BLOCK = 1 << 16, MAX_NAME = 1 << 15, MAX_DEPTH = 400 };
enum { FAILURE = 1, NOT_FOUND = 2, OUTSIDE = 3 };
static const uint32_t SAME_MODE = UINT32_MAX; /* of the file that is replaced, else 0644 */

struct __attribute__((packed)) entry {
    char type; /* d folder, f file, l symbolic link, h hard link, w whiteout, e end */
    uint8_t flags;
    uint16_t unused;
    uint32_t mode, uid, gid;
    int64_t mtime_ns;
    uint64_t size;
    uint32_t name_size, link_size;
};

static char block[BLOCK];

static int complain(const char *name, int code) {
    dprintf(2, "%s: %s\n", name, strerror(errno));
    return code;
}

/* -- pack ------------------------------------------------------------------------------------------------------- */

static struct hard_link {
    dev_t device;
    ino_t inode;
    char *name;
} *hard_links;
static size_t num_hard_links;

static const char *first_name(const struct stat *status, const char *name) {
    for (size_t i = 0; i < num_hard_links; i++)
        if (hard_links[i].inode == status->st_ino && hard_links[i].device == status->st_dev) return hard_links[i].name;
    if (!(num_hard_links & (num_hard_links + 1)))
        hard_links = realloc(hard_links, (num_hard_links + 1) * 2 * sizeof *hard_links);
    if (hard_links) hard_links[num_hard_links++] = (struct hard_link){status->st_dev, status->st_ino, strdup(name)};
    return NULL;
}

static bool put_entry(struct entry *e, const char *name, const char *link) {
    e->name_size = (uint32_t)strlen(name);
    e->link_size = (uint32_t)strlen(link);
    return write_all(1, e, sizeof *e) && write_all(1, name, e->name_size) && write_all(1, link, e->link_size);
}

/* A file that changes meanwhile is padded or cut to the size in its header. */
static bool put_content(int fd, uint64_t size) {
    while (size) {
        ssize_t got = read(fd, block, size < BLOCK ? size : BLOCK);
        if (got < 0) return false;
        if (got == 0) memset(block, 0, (size_t)(got = (ssize_t)(size < BLOCK ? size : BLOCK)));
        if (!write_all(1, block, (size_t)got)) return false;
        size -= (uint64_t)got;
    }
    return true;
}

static bool pack_folder(int folder, char *name, size_t length, int depth);

static bool pack_one(int parent, const char *base, char *name, size_t length, int depth) {
    struct stat status;
    if (fstatat(parent, base, &status, AT_SYMLINK_NOFOLLOW) < 0) return errno == ENOENT;
    struct entry e = {.mode = status.st_mode & 07777, .uid = status.st_uid, .gid = status.st_gid};
    e.mtime_ns = (int64_t)status.st_mtim.tv_sec * 1000000000 + status.st_mtim.tv_nsec;
    char link[4096] = "";
    if (S_ISCHR(status.st_mode) && status.st_rdev == makedev(0, 0)) {
        e.type = 'w';
        return put_entry(&e, name, "");
    }
    if (S_ISLNK(status.st_mode)) {
        ssize_t size = readlinkat(parent, base, link, sizeof link - 1);
        if (size < 0) return false;
        link[size] = 0;
        e.type = 'l';
        return put_entry(&e, name, link);
    }
    if (!S_ISREG(status.st_mode) && !S_ISDIR(status.st_mode)) return true; /* sockets, pipes, devices */
    const char *first = S_ISREG(status.st_mode) && status.st_nlink > 1 ? first_name(&status, name) : NULL;
    if (first) {
        e.type = 'h';
        return put_entry(&e, name, first);
    }
    /* A running command may have put a pipe in its place, whose opening would wait for a writer. */
    mode_t kind = status.st_mode & S_IFMT;
    int fd = openat(parent, base, O_RDONLY | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &status) < 0) {
        bool is_gone = fd < 0 && (errno == ENOENT || errno == ELOOP || errno == ENXIO);
        if (!is_gone) complain(name, FAILURE);
        if (fd >= 0) close(fd);
        return is_gone;
    }
    if ((status.st_mode & S_IFMT) != kind) {
        close(fd);
        return true;
    }
    bool is_done;
    if (S_ISDIR(status.st_mode)) {
        e.type = 'd';
        char value;
        if (fgetxattr(fd, "user.overlay.opaque", &value, 1) == 1 && value == 'y') e.flags = IS_OPAQUE;
        is_done = put_entry(&e, name, "") && pack_folder(fd, name, length, depth + 1);
    } else {
        e.type = 'f';
        e.size = (uint64_t)status.st_size;
        is_done = put_entry(&e, name, "") && put_content(fd, e.size);
    }
    close(fd);
    return is_done;
}

static bool pack_folder(int folder, char *name, size_t length, int depth) {
    if (depth > MAX_DEPTH) {
        errno = ELOOP;
        complain("too deep", FAILURE);
        return false;
    }
    /* Opened again: a duplicate would share its position with the process that packed this folder before. */
    DIR *entries = fdopendir(openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!entries) return false;
    bool is_done = true;
    for (struct dirent *entry; is_done && (entry = readdir(entries));) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        size_t size = strlen(entry->d_name), begin = length + (length > 0);
        if (begin + size >= MAX_NAME) {
            errno = ENAMETOOLONG;
            complain(entry->d_name, FAILURE);
            is_done = false;
            break;
        }
        if (length) name[length] = '/';
        memcpy(name + begin, entry->d_name, size + 1);
        is_done = pack_one(folder, entry->d_name, name, begin + size, depth);
        name[length] = 0;
    }
    closedir(entries);
    return is_done;
}

static int open_path(const char *mode, const char *path, int flags) {
    struct open_how how = {.flags = (uint64_t)(flags | O_CLOEXEC)};
    if (!strcmp(mode, "beneath")) how.resolve = RESOLVE_BENEATH;
    return (int)syscall(SYS_openat2, AT_FDCWD, path, &how, sizeof how);
}

static int path_problem(const char *path) {
    int code = errno == EXDEV ? OUTSIDE : errno == ENOENT || errno == ENOTDIR || errno == ELOOP ? NOT_FOUND : FAILURE;
    return complain(path, code);
}

static int finish_pack(bool is_done) {
    struct entry end = {.type = 'e'};
    return is_done && put_entry(&end, "", "") ? 0 : FAILURE;
}

/* pack|file beneath|anywhere PATH: a folder's entries, or one file under its own name; `file` refuses a folder. */
int pack_main(int argc, char **argv) {
    static char name[MAX_NAME + 256];
    struct stat status;
    if (argc != 3) return FAILURE;
    int fd = open_path(argv[1], argv[2], O_RDONLY | O_NONBLOCK);
    if (fd < 0) return path_problem(argv[2]);
    if (fstat(fd, &status) < 0) return complain(argv[2], FAILURE);
    errno = EISDIR;
    if (S_ISDIR(status.st_mode) && !strcmp(argv[0], "file")) return complain(argv[2], NOT_FOUND);
    if (S_ISDIR(status.st_mode)) return finish_pack(pack_folder(fd, name, 0, 0));
    errno = EINVAL;
    if (!S_ISREG(status.st_mode)) return complain(argv[2], NOT_FOUND);
    struct entry e = {.type = 'f', .mode = status.st_mode & 07777, .size = (uint64_t)status.st_size};
    e.mtime_ns = (int64_t)status.st_mtim.tv_sec * 1000000000 + status.st_mtim.tv_nsec;
    const char *slash = strrchr(argv[2], '/');
    return finish_pack(put_entry(&e, slash ? slash + 1 : argv[2], "") && put_content(fd, e.size));
}

int pack_upper(void) {
    static char name[MAX_NAME + 256];
    return finish_pack(upper_fd >= 0 && pack_folder(upper_fd, name, 0, 0));
}

/* -- unpack ------------------------------------------------------------------------------------------------------ */

/* Open the folder `name`, created if it does not exist; what else has that name is replaced. */
static int enter(int parent, const char *name, mode_t mode) {
    int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd >= 0) return fd;
    if (errno == ENOTDIR || errno == ELOOP) unlinkat(parent, name, 0);
    if (mkdirat(parent, name, mode) < 0) return -1;
    return openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
}

/* The folder of `name`, as a descriptor, and in `base` its last part; -1 for a name that leads outside. */
static int open_parent(int top, char *name, char **base) {
    int folder = dup(top);
    errno = EINVAL;
    if (!*name || *name == '/') goto refused;
    for (char *part = name;;) {
        char *slash = strchr(part, '/');
        if (slash) *slash = 0;
        if (!*part || !strcmp(part, ".") || !strcmp(part, "..")) {
            errno = EINVAL;
            goto refused;
        }
        if (!slash) {
            *base = part;
            return folder;
        }
        int next = enter(folder, part, 0755);
        if (next < 0) goto refused;
        close(folder);
        folder = next;
        *slash = '/';
        part = slash + 1;
    }
refused:
    close(folder);
    return -1;
}

static bool get_content(int fd, uint64_t size) {
    while (size) {
        size_t part = size < BLOCK ? size : BLOCK;
        if (!read_all(0, block, part) || !write_all(fd, block, part)) return false;
        size -= part;
    }
    return true;
}

/* Written under another name and renamed, so that a file is replaced whole and a link is not followed. */
static bool unpack_file(int folder, const char *base, const struct entry *e) {
    char temporary[64];
    struct stat status;
    uint32_t mode = e->mode;
    if (mode == SAME_MODE)
        mode = fstatat(folder, base, &status, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(status.st_mode) ? status.st_mode : 0644;
    snprintf(temporary, sizeof temporary, ".m2forge-%d", getpid());
    int fd = openat(folder, temporary, O_CREAT | O_EXCL | O_WRONLY | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0) return false;
    struct timespec times[2] = {{0, UTIME_OMIT}, {e->mtime_ns / 1000000000, e->mtime_ns % 1000000000}};
    bool is_done = get_content(fd, e->size) && fchmod(fd, mode & 0777) == 0 &&
                   (e->mtime_ns < 0 || futimens(fd, times) == 0) && renameat(folder, temporary, folder, base) == 0;
    int problem = errno;
    if (!is_done) unlinkat(folder, temporary, 0);
    close(fd);
    errno = problem;
    return is_done;
}

static bool unpack_entry(int top, const struct entry *e, char *name, char *link) {
    char *base, *link_base;
    int folder = open_parent(top, name, &base);
    if (folder < 0) return false;
    bool is_done = false;
    if (e->type == 'd') {
        int fd = enter(folder, base, e->mode & 0777);
        is_done = fd >= 0 && fchmod(fd, (e->mode & 0777) | 0700) == 0;
        if (fd >= 0) close(fd);
    } else if (e->type == 'f') {
        is_done = unpack_file(folder, base, e);
    } else if (e->type == 'l') {
        unlinkat(folder, base, 0);
        is_done = symlinkat(link, folder, base) == 0;
    } else if (e->type == 'h') {
        int from = open_parent(top, link, &link_base);
        unlinkat(folder, base, 0);
        is_done = from >= 0 && linkat(from, link_base, folder, base, 0) == 0;
        if (from >= 0) close(from);
    } else {
        errno = EINVAL;
    }
    int problem = errno;
    close(folder);
    errno = problem;
    return is_done;
}

/* Create the folders of PATH that do not exist; returns the last. */
static int make_path(const char *mode, const char *path) {
    char part[4096];
    size_t size = strlen(path);
    if (size >= sizeof part) return -1;
    for (size_t end = 1; end <= size; end++) {
        if (path[end] != '/' && path[end]) continue;
        memcpy(part, path, end);
        part[end] = 0;
        int fd = open_path(mode, part, O_PATH | O_DIRECTORY);
        if (fd >= 0) {
            close(fd);
            continue;
        }
        if (errno != ENOENT) return -1;
        char *slash = strrchr(part, '/');
        if (slash) *slash = 0;
        int parent = open_path(mode, !slash ? "." : *part ? part : "/", O_PATH | O_DIRECTORY);
        bool is_made = parent >= 0 && mkdirat(parent, slash ? slash + 1 : part, 0755) == 0;
        if (parent >= 0) close(parent);
        if (!is_made) return -1;
    }
    return open_path(mode, path, O_RDONLY | O_DIRECTORY);
}

/* unpack beneath|anywhere PATH: entries of standard input into that folder. */
int unpack_main(int argc, char **argv) {
    static char name[MAX_NAME + 1], link[MAX_NAME + 1];
    if (argc != 3) return FAILURE;
    int top = make_path(argv[1], argv[2]);
    if (top < 0) return path_problem(argv[2]);
    for (struct entry e;;) {
        errno = EBADMSG;
        if (!read_all(0, &e, sizeof e) || e.name_size > MAX_NAME || e.link_size > MAX_NAME ||
            !read_all(0, name, e.name_size) || !read_all(0, link, e.link_size))
            return complain("stream", FAILURE);
        if (e.type == 'e') return 0;
        name[e.name_size] = link[e.link_size] = 0;
        if (strlen(name) != e.name_size || !unpack_entry(top, &e, name, link)) return complain(name, FAILURE);
    }
}
