/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Connections without a handshake, with a wrong one, with a replayed one, with a valid
 * one of another job, and of another wire version, to every socket that a rank listens
 * on: each is refused and counted, and has no effect on the group.
 */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "base/random.h"
#include "ctl/msg.h"
#include "group/group.h"
#include "host/channel.h"
#include "host/internal.h"
#include "listeners.h"
#include "member.h"

enum { MOST = 8 };

/* What a client said in one handshake. */
struct recording {
    uint8_t hello[HOST_HELLO_BYTES];
    uint8_t proof[HOST_PROOF_BYTES];
};

static struct listener listeners[MOST];
static int num_listeners;
static atomic_bool versions_told, attacking = true;

static void on_line(void *user, enum hdl_log_level level, const char *line)
{
    char mine[32], theirs[32];
    (void)user;
    (void)level;
    snprintf(mine, sizeof(mine), "this process has %d", CTL_WIRE_VERSION);
    snprintf(theirs, sizeof(theirs), "wire version %d", CTL_WIRE_VERSION + 1);
    if (strstr(line, mine) && strstr(line, theirs))
        versions_told = true;
}

static uint32_t purpose_of(const struct listener *listener)
{
    return listener->address.ss_family == AF_UNIX ? HOST_PURPOSE_WATCH
                                                  : HOST_PURPOSE_AGENT;
}

static int dial(const struct listener *listener)
{
    int fd = listeners_dial(listener, 3 * RANK_SLOW);
    CHECK(fd >= 0, "no connection");
    return fd;
}

static void say(int fd, const void *data, size_t size)
{
    CHECK(send(fd, data, size, MSG_NOSIGNAL) == (ssize_t)size, "hung up too early");
}

static void hear(int fd, void *data, size_t size)
{
    CHECK(recv(fd, data, size, MSG_WAITALL) == (ssize_t)size, "no answer");
}

/* The other side hangs up. */
static void expect_end(int fd, const char *who)
{
    char byte;
    ssize_t got = recv(fd, &byte, 1, 0);
    CHECK(got <= 0, "%s: an answer instead of the end", who);
    CHECK(got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK), "%s: still connected",
          who);
    close(fd);
}

static void random_bytes(void *data, size_t size)
{
    CHECK(base_random_bytes(data, size) == HDL_OK, "no randomness");
}

static void make_client(struct host_channel *client, const struct listener *listener,
                        const uint8_t key[HOST_KEY_BYTES], uint32_t version)
{
    uint8_t nonce[HOST_NONCE_BYTES];
    random_bytes(nonce, sizeof(nonce));
    host_channel_init(client, &(struct host_channel_opts){.purpose = purpose_of(listener),
                                                          .version = version,
                                                          .max_frame = 4096,
                                                          .key = key,
                                                          .nonce = nonce});
}

static void no_handshake(const struct listener *listener)
{
    uint8_t frame[64] = {44};
    int fd = dial(listener);
    say(fd, frame, sizeof(frame));
    expect_end(fd, "no handshake");
}

/* The hello is right, the proof is a guess. */
static void wrong_proof(const struct listener *listener,
                        const uint8_t key[HOST_KEY_BYTES])
{
    struct host_channel client;
    struct host_channel_out out;
    uint8_t challenge[HOST_CHALLENGE_BYTES], proof[HOST_PROOF_BYTES];
    make_client(&client, listener, key, 0);
    host_channel_start(&client, &out);
    int fd = dial(listener);
    say(fd, out.reply, out.reply_size);
    hear(fd, challenge, sizeof(challenge));
    random_bytes(proof, sizeof(proof));
    say(fd, proof, sizeof(proof));
    expect_end(fd, "wrong proof");
}

static void replay(const struct listener *listener, const struct recording *recording,
                   const char *who)
{
    uint8_t challenge[HOST_CHALLENGE_BYTES];
    int fd = dial(listener);
    say(fd, recording->hello, sizeof(recording->hello));
    hear(fd, challenge, sizeof(challenge));
    say(fd, recording->proof, sizeof(recording->proof));
    expect_end(fd, who);
}

/* A handshake with this listener that succeeds, hangs up, and is said once more. */
static void replayed(const struct listener *listener, const uint8_t key[HOST_KEY_BYTES])
{
    struct host_channel client;
    struct host_channel_out out;
    struct recording recording;
    uint8_t challenge[HOST_CHALLENGE_BYTES];
    make_client(&client, listener, key, 0);
    host_channel_start(&client, &out);
    memcpy(recording.hello, out.reply, sizeof(recording.hello));
    int fd = dial(listener);
    say(fd, out.reply, out.reply_size);
    hear(fd, challenge, sizeof(challenge));
    CHECK(host_channel_input(&client, challenge, sizeof(challenge), &out) ==
              HOST_CHANNEL_OPENED,
          "the true handshake failed");
    memcpy(recording.proof, out.reply, sizeof(recording.proof));
    say(fd, recording.proof, sizeof(recording.proof));
    close(fd);
    replay(listener, &recording, "replayed");
}

/* Recorded between a rank and the coordinator of a job with another token. */
static void other_job(const struct listener *listener)
{
    struct host_channel client, server;
    struct host_channel_out out;
    struct recording recording;
    uint8_t key[HOST_KEY_BYTES], nonce[HOST_NONCE_BYTES];
    random_bytes(key, sizeof(key));
    random_bytes(nonce, sizeof(nonce));
    make_client(&client, listener, key, 0);
    host_channel_init(&server,
                      &(struct host_channel_opts){.server = true,
                                                  .purpose = 1u << purpose_of(listener),
                                                  .max_frame = 4096,
                                                  .key = key,
                                                  .nonce = nonce});
    host_channel_start(&client, &out);
    memcpy(recording.hello, out.reply, sizeof(recording.hello));
    CHECK(host_channel_input(&server, recording.hello, sizeof(recording.hello), &out) ==
              HOST_CHANNEL_STEP,
          "no challenge");
    uint8_t challenge[HOST_CHALLENGE_BYTES];
    memcpy(challenge, out.reply, sizeof(challenge));
    CHECK(host_channel_input(&client, challenge, sizeof(challenge), &out) ==
              HOST_CHANNEL_OPENED,
          "no proof");
    memcpy(recording.proof, out.reply, sizeof(recording.proof));
    replay(listener, &recording, "other job");
}

static void other_version(const struct listener *listener,
                          const uint8_t key[HOST_KEY_BYTES])
{
    struct host_channel client;
    struct host_channel_out out;
    uint8_t challenge[HOST_CHALLENGE_BYTES];
    make_client(&client, listener, key, CTL_WIRE_VERSION + 1);
    host_channel_start(&client, &out);
    int fd = dial(listener);
    say(fd, out.reply, out.reply_size);
    hear(fd, challenge, sizeof(challenge));
    CHECK(host_channel_input(&client, challenge, sizeof(challenge), &out) ==
                  HOST_CHANNEL_BAD &&
              client.refusal == HOST_REFUSAL_VERSION &&
              client.peer_version == CTL_WIRE_VERSION,
          "the versions were not told");
    expect_end(fd, "other version");
}

static void *attack(void *argument)
{
    const uint8_t *key = argument;
    for (int i = 0; i < num_listeners; i++) {
        const struct listener *l = &listeners[i];
        no_handshake(l);
        wrong_proof(l, key);
        replayed(l, key);
        other_job(l);
        rank_sleep_ms(1100); /* one line a second */
        other_version(l, key);
    }
    attacking = false;
    return NULL;
}

int main(void)
{
    const struct hdl_context_opts opts = {.size = sizeof(opts), .log = on_line};
    struct hdl_group_stats stats = {.size = sizeof(stats)};
    struct hdl_view before = {0}, after = {0};
    pthread_t thread;
    member_begin(&opts, false);
    member_found(self.size, self.size, false);
    CHECK_OK(hdl_group_view(self.group, &before));
    num_listeners = listeners_find(listeners, MOST);
    CHECK(num_listeners == (self.rank == 0 ? 2 : 1), "%d listeners", num_listeners);
    CHECK(pthread_create(&thread, NULL, attack, self.group->engine->host->key) == 0,
          "no thread");
    for (int busy = 1; busy;) {
        int mine = attacking;
        CHECK_OK(
            hdl_allreduce(self.group, &mine, &busy, 1, HDL_I32, HDL_MAX, NULL, NULL));
        CHECK(member_sum_ok() == (1 << self.size) - 1, "somebody is lost");
        rank_sleep_ms(1);
    }
    CHECK(pthread_join(thread, NULL) == 0, "no join");
    CHECK_OK(hdl_barrier(self.group, NULL, NULL));
    CHECK_OK(hdl_group_view(self.group, &after));
    CHECK_OK(hdl_group_stats(self.group, &stats));
    CHECK(after.epoch == before.epoch, "a view was committed");
    CHECK(stats.refused_frames == 5u * (unsigned)num_listeners, "%lu refusals",
          (unsigned long)stats.refused_frames);
    CHECK(versions_told, "no line with both versions");
    CHECK(stats.evidence_exit + stats.evidence_closed + stats.evidence_silence == 0,
          "evidence against somebody");
    CHECK_OK(hdl_barrier(self.group, NULL, NULL));
    member_end();
    return 0;
}
