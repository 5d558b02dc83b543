/* SPDX-License-Identifier: Apache-2.0 */
/* Shared memory without a name: sealed memfds, so that no peer can shrink what others
 * map. */
#include "net/internal.h"

#include "base/checked.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

/* Linux 6.1; glibc 2.36 does not have it. */
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

enum { MEMORY_PAGE = 4096, MEMORY_LARGE_PAGE = 2 * 1024 * 1024, ENLARGE_TRIES = 16 };

/* So that a large page of the file can be one of the mapping. */
static void *map_aligned(int fd, size_t bytes, int protection)
{
    size_t reserved;
    if (bytes < MEMORY_LARGE_PAGE || !base_add_size(bytes, MEMORY_LARGE_PAGE, &reserved))
        return mmap(NULL, bytes, protection, MAP_SHARED, fd, 0);
    char *room = mmap(NULL, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (room == MAP_FAILED)
        return MAP_FAILED;
    size_t before = -(uintptr_t)room % MEMORY_LARGE_PAGE;
    void *data = mmap(room + before, bytes, protection, MAP_SHARED | MAP_FIXED, fd, 0);
    if (data == MAP_FAILED) {
        int reason = errno;
        munmap(room, reserved);
        errno = reason;
        return MAP_FAILED;
    }
    if (before > 0)
        munmap(room, before);
    munmap(room + before + bytes, MEMORY_LARGE_PAGE - before);
    return data;
}

enum hdl_status net_memory_create(const char *name, size_t bytes, int *fd, void **data)
{
    size_t mapped;
    if (bytes == 0 || !base_align_up(bytes, MEMORY_PAGE, &mapped) || mapped > INT64_MAX)
        return base_fail(HDL_EINVAL, "window of %zu bytes", bytes);
    /* Beyond it ftruncate ends the process with SIGXFSZ. */
    struct rlimit most;
    if (getrlimit(RLIMIT_FSIZE, &most) == 0 && mapped > most.rlim_cur)
        return base_fail(HDL_ENOMEM,
                         "memfd of %zu bytes, and the limit of files (ulimit -f) is %llu",
                         mapped, (unsigned long long)most.rlim_cur);
    int new_fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (new_fd < 0)
        return base_fail_errno(HDL_ESYSTEM, errno, "memfd for %zu bytes", mapped);
    enum hdl_status status = HDL_OK;
    if (fchmod(new_fd, 0600) != 0 || ftruncate(new_fd, (off_t)mapped) != 0) {
        status = base_fail_errno(HDL_ENOMEM, errno, "memfd of %zu bytes", mapped);
        goto close_fd;
    }
    if (fcntl(new_fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
        status = base_fail_errno(HDL_ESYSTEM, errno, "sealing a memfd");
        goto close_fd;
    }
    void *address = map_aligned(new_fd, mapped, PROT_READ | PROT_WRITE);
    if (address == MAP_FAILED) {
        status = base_fail_errno(HDL_ENOMEM, errno, "mapping %zu bytes", mapped);
        goto close_fd;
    }
    *fd = new_fd;
    *data = address;
    return HDL_OK;

close_fd:
    close(new_fd);
    return status;
}

enum hdl_status net_memory_map(int fd, size_t bytes, bool writable, void **data)
{
    size_t mapped;
    struct stat st;
    if (!base_align_up(bytes, MEMORY_PAGE, &mapped) || fstat(fd, &st) != 0 ||
        (uint64_t)st.st_size < mapped)
        return base_fail(HDL_EINVAL, "descriptor does not hold %zu bytes", bytes);
    /* Without the seal its owner could shrink it and kill us with SIGBUS. */
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || !(seals & F_SEAL_SHRINK))
        return base_fail(HDL_EINVAL, "descriptor is not sealed memory");
    void *address =
        map_aligned(fd, mapped, writable ? PROT_READ | PROT_WRITE : PROT_READ);
    if (address == MAP_FAILED)
        return base_fail_errno(HDL_ENOMEM, errno, "mapping %zu bytes of a peer", mapped);
    *data = address;
    return HDL_OK;
}

void net_memory_unmap(void *data, size_t bytes)
{
    size_t mapped;
    if (data && base_align_up(bytes, MEMORY_PAGE, &mapped))
        munmap(data, mapped);
}

bool net_memory_enlarge(void *data, size_t bytes)
{
    bytes -= bytes % MEMORY_LARGE_PAGE;
    int result = -1;
    /* EAGAIN: somebody held one of the pages just then. What is done stays done. */
    for (int i = 0; bytes > 0 && i < ENLARGE_TRIES; i++) {
        result = madvise(data, bytes, MADV_COLLAPSE);
        if (result == 0 || errno != EAGAIN)
            break;
    }
    return result == 0;
}
