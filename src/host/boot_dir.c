/* SPDX-License-Identifier: Apache-2.0 */
/* A record of the job in a directory that all ranks share. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/random.h"
#include "host/boot.h"

/*
 * One file, mode 0600, written under another name and renamed: readers see an old record
 * or a whole new one. A record that a killed job left is told by connecting: its address
 * does not answer, or not with its token.
 */
static void record_path(const struct host_boot *boot, char *path, size_t size)
{
    (void)snprintf(path, size, "%s/heddle-coordinator-%u", boot->directory,
                   boot->context);
}

static enum hdl_status write_all(int fd, const void *data, size_t size)
{
    const char *at = data;
    while (size > 0) {
        ssize_t wrote = write(fd, at, size);
        if (wrote < 0 && errno == EINTR)
            continue;
        if (wrote < 0)
            return base_fail_errno(HDL_ESYSTEM, errno, "write");
        at += wrote;
        size -= (size_t)wrote;
    }
    return HDL_OK;
}

enum hdl_status host_boot_dir_put(struct host_boot *boot, const void *record, size_t size)
{
    char path[320], temporary[384];
    uint64_t unique;
    enum hdl_status status = base_random_u64(&unique);
    if (status)
        return status;
    record_path(boot, path, sizeof(path));
    (void)snprintf(temporary, sizeof(temporary), "%s.%016llx", path,
                   (unsigned long long)unique);
    int fd = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        return base_fail_errno(HDL_ESYSTEM, errno, "cannot create %s", temporary);
    status = write_all(fd, record, size);
    if (close(fd) != 0 && status == HDL_OK)
        status = base_fail_errno(HDL_ESYSTEM, errno, "cannot write %s", temporary);
    if (status == HDL_OK && rename(temporary, path) != 0)
        status = base_fail_errno(HDL_ESYSTEM, errno, "cannot rename to %s", path);
    if (status)
        (void)unlink(temporary);
    return status;
}

enum hdl_status host_boot_dir_get(struct host_boot *boot, void *record, size_t *size)
{
    char path[320];
    record_path(boot, path, sizeof(path));
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0 && errno == ENOENT)
        return HDL_PENDING;
    if (fd < 0)
        return base_fail_errno(HDL_ESYSTEM, errno, "cannot open %s", path);
    struct stat info;
    /* The file holds the token: whoever wrote it decides whom this process obeys. */
    bool ours = fstat(fd, &info) == 0 && S_ISREG(info.st_mode) &&
                info.st_uid == geteuid() && (info.st_mode & 077) == 0;
    ssize_t got = ours ? read(fd, record, *size) : 0;
    (void)close(fd);
    if (!ours)
        return base_fail(HDL_EINVAL, "%s is not a file of this user with mode 0600",
                         path);
    *size = got > 0 ? (size_t)got : 0;
    return HDL_OK;
}

void host_boot_dir_remove(struct host_boot *boot, const void *record, size_t size)
{
    char path[320];
    uint8_t there[512];
    size_t length = sizeof(there);
    record_path(boot, path, sizeof(path));
    if (host_boot_dir_get(boot, there, &length) == HDL_OK && length == size &&
        memcmp(there, record, size) == 0)
        (void)unlink(path);
}
