/* Frames over a Unix socket, with the descriptors that they carry. */
#include "sandbox.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

int control_fd = -1;
void (*before_failing)(void);
static int received[MAX_FDS];
static int num_received;

static void need(struct reader *r, size_t size) {
    if ((size_t)(r->end - r->at) < size) {
        errno = EBADMSG;
        fail("frame");
    }
}

uint8_t get_u8(struct reader *r) {
    need(r, 1);
    return (uint8_t)*r->at++;
}

uint32_t get_u32(struct reader *r) {
    uint32_t value;
    need(r, sizeof value);
    memcpy(&value, r->at, sizeof value);
    r->at += sizeof value;
    return value;
}

uint64_t get_u64(struct reader *r) {
    uint64_t value;
    need(r, sizeof value);
    memcpy(&value, r->at, sizeof value);
    r->at += sizeof value;
    return value;
}

const char *get_text(struct reader *r) {
    uint32_t size = get_u32(r);
    need(r, size);
    char *text = malloc((size_t)size + 1);
    if (!text) fail("memory");
    memcpy(text, r->at, size);
    text[size] = 0;
    r->at += size;
    return text;
}

bool read_all(int fd, void *buffer, size_t size) {
    for (size_t done = 0; done < size;) {
        ssize_t got = read(fd, (char *)buffer + done, size - done);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return false;
        done += (size_t)got;
    }
    return true;
}

bool write_all(int fd, const void *buffer, size_t size) {
    for (size_t done = 0; done < size;) {
        ssize_t put = write(fd, (const char *)buffer + done, size - done);
        if (put < 0 && errno == EINTR) continue;
        if (put <= 0) return false;
        done += (size_t)put;
    }
    return true;
}

/* Read exactly `size` bytes; descriptors that come with them are appended to `received`. */
static bool receive(int fd, void *buffer, size_t size) {
    for (size_t done = 0; done < size;) {
        struct iovec part = {(char *)buffer + done, size - done};
        union {
            struct cmsghdr header;
            char space[CMSG_SPACE(sizeof(int) * MAX_FDS)];
        } ancillary;
        struct msghdr message = {
            .msg_iov = &part, .msg_iovlen = 1, .msg_control = &ancillary, .msg_controllen = sizeof ancillary};
        ssize_t got = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return false;
        for (struct cmsghdr *c = CMSG_FIRSTHDR(&message); c; c = CMSG_NXTHDR(&message, c)) {
            if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
            int count = (int)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
            for (int i = 0; i < count; i++) {
                int passed;
                memcpy(&passed, CMSG_DATA(c) + (size_t)i * sizeof(int), sizeof passed);
                if (num_received < MAX_FDS) received[num_received++] = passed;
                else close(passed);
            }
        }
        done += (size_t)got;
    }
    return true;
}

char *receive_frame(int fd, uint32_t *size) {
    if (!receive(fd, size, sizeof *size)) return NULL;
    if (*size < 5 || *size > MAX_FRAME) return NULL;
    char *frame = malloc(*size);
    if (!frame) return NULL;
    if (receive(fd, frame, *size)) return frame;
    free(frame);
    return NULL;
}

int take_fd(void) {
    if (!num_received) return -1;
    int fd = received[0];
    memmove(received, received + 1, sizeof(int) * (size_t)--num_received);
    return fd;
}

void drop_fds(void) {
    while (num_received) close(received[--num_received]);
}

void send_frame(int fd, uint8_t kind, uint32_t id, const void *payload, uint32_t size, const int *fds, int num_fds) {
    char head[9];
    uint32_t rest = size + 5;
    memcpy(head, &rest, 4);
    head[4] = (char)kind;
    memcpy(head + 5, &id, 4);
    struct iovec part = {head, sizeof head};
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof(int) * MAX_FDS)];
    } ancillary;
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (num_fds) {
        message.msg_control = &ancillary;
        message.msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)num_fds);
        memset(&ancillary, 0, sizeof ancillary);
        struct cmsghdr *c = CMSG_FIRSTHDR(&message);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)num_fds);
        memcpy(CMSG_DATA(c), fds, sizeof(int) * (size_t)num_fds);
    }
    /* A head this small is sent whole or not at all. If the reader is gone, the loop sees the end of the stream. */
    if (sendmsg(fd, &message, MSG_NOSIGNAL) != (ssize_t)sizeof head) return;
    const char *at = payload;
    while (size) {
        ssize_t put = send(fd, at, size, MSG_NOSIGNAL);
        if (put < 0 && errno == EINTR) continue;
        if (put <= 0) return;
        at += put;
        size -= (uint32_t)put;
    }
}

_Noreturn void fail(const char *what) {
    char text[512];
    int size = snprintf(text, sizeof text, "%s: %s", what, strerror(errno));
    if (size >= (int)sizeof text) size = sizeof text - 1;
    if (before_failing) before_failing();
    send_frame(control_fd, FAILED, 0, text, (uint32_t)size, NULL, 0);
    _exit(1);
}
