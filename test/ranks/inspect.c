/* SPDX-License-Identifier: Apache-2.0 */
/* What a program can look at: the dump of a context, the description of the build, and
 * the memory of a peer that is mapped. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "rank.h"

static struct rank self;

/* The dump names the group and the operations that were done. */
static void test_dump(void)
{
    static char text[1 << 16];
    int pipe_fds[2];
    int32_t one = 1;
    int32_t sum;
    for (int i = 0; i < 3; i++)
        CHECK_OK(hdl_allreduce(self.group, &one, &sum, 1, HDL_I32, HDL_SUM, NULL, NULL));
    CHECK(pipe(pipe_fds) == 0, "pipe");
    CHECK_OK(hdl_context_dump(self.context, pipe_fds[1]));
    close(pipe_fds[1]);
    ssize_t got = read(pipe_fds[0], text, sizeof(text) - 1);
    close(pipe_fds[0]);
    CHECK(got > 0, "the dump is empty");
    rank_check_text(text, "world", "active 0,1, absent none", "done up to op 3\n", NULL);
    CHECK_STATUS(hdl_context_dump(self.context, -1), HDL_ESYSTEM);
    CHECK_STATUS(hdl_context_dump(NULL, 1), HDL_EINVAL);
}

/* One call for the size, one for the text, and nothing beyond the room. */
static void test_info(void)
{
    size_t length = 0;
    CHECK_STATUS(hdl_info(NULL, NULL), HDL_EINVAL);
    CHECK_STATUS(hdl_info(NULL, &length), HDL_EINVAL);
    CHECK(length > 100, "%zu bytes of description", length);
    char *json = malloc(length + 1);
    CHECK(json, "no memory");
    memset(json, 'p', length + 1);
    size_t room = length - 1;
    CHECK_STATUS(hdl_info(json, &room), HDL_EINVAL);
    CHECK(room == length && json[length - 1] == 'p', "%zu bytes needed, %zu before", room,
          length);
    CHECK_OK(hdl_info(json, &room));
    CHECK(room == length && json[length - 1] == '\0' && json[length] == 'p',
          "the text does not end at its length");
    CHECK(json[0] == '{' && json[length - 2] == '}', "not an object");
    rank_check_text(json, "version", "transports", "shm", "fabric", "HEDDLE_LOG", NULL);
    free(json);
}

/* A mapped peer's window is memory; a messaged one has none. */
static void test_map(bool mapped)
{
    unsigned char own[HDL_WINDOW_HANDLE_BYTES] = {0};
    static unsigned char all[8 * HDL_WINDOW_HANDLE_BYTES];
    size_t length = sizeof(own);
    struct hdl_window *window;
    struct hdl_peer_window *peer;
    CHECK_OK(hdl_window_create(self.context, 4096, HDL_WINDOW_HOST, &window));
    CHECK_OK(hdl_window_pack(window, own, &length));
    memset(hdl_window_data(window), 'a' + self.rank, 4096);
    CHECK_OK(hdl_allgather(self.group, own, all, sizeof(own), HDL_U8, NULL, NULL));
    int next = (self.rank + 1) % self.size;
    CHECK_OK(
        hdl_window_open(self.context, all + (size_t)next * sizeof(own), length, &peer));
    unsigned char *memory = hdl_peer_window_map(peer);
    CHECK((memory != NULL) == mapped, "mapped %d, memory %p", mapped, (void *)memory);
    if (memory)
        CHECK(memory[0] == 'a' + next && memory[4095] == 'a' + next, "byte %d",
              memory[0]);
    CHECK_OK(hdl_barrier(self.group, NULL, NULL));
    hdl_window_close(peer);
    hdl_window_destroy(window);
}

int main(int argc, char **argv)
{
    rank_join(&self);
    test_dump();
    test_info();
    test_map(argc < 2 || strcmp(argv[1], "messaged") != 0);
    rank_leave(&self);
    return 0;
}
