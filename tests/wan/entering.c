/* Preloaded into `_router enter`: stops the process between its look for a host and its way in. */
#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

int setns(int fd, int kind) {
    raise(SIGSTOP);
    return (int)syscall(SYS_setns, fd, kind);
}
