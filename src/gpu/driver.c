/* SPDX-License-Identifier: Apache-2.0 */
/* Opens the CUDA driver and resolves the functions that are used. */
#include "gpu/driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <string.h>

static struct gpu_driver driver;
static bool usable;
static char why_not[BASE_DETAIL_BYTES];
static pthread_once_t once = PTHREAD_ONCE_INIT;

struct entry {
    const char *symbol;
    size_t offset;
};

static const struct entry entries[] = {
#define GPU_CALL(member, symbol, args) {symbol, offsetof(struct gpu_driver, member)},
#include "gpu/driver.def"
#undef GPU_CALL
};

static enum hdl_status resolve(void)
{
    driver.library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!driver.library)
        return base_fail(HDL_ENOTSUP, "no CUDA driver: %s", dlerror());
    for (size_t i = 0; i < sizeof(entries) / sizeof(*entries); i++) {
        void *function = dlsym(driver.library, entries[i].symbol);
        if (!function)
            return base_fail(HDL_ENOTSUP, "CUDA driver has no %s: it is too old",
                             entries[i].symbol);
        memcpy((char *)&driver + entries[i].offset, &function, sizeof(function));
    }
    int count = 0;
    int error = driver.init(0);
    if (error)
        return gpu_check(error, "cuInit");
    error = driver.device_count(&count);
    if (error)
        return gpu_check(error, "cuDeviceGetCount");
    if (count == 0)
        return base_fail(HDL_ENOTSUP, "CUDA driver shows no device");
    return HDL_OK;
}

static void open_once(void)
{
    usable = resolve() == HDL_OK;
    if (!usable)
        memcpy(why_not, base_detail(), sizeof(why_not));
}

const struct gpu_driver *gpu_driver_get(void)
{
    pthread_once(&once, open_once);
    if (usable)
        return &driver;
    (void)base_fail(HDL_ENOTSUP, "%s", why_not);
    return NULL;
}

enum hdl_status gpu_check(int error, const char *what)
{
    enum { CUDA_OUT_OF_MEMORY = 2 };
    const char *name = NULL, *text = NULL;
    if (error == 0)
        return HDL_OK;
    if (driver.error_name && driver.error_text) {
        driver.error_name(error, &name);
        driver.error_text(error, &text);
    }
    return base_fail(error == CUDA_OUT_OF_MEMORY ? HDL_ENOMEM : HDL_EGPU,
                     "%s: %s (%d), %s", what, name ? name : "unknown error", error,
                     text ? text : "no text");
}
