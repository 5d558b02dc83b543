/* SPDX-License-Identifier: Apache-2.0 */
/* Groups and contexts made and destroyed, and joined and left, again and again leave
 * nothing behind. */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "rank.h"

struct usage {
    int files, maps, threads;
    long private_kib;
};

static int entries(const char *path)
{
    DIR *dir = opendir(path);
    int count = 0;
    while (dir && readdir(dir))
        count++;
    if (dir)
        closedir(dir);
    return count;
}

static struct usage measure(void)
{
    struct usage usage = {.files = entries("/proc/self/fd"),
                          .threads = entries("/proc/self/task")};
    char line[512];
    long value;
    FILE *file = fopen("/proc/self/maps", "re");
    while (file && fgets(line, sizeof(line), file))
        usage.maps++;
    if (file)
        fclose(file);
    file = fopen("/proc/self/smaps_rollup", "re");
    while (file && fgets(line, sizeof(line), file))
        if (sscanf(line, "Private_Dirty: %ld", &value) == 1)
            usage.private_kib = value;
    if (file)
        fclose(file);
    return usage;
}

static void compare(const char *what, struct usage before, struct usage after, long kib)
{
    printf("%s: files %d %d maps %d %d threads %d %d private %ld %ld KiB\n", what,
           before.files, after.files, before.maps, after.maps, before.threads,
           after.threads, before.private_kib, after.private_kib);
    CHECK(after.files <= before.files + 1, "%s: %d open files, before %d", what,
          after.files, before.files);
    CHECK(after.threads == before.threads, "%s: %d threads, before %d", what,
          after.threads, before.threads);
    /* Sanitizers keep freed memory for a while, and map more when they like. */
    CHECK(RANK_SLOW > 1 || after.maps <= before.maps + 4, "%s: %d mappings, before %d",
          what, after.maps, before.maps);
    CHECK(RANK_SLOW > 1 || after.private_kib <= before.private_kib + kib,
          "%s: %ld KiB private, before %ld", what, after.private_kib, before.private_kib);
}

static void use(struct hdl_group *group, int size)
{
    int32_t one = 1;
    CHECK_OK(hdl_allreduce(group, &one, &one, 1, HDL_I32, HDL_SUM, NULL, NULL));
    CHECK(one == size, "sum %d", one);
}

static void test_groups(const struct rank *self, int rounds, const char *name)
{
    struct usage before = {0};
    for (int i = 0; i < rounds; i++) {
        struct hdl_group *group = rank_group(self->context, name);
        use(group, self->size);
        hdl_group_destroy(group);
        if (i == 9)
            before = measure();
    }
    compare("groups", before, measure(), 1024);
}

/* One leaves and joins again, the others go on. */
static void test_members(const struct rank *self, int rounds)
{
    struct usage before = {0};
    const int32_t last = self->size - 1;
    struct hdl_view view = {0};
    struct hdl_group *group = rank_group(self->context, "members");
    for (int i = 0; i < rounds; i++) {
        if (self->rank == last) {
            CHECK_OK(hdl_group_leave(group, 20000000));
            CHECK_OK(hdl_group_join(group, 20000000, NULL));
        } else {
            do
                CHECK_OK(hdl_group_view(group, &view));
            while (view.num_active == self->size);
            use(group, last);
            CHECK_OK(hdl_group_admit(group, &last, 1, 20000000, NULL));
        }
        use(group, self->size);
        if (i == 9)
            before = measure();
    }
    compare("members", before, measure(), 1024);
    hdl_group_destroy(group);
}

/* The same name while the older group lives: a new group, not the old one. */
static void test_same_name(const struct rank *self)
{
    struct hdl_group *older = rank_group(self->context, "twice");
    struct hdl_group *newer = rank_group(self->context, "twice");
    int32_t a = 1, b = 10;
    struct hdl_op *op;
    CHECK_OK(hdl_allreduce(older, &a, &a, 1, HDL_I32, HDL_SUM, NULL, &op));
    CHECK_OK(hdl_allreduce(newer, &b, &b, 1, HDL_I32, HDL_SUM, NULL, NULL));
    CHECK_OK(hdl_op_wait(op, HDL_FOREVER));
    hdl_op_free(op);
    CHECK(a == self->size && b == 10 * self->size, "sums %d %d", a, b);
    hdl_group_destroy(older);
    use(newer, self->size);
    hdl_group_destroy(newer);
}

static void test_contexts(int rounds)
{
    struct usage before = {0};
    for (int i = 0; i < rounds; i++) {
        struct rank self;
        rank_join(&self);
        use(self.group, self.size);
        /* What is left goes with the context. */
        use(rank_group(self.context, "left"), self.size);
        rank_leave(&self);
        if (i == 4)
            before = measure();
    }
    compare("contexts", before, measure(), 1024);
}

int main(int argc, char **argv)
{
    int rounds = argc > 1 ? atoi(argv[1]) : 100;
    struct rank self;
    rank_join(&self);
    use(self.group, self.size);
    test_groups(&self, rounds, "cycle");
    test_members(&self, rounds);
    test_same_name(&self);
    rank_leave(&self);
    test_contexts(rounds / 5 > 10 ? rounds / 5 : 10);
    return 0;
}
