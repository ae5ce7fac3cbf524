/* A sandbox of Linux namespaces. Reading order: main.c (the supervisor), setup.c (namespaces, mounts), init.c (PID 1 and
   its commands), filter.c (seccomp), pack.c (trees of files as a stream).

   m2forge starts `sandbox start FD`, where FD is its end of a Unix stream socket. In a container, whose root the runtime
   has built, PID 1 is `sandbox contain PATH`, which connects to the socket PATH. All integers are little endian, texts
   have a u32 length. A frame is u32 length of what follows, u8 kind, u32 id, payload.

     to PID 1      SETUP   what to build                   (first, exactly once)
                   RUN     a command; carries three descriptors: its standard streams
                   KILL    kill the command with that id; 0: kill all processes, whose number is
                           the CPU time in an EXIT of id 0
     from PID 1    READY   carries one listening socket for each requested port
                   FAILED  a text; the program exits
                   EXIT    how the command with that id ended

   The end of the stream, or of the process that started the program, ends the sandbox with all processes in it. */
#ifndef SANDBOX_H
#define SANDBOX_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum { SETUP = 1, RUN = 2, KILL = 3, READY = 4, FAILED = 5, EXIT = 6 };
enum { MAX_FRAME = 16 << 20, MAX_FDS = 32, MAX_PORTS = 8, MAX_CGROUPS = 8 };

struct reader {
    const char *at, *end;
};

struct bind {
    const char *source, *target;
    bool is_writable;
    int fd;
};

struct setup {
    uint32_t uid, gid;         /* the ids inside that PID 1 has */
    uint32_t outer_uid, outer_gid, num_ids; /* what id 0 (a range) or uid and gid (one id) are outside */
    const char *hostname, *workspace, *user; /* user: the owner of the workspace */
    const char *disk; /* a folder for the upper layer, or "" for memory */
    uint64_t upper_bytes, upper_inodes, shm_bytes;
    uint32_t num_layers, num_binds, num_ports, num_cgroups, num_writes;
    const char **layers; /* the highest first */
    struct bind *binds;
    uint16_t ports[MAX_PORTS];
    const char **cgroups;      /* folders to create; PID 1 joins them */
    const char **files, **values; /* what to write to cgroup files */
};

/* frame.c */
uint8_t get_u8(struct reader *r);
uint32_t get_u32(struct reader *r);
uint64_t get_u64(struct reader *r);
const char *get_text(struct reader *r); /* with a zero byte at its end, allocated */
char *receive_frame(int fd, uint32_t *size); /* NULL at the end of the stream; descriptors go to `received` */
void send_frame(int fd, uint8_t kind, uint32_t id, const void *payload, uint32_t size, const int *fds, int num_fds);
int take_fd(void);
void drop_fds(void);
extern int control_fd;
extern void (*before_failing)(void); /* removes what the supervisor has created */
_Noreturn void fail(const char *what); /* sends FAILED with errno's text, and exits */
bool read_all(int fd, void *buffer, size_t size);
bool write_all(int fd, const void *buffer, size_t size);

/* setup.c */
void build_root(struct setup *s);
void prepare_root(const struct setup *s); /* what commands need in any root: /tmp, and a workspace of their own */
int open_port(uint16_t port);
void bring_up_loopback(void);
extern int upper_fd; /* the upper layer's folder */

/* init.c */
_Noreturn void serve(int owner_pidfd);
bool find_user(const char *text, uid_t *uid, gid_t *gid); /* NAME, UID or UID:GID */

/* filter.c */
bool install_filter(void);

/* pack.c */
int pack_main(int argc, char **argv);
int unpack_main(int argc, char **argv);
int pack_upper(void);

#endif
