/* SPDX-License-Identifier: Apache-2.0 */
/* Combine: weighted sums cross once, as packed lines or with flags, and are added here.
 */
#include "moe/device_wire.cuh"

/*
 * Some blocks work for this rank as a holder: for the tokens of every rank, a group of
 * warps for each rank. Others work for it as an owner, for its own tokens (struct
 * moe_gpu_plan).
 *
 *   holder  acc = fmaf(w, x, acc) in f32 from +0, experts ascending, rounded once
 *   owner   the holders' rows in f32, ranks ascending, from +0; biases; old output; round
 *
 * Nothing is shared between the groups, and no barrier lies between sending and
 * receiving.
 */
enum { AT_ONCE = 4, TAKE_MOST = 2, TAKE_PARTS = 0, TAKE_PLAIN = -1, POLLS = 64 };

/* The places that each own token of the block lacks. */
MOE_DEVICE unsigned long long *lost_places(const moe_gpu_args &a)
{
    return (unsigned long long *)(shared_memory + WARPS * RINGS_BYTES);
}

/* ---------------------------------------------------------------------- receiving */

/* A lane's place in the first line of a contribution to an own token. */
MOE_DEVICE const unsigned char *line_of(const moe_gpu_args &a, step_view v,
                                        uint32_t token, uint32_t from)
{
    return own_half(a, v.half) + moe_gpu_take(&a.geo, token, from) +
           (threadIdx.x & 31) * 16;
}

/* Accesses that a warp takes at once; those that do not exist repeat the first. */
template <int TAKE> struct few_accesses {
    uint32_t number[TAKE];
    bool exists[TAKE];
    bool ignore[TAKE]; /* this lane's line lies beyond the contribution */
};

template <int TAKE>
MOE_DEVICE few_accesses<TAKE> accesses_from(const moe_gpu_args &a, uint32_t first,
                                            uint32_t stride)
{
    few_accesses<TAKE> f;
#pragma unroll
    for (int n = 0; n < TAKE; n++) {
        f.exists[n] = first + n * stride < a.give_accesses;
        f.number[n] = f.exists[n] ? first + n * stride : first;
        f.ignore[n] = f.number[n] * 2 + ((threadIdx.x & 31) >> 4) >= a.geo.give.pairs;
    }
    return f;
}

/* What is added to the sum of the contributions: biases, then the old output. */
template <int TYPE, bool WIDE>
MOE_DEVICE void add_rest(const moe_gpu_args &a, uint32_t token, uint32_t vector_at,
                         bool upper, float *acc)
{
    typedef element<TYPE> e;
    const uint32_t bytes = a.geo.give.data_bytes;
#pragma unroll 1
    for (int i = 0; i < 3; i++) {
        const void *rest = i == 0         ? a.bias[0]
                           : i == 1       ? a.bias[1]
                           : a.accumulate ? a.result
                                          : NULL;
        if (!rest)
            continue;
        const unsigned char *from =
            (const unsigned char *)rest + (uint64_t)token * bytes + vector_at;
        uint4 v =
            WIDE ? *(const uint4 *)from : load_narrow(from, (int)bytes - (int)vector_at);
        float x[e::COUNT];
        if (upper) {
            v.x = v.z;
            v.y = v.w;
        }
        e::unpack(v, x);
#pragma unroll
        for (int j = 0; j < e::COUNT; j++)
            acc[j] += x[j];
    }
}

/* Adds the lines of `count` contributors to the sums. */
template <int TYPE, int TAKE, bool APART>
MOE_DEVICE void add_lines(uint32_t count, const float *weights,
                          const uint4 (*data)[AT_ONCE],
                          float (*acc)[element<TYPE>::COUNT])
{
#pragma unroll
    for (uint32_t u = 0; u < AT_ONCE; u++) {
        if (u >= count)
            continue;
#pragma unroll
        for (int n = 0; n < TAKE; n++) {
            float x[element<TYPE>::COUNT];
            element<TYPE>::unpack(data[n][u], x);
#pragma unroll
            for (int i = 0; i < element<TYPE>::COUNT; i++)
                acc[n][i] =
                    APART ? __fmaf_rn(weights[u], x[i], acc[n][i]) : acc[n][i] + x[i];
        }
    }
}

/* Writes the sums of some accesses. */
template <int TYPE, bool WIDE, int TAKE>
MOE_DEVICE void store_sums(const moe_gpu_args &a, uint32_t token,
                           const few_accesses<TAKE> &f, pair_lane place,
                           float (*acc)[element<TYPE>::COUNT])
{
    const uint32_t bytes = a.geo.give.data_bytes;
#pragma unroll
    for (int n = 0; n < TAKE; n++) {
        const uint32_t part =
            f.number[n] * MOE_GPU_ACCESS_DATA + lane_offset(threadIdx.x & 31, place);
        if (!f.exists[n] || f.ignore[n] || part >= bytes)
            continue;
        if (a.bias[0] || a.bias[1] || a.accumulate)
            add_rest<TYPE, WIDE>(a, token, part & ~15u, place.upper, acc[n]);
        store_part<WIDE>((unsigned char *)a.result + (uint64_t)token * bytes, part, bytes,
                         element<TYPE>::pack(acc[n]), place.split);
    }
}

/* The ranks that a contribution for an own token is expected from. */
MOE_DEVICE uint32_t wanted_ranks(const moe_gpu_args &a, uint32_t token)
{
    const uint32_t same = says_source(a) ? load_word(&a.lane.state->same_routes) : ~0u;
    return a.lane.own_ranks[token] & a.lane.state->sent & counted_ranks(a) & same;
}

/*
 * Replicas are chosen by the mask of the member of the DP group whose rows a holder took.
 * If that member counted on other ranks, what the holder sends may be for other experts
 * than this rank's routing says: such holders are passed over. A warp waits for their
 * lines, a lane for each.
 */
template <int TYPE, bool WIDE, give_form FORM>
MOE_COLD void compare_routes(const moe_gpu_args &a, step_view v)
{
    const uint32_t r = threadIdx.x & 31;
    moe_gpu_state *state = a.lane.state;
    bool over = r >= a.geo.ranks || ((state->sent & counted_ranks(a)) >> r & 1) == 0;
    bool same = false;
    patience p = {v.deadline, 0};
    uint32_t looks = 0;
    while (!__all_sync(ALL_LANES, over)) {
        if (!over) {
            const uint4 line = load_packet(own_half(a, v.half) + a.geo.drop_at +
                                           (uint64_t)r * MOE_GPU_LINE);
            over = line.x == v.step && (line.y & ~3u) == v.tag.kind;
            same = over && !(line.y & TAG_DROPPED) && line.z == state->own_mask;
            if (same)
                state->member_of[r] = line.w;
        }
        if (!over && lane_out_of_patience(&p, state, r)) {
            state->late[r] = v.step;
            over = true;
        }
        __syncwarp();
        if ((++looks & 0xff) == 0 && (a.phase & MOE_GPU_SEND))
            send_unsent<TYPE, WIDE, FORM>(a, v);
    }
    atomicAnd(&state->same_routes, __ballot_sync(ALL_LANES, same));
}

/* Finds what comes; returns what will not. */
MOE_DEVICE uint32_t expect(const moe_gpu_args &a, uint32_t token, expectation<false> *x)
{
    x->places = wanted_ranks(a, token);
    return a.lane.own_ranks[token] & ~x->places;
}

MOE_DEVICE uint64_t expect(const moe_gpu_args &a, uint32_t token, expectation<true> *x)
{
    const uint32_t lane = threadIdx.x & 31, ranks = wanted_ranks(a, token);
    uint64_t gone = 0;
    x->entry = own_places(a, token);
    x->weight = own_weights(a, token, x->entry);
    x->places = 0;
#pragma unroll
    for (uint32_t half = 0; half < 2; half++) {
        const uint32_t entry = x->entry.of[half], rank = entry & 31;
        const bool first = entry >> 8 == lane + half * WARP, comes = ranks >> rank & 1;
        x->places |= (uint64_t)__ballot_sync(ALL_LANES, first && comes) << half * WARP;
        gone |= (uint64_t)__ballot_sync(ALL_LANES, first && !comes) << half * WARP;
        x->first.of[half] = 0;
        if (says_source(a))
            x->first.of[half] = load_word(&a.lane.state->member_of[rank]) * a.geo.top_k;
    }
    return gone;
}

/*
 * Some warp-wide accesses of an own token, with the contributions of `places`: waits for
 * their lines for a while; false = they are not all there yet. Nothing is called in here,
 * so that all of it stays in registers.
 */
template <int TYPE, bool WIDE, int TAKE, bool APART>
MOE_DEVICE bool take_accesses(const moe_gpu_args &a, step_view v, uint32_t token,
                              const few_accesses<TAKE> &f, const expectation<APART> &x,
                              typename place_set<APART>::type places, bool stores)
{
    const pair_lane place = place_in_pair(threadIdx.x & 31);
    const unsigned char *at = line_of(a, v, token, 0);
    float acc[TAKE][element<TYPE>::COUNT];
#pragma unroll
    for (int n = 0; n < TAKE; n++)
#pragma unroll
        for (int i = 0; i < element<TYPE>::COUNT; i++)
            acc[n][i] = 0.0f;
#pragma unroll 1
    while (places) {
        const uint32_t count = APART ? min(__popcll(places), (int)AT_ONCE)
                                     : min(__popc((uint32_t)places), (int)AT_ONCE);
        uint64_t from[AT_ONCE];
        float weights[AT_ONCE];
#pragma unroll
        for (uint32_t u = 0; u < AT_ONCE; u++) {
            const uint32_t number = u < count ? first_place(places) : 0;
            from[u] = place_of(x, number) * (uint64_t)a.geo.give.stride;
            weights[u] = weight_of(x, number);
            places &= places - 1;
        }
        uint4 data[TAKE][AT_ONCE];
        uint32_t polls = 0;
        for (;;) {
            bool whole = true;
#pragma unroll
            for (uint32_t u = 0; u < AT_ONCE; u++)
#pragma unroll
                for (int n = 0; n < TAKE; n++)
                    if (u < count)
                        data[n][u] =
                            load_packet(at + from[u] + f.number[n] * MOE_GPU_ACCESS);
#pragma unroll
            for (uint32_t u = 0; u < AT_ONCE; u++)
#pragma unroll
                for (int n = 0; n < TAKE; n++)
                    whole &= u >= count ||
                             tag_whole(data[n][u], v.tag, place.split && !f.ignore[n]);
            if (__all_sync(ALL_LANES, whole))
                break;
            if (++polls == POLLS)
                return false;
        }
        add_lines<TYPE, TAKE, APART>(count, weights, data, acc);
    }
    if (stores)
        store_sums<TYPE, WIDE, TAKE>(a, token, f, place, acc);
    return true;
}

/*
 * What a wait for an access does once in a while: looks whose line says that nothing
 * comes, and gives up on one contribution whose lines are not complete, if it is time.
 * Returns these places.
 */
template <int TYPE, bool WIDE, bool APART, give_form FORM>
MOE_COLD typename place_set<APART>::type look_around(const moe_gpu_args &a, step_view v,
                                                     uint32_t token, uint32_t access,
                                                     expectation<APART> x, uint32_t looks)
{
    typedef typename place_set<APART>::type set;
    const uint32_t lane = threadIdx.x & 31;
    const uint32_t line = access * 4 + (lane >> 3), end = a.geo.give.pairs * 2;
    const bool flag = FORM == PLAIN_PARTS &&
                      ((line + 1) % (2 * a.geo.part_pairs) == 0 || line + 1 == end);
    const bool checks =
        place_in_pair(lane).split && line < end && (FORM != PLAIN_PARTS || flag);
    set waiting = 0, lost = 0;
    for (set rest = x.places; rest; rest &= rest - 1) {
        const uint32_t number = first_place(rest);
        uint4 line = load_packet(line_of(a, v, token, place_of(x, number)) +
                                 access * MOE_GPU_ACCESS);
        const bool ok = tag_ok(line, v.tag, checks);
        waiting |= __all_sync(ALL_LANES, ok) ? 0 : (set)1 << number;
        lost |=
            __any_sync(ALL_LANES, ok && tag_drops(line, checks)) ? (set)1 << number : 0;
    }
    v.tag.kind &= ~TAG_APART;
    if ((looks & 3) == 3 && (a.phase & MOE_GPU_SEND))
        send_unsent<TYPE, WIDE, FORM>(a, v);
    if (!waiting)
        return lost;
    const uint32_t number = first_place(waiting), from = giver_of(x, number);
    const uint4 drop =
        load_packet(own_half(a, v.half) + a.geo.drop_at + (uint64_t)from * MOE_GPU_LINE);
    if (!__any_sync(ALL_LANES,
                    (drop.x == v.step && drop.y == (v.tag.kind | TAG_DROPPED)) ||
                        wait_is_over(v.deadline, &a.lane.state->active, from)))
        return lost;
    if (lane == 0)
        a.lane.state->late[from] = v.step;
    return lost | (set)1 << number;
}

template <bool APART>
MOE_DEVICE expectation<APART> without(expectation<APART> x,
                                      typename place_set<APART>::type lost)
{
    x.places &= ~lost;
    return x;
}

/* Up to 16 B of a row that is not a sum: of a bias, or of the old output. */
MOE_DEVICE uint4 load_few(const moe_gpu_args &a, const unsigned char *from, uint32_t size)
{
    uint4 v = make_uint4(0, 0, 0, 0);
    if (!a.wide)
        return load_narrow(from, (int)size);
    if (size == 16)
        return *(const uint4 *)from;
    v.x = *(const uint32_t *)from;
    if (size == 8)
        v.y = *(const uint32_t *)(from + 4);
    return v;
}

/* Writes some elements of an own token's row: 4, 8 or 16 B of it from byte `at` on. */
template <int TYPE>
MOE_DEVICE void store_few(const moe_gpu_args &a, uint32_t token, uint32_t at,
                          uint32_t size, float *acc)
{
    typedef element<TYPE> e;
    const uint32_t bytes = a.geo.give.data_bytes;
    const uint64_t place = (uint64_t)token * bytes + at;
    unsigned char *to = (unsigned char *)a.result + place;
    if (at >= bytes)
        return;
    size = min(size, bytes - at);
    if (a.bias[0] || a.bias[1] || a.accumulate) {
#pragma unroll 1
        for (int i = 0; i < 3; i++) {
            const void *rest = i == 0         ? a.bias[0]
                               : i == 1       ? a.bias[1]
                               : a.accumulate ? a.result
                                              : NULL;
            float x[e::COUNT];
            if (!rest)
                continue;
            e::unpack(load_few(a, (const unsigned char *)rest + place, size), x);
#pragma unroll
            for (int j = 0; j < e::COUNT; j++)
                acc[j] += x[j];
        }
    }
    const uint4 v = e::pack(acc);
    if (!a.wide) {
        store_narrow(to, v, (int)size);
    } else if (size == 16) {
        *(uint4 *)to = v;
    } else {
        *(uint32_t *)to = v.x;
        if (size == 8)
            *(uint32_t *)(to + 4) = v.y;
    }
}

/* Units of a part, a power of two: 1, 2, or with FP8 4. */
MOE_DEVICE uint32_t log_units(const moe_gpu_args &a)
{
    return log_of((a.geo.part_elements + UNIT - 1) / UNIT);
}

/* A unit of an own token in parts with flags, 8 elements a lane; else as take_accesses.
 */
template <int TYPE, bool APART>
MOE_DEVICE bool take_unit(const moe_gpu_args &a, step_view v, uint32_t token,
                          uint32_t unit, const expectation<APART> &x,
                          typename place_set<APART>::type places, bool stores)
{
    typedef element<TYPE> e;
    const uint32_t lane = threadIdx.x & 31, log = log_units(a), number = unit >> log;
    const uint32_t base = (unit - (number << log)) * UNIT, at = base + lane * 8;
    const wire_part p = part_of<TYPE>(a, number);
    if (base >= p.count)
        return true;
    const unsigned char *part = own_half(a, v.half) + moe_gpu_take(&a.geo, token, 0) +
                                (uint64_t)number * part_bytes(a);
    if (!await_flags(a, part, p, v.tag, x, places, POLLS))
        return false;
    float acc[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll 1
    while (places) {
        enum { PAIR = 2 }; /* more of them do not stay in registers */
        wire_eight eight[PAIR];
        float w[PAIR];
        uint32_t count = 0;
#pragma unroll
        for (uint32_t u = 0; u < PAIR; u++) {
            if (!places)
                continue;
            const uint32_t number = first_place(places), place = place_of(x, number);
            w[u] = weight_of(x, number);
            if (at < p.count)
                eight[u] =
                    read_wire<TYPE>(a, part + place * (uint64_t)a.geo.give.stride, p, at);
            places &= places - 1;
            count++;
        }
#pragma unroll
        for (uint32_t u = 0; u < PAIR; u++) {
            float f[8];
            if (u >= count || at >= p.count)
                continue;
            convert_wire<TYPE>(a, eight[u], f);
#pragma unroll
            for (int i = 0; i < 8; i++)
                acc[i] = APART ? __fmaf_rn(w[u], f[i], acc[i]) : __fadd_rn(acc[i], f[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i += e::COUNT)
        if (stores && at < p.count)
            store_few<TYPE>(a, token, (p.first + at + i) * e::BYTES, 16, acc + i);
    return true;
}

/* What a warp takes at once of a part in lines: some of its accesses, with FP8 those that
 * have scales too. A vector of 16 B has so many elements. */
template <bool FP8> struct wire_take {
    enum { ELEMENTS = FP8 ? 16 : 4, ACCESSES = FP8 ? 1 : 4, LOADS = FP8 ? 2 : 4 };
    enum { AT_ONCE = FP8 ? 2 : 1, OF_PART = 4 / LOADS };
};

/* Adds a contribution's accesses; with FP8, `data` is the one and that with scales. */
template <bool FP8, bool APART>
MOE_DEVICE void add_part(const uint4 *data, const scale_place &s, uint32_t first,
                         float weight, float (*acc)[16])
{
    typedef wire_take<FP8> wire;
#pragma unroll
    for (int n = 0; n < wire::ACCESSES; n++) {
        const uint32_t word[4] = {data[n].x, data[n].y, data[n].z, data[n].w};
        float x[wire::ELEMENTS];
        const float scale = FP8 ? scale_at(data[1], s, first) : 0.0f;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if constexpr (FP8)
                from_e4m3(word[i], scale, x + 4 * i);
            else
                x[i] = __uint_as_float(word[i]);
        }
#pragma unroll
        for (int i = 0; i < wire::ELEMENTS; i++)
            acc[n][i] =
                APART ? __fmaf_rn(weight, x[i], acc[n][i]) : __fadd_rn(acc[n][i], x[i]);
    }
}

/* A lane's sums of a part, `first` the bytes of its first vector there. */
template <int TYPE, bool FP8>
MOE_DEVICE void store_part_sums(const moe_gpu_args &a, uint32_t token, const wire_part &p,
                                uint32_t first, bool split, float (*acc)[16])
{
    typedef wire_take<FP8> wire;
    typedef element<TYPE> e;
    constexpr int few =
        (int)wire::ELEMENTS < (int)e::COUNT ? (int)wire::ELEMENTS : (int)e::COUNT;
#pragma unroll
    for (int n = 0; n < wire::ACCESSES; n++) {
        const uint32_t at = (first + n * MOE_GPU_ACCESS_DATA) / (16 / wire::ELEMENTS);
#pragma unroll
        for (int i = 0; i < wire::ELEMENTS; i += few) {
            const int have = (split ? wire::ELEMENTS / 2 : wire::ELEMENTS) - i;
            if (at + i < p.count && have > 0)
                store_few<TYPE>(a, token, (p.first + at + i) * e::BYTES,
                                min(have, few) * e::BYTES, acc[n] + i);
        }
    }
}

/* Reads such accesses of a contribution at `from`; true = this lane sees no line of them
 * that is not there yet. */
template <bool FP8>
MOE_DEVICE bool read_part(const unsigned char *from, uint32_t access,
                          const scale_place &s, const wire_part &p, line_tag tag,
                          uint4 *data)
{
    typedef wire_take<FP8> wire;
    const uint32_t half = (threadIdx.x & 31) >> 4;
    const bool split = place_in_pair(threadIdx.x & 31).split;
    bool whole = true;
#pragma unroll
    for (uint32_t n = 0; n < wire::LOADS; n++) {
        const uint32_t at = !FP8 ? n : n ? s.access : access;
        if (at * 2 + half < p.pairs)
            data[n] = load_packet(from + at * MOE_GPU_ACCESS);
    }
#pragma unroll
    for (uint32_t n = 0; n < wire::LOADS; n++) {
        const uint32_t at = !FP8 ? n : n ? s.access : access;
        whole &= tag_whole(data[n], tag, split && at * 2 + half < p.pairs);
    }
    return whole;
}

/* A piece of a part of an own token on another wire, in lines; else as take_accesses. */
template <int TYPE, bool APART, bool FP8>
MOE_DEVICE bool take_part(const moe_gpu_args &a, step_view v, uint32_t token,
                          uint32_t piece, const expectation<APART> &x,
                          typename place_set<APART>::type places, bool stores)
{
    typedef wire_take<FP8> wire;
    const pair_lane place = place_in_pair(threadIdx.x & 31);
    const uint32_t number = piece / wire::OF_PART, access = piece % wire::OF_PART;
    const uint32_t first =
        access * MOE_GPU_ACCESS_DATA + lane_offset(threadIdx.x & 31, place);
    const wire_part p = part_of<TYPE>(a, number);
    const scale_place s = scales_of(p);
    const unsigned char *part =
        line_of(a, v, token, 0) + (uint64_t)number * part_bytes(a);
    float acc[wire::ACCESSES][16] = {};
    if (access * 2 >= p.pairs)
        return true;
#pragma unroll 1
    while (places) {
        const unsigned char *from[wire::AT_ONCE];
        float weights[wire::AT_ONCE];
        bool exists[wire::AT_ONCE];
        uint4 data[wire::AT_ONCE][wire::LOADS] = {};
#pragma unroll
        for (uint32_t u = 0; u < wire::AT_ONCE; u++) {
            const uint32_t rank = places ? first_place(places) : 0;
            exists[u] = places != 0;
            from[u] = part + place_of(x, rank) * (uint64_t)a.geo.give.stride;
            weights[u] = weight_of(x, rank);
            places &= places - 1;
        }
        for (uint32_t polls = 0;; polls++) {
            bool whole = true;
#pragma unroll
            for (uint32_t u = 0; u < wire::AT_ONCE; u++)
                if (exists[u])
                    whole &= read_part<FP8>(from[u], access, s, p, v.tag, data[u]);
            if (__all_sync(ALL_LANES, whole))
                break;
            if (polls == POLLS)
                return false;
        }
#pragma unroll
        for (uint32_t u = 0; u < wire::AT_ONCE; u++)
            if (exists[u])
                add_part<FP8, APART>(data[u], s, first, weights[u], acc);
    }
    if (stores)
        store_part_sums<TYPE, FP8>(a, token, p, first, place.split, acc);
    return true;
}

/* Pieces of a part in lines. */
MOE_DEVICE uint32_t pieces_of_part(const moe_gpu_args &a)
{
    return a.wire == MOE_GPU_WIRE_FP8 ? (uint32_t)wire_take<true>::OF_PART
                                      : (uint32_t)wire_take<false>::OF_PART;
}

/* A unit, or a piece in lines, until it is done; returns the places that it lacks. */
template <int TYPE, bool APART, bool PLAIN>
MOE_DEVICE typename place_set<APART>::type
take_wire_surely(const moe_gpu_args &a, step_view v, uint32_t token, uint32_t piece,
                 const expectation<APART> &x)
{
    constexpr give_form form = PLAIN ? PLAIN_PARTS : PARTS;
    const uint32_t accesses = a.geo.part_pairs / 2;
    const uint32_t number = PLAIN ? piece >> log_units(a) : piece / pieces_of_part(a);
    const uint32_t first = number * accesses;
    const bool fp8 = a.wire == MOE_GPU_WIRE_FP8;
    typename place_set<APART>::type lost = 0;
    uint32_t looks = 0;
    v.tag.kind |= APART ? TAG_APART : 0;
#pragma unroll 1
    for (;; looks++) {
        const typename place_set<APART>::type places = x.places & ~lost;
        const bool stores = !lost || a.accumulate;
        bool done;
        if constexpr (PLAIN)
            done = take_unit<TYPE, APART>(a, v, token, piece, x, places, stores);
        else if (fp8)
            done = take_part<TYPE, APART, true>(a, v, token, piece, x, places, stores);
        else
            done = take_part<TYPE, APART, false>(a, v, token, piece, x, places, stores);
        if (done)
            return lost;
#pragma unroll 1
        for (uint32_t n = first; n < min(first + accesses, a.give_accesses); n++)
            lost |= look_around<TYPE, false, APART, form>(a, v, token, n,
                                                          without(x, lost), looks);
    }
}

/* As above, for rows of their own type. What is added to the old output cannot be done
 * again without this column's loss. */
template <int TYPE, bool WIDE, int TAKE, bool APART>
MOE_DEVICE typename place_set<APART>::type
take_surely(const moe_gpu_args &a, step_view v, uint32_t token, uint32_t first,
            uint32_t stride, const expectation<APART> &x)
{
    if constexpr (TAKE <= TAKE_PARTS) {
        return take_wire_surely<TYPE, APART, TAKE == TAKE_PLAIN>(a, v, token, first, x);
    } else {
        const few_accesses<TAKE> f = accesses_from<TAKE>(a, first, stride);
        typename place_set<APART>::type lost = 0;
        uint32_t looks = 0;
        v.tag.kind |= APART ? TAG_APART : 0;
#pragma unroll 1
        while (!take_accesses<TYPE, WIDE, TAKE, APART>(
            a, v, token, f, x, x.places & ~lost, !lost || a.accumulate)) {
#pragma unroll 1
            for (uint32_t n = 0; n < TAKE; n++)
                if (first + n * stride < a.give_accesses)
                    lost |= look_around<TYPE, WIDE, APART, LINES>(
                        a, v, token, first + n * stride, without(x, lost), looks);
            looks++;
        }
        return lost;
    }
}

/* What the warps of an own token divide among them: accesses, or pieces of parts. */
template <int TAKE> MOE_DEVICE uint32_t takes_of(const moe_gpu_args &a)
{
    return TAKE == TAKE_PLAIN   ? a.geo.parts << log_units(a)
           : TAKE == TAKE_PARTS ? a.geo.parts * pieces_of_part(a)
                                : a.give_accesses;
}

/*
 * Own tokens of which a contribution is missing are done again without it, so that all
 * columns of a row lack the same. What has not come by now does not come.
 */
template <int TYPE, bool WIDE, int ONE, bool APART>
MOE_COLD void redo_tokens(const moe_gpu_args &a, step_view v, uint32_t turns)
{
    const uint32_t warp = threadIdx.x / WARP, stride = WARPS * a.plan.take_slices;
    bool again = true;
    while (__syncthreads_or(again)) {
        again = false;
        for (uint32_t i = 0; i < turns; i++) {
            const uint32_t t = take_class(a) + i * a.plan.take_classes;
            const unsigned long long lost = lost_places(a)[i];
            __syncthreads();
            expectation<APART> x;
            (void)expect(a, t, &x);
            x.places &= ~lost;
            for (uint32_t c = take_slice(a) * WARPS + warp; lost && c < takes_of<ONE>(a);
                 c += stride) {
                const unsigned long long more =
                    take_surely<TYPE, WIDE, ONE, APART>(a, v, t, c, stride, x);
                if (more && (threadIdx.x & 31) == 0)
                    atomicOr(&lost_places(a)[i], more);
                again |= more != 0;
            }
            __syncthreads();
        }
    }
}

/* Contributions of this lane's rank beyond the first, if experts come apart. */
MOE_DEVICE uint32_t more_from(const moe_gpu_args &, uint32_t, const expectation<false> &)
{
    return 0;
}

MOE_DEVICE uint32_t more_from(const moe_gpu_args &a, uint32_t token,
                              const expectation<true> &x)
{
    uint32_t n = 0;
#pragma unroll 1
    for (uint64_t rest = x.places; rest; rest &= rest - 1)
        n += giver_of(x, first_place(rest)) == (threadIdx.x & 31);
    return n - (wanted_ranks(a, token) >> (threadIdx.x & 31) & 1);
}

template <int TYPE, bool WIDE, int TAKE, bool APART>
MOE_DEVICE void receive_all(const moe_gpu_args &a, step_view v)
{
    const uint32_t warp = threadIdx.x / WARP, tokens = a.lane.state->own_tokens;
    const uint32_t stride = WARPS * a.plan.take_slices;
    bool incomplete = false;
    uint32_t turns = 0, more = 0;
#pragma unroll 1
    for (uint32_t t = take_class(a); t < tokens; t += a.plan.take_classes, turns++) {
        if (a.missing && threadIdx.x == 0 && take_slice(a) == 0)
            a.missing[t] = 0;
        expectation<APART> x;
        typename place_set<APART>::type gone = expect(a, t, &x);
        if (APART)
            more += more_from(a, t, x);
#pragma unroll 1
        for (uint32_t c = take_slice(a) * WARPS + warp; c < takes_of<TAKE>(a);
             c += (TAKE <= TAKE_PARTS ? 1 : TAKE) * stride)
            gone |= take_surely<TYPE, WIDE, TAKE, APART>(a, v, t, c, stride, x);
        if (gone && (threadIdx.x & 31) == 0)
            atomicOr(&lost_places(a)[turns], (unsigned long long)gone);
        incomplete |= gone != 0;
    }
    trace(a, 6);
    if (APART && warp == 0 && take_slice(a) == 0)
        count_for(a.lane.counters->more, more);
    if (!__syncthreads_or(incomplete))
        return;
    if (threadIdx.x == 0)
        note_incomplete(a, v, 1);
    if (!a.accumulate)
        redo_tokens<TYPE, WIDE, TAKE <= TAKE_PARTS ? TAKE : 1, APART>(a, v, turns);
    for (uint32_t i = threadIdx.x; a.missing && i < turns; i += THREADS)
        if (lost_places(a)[i])
            a.missing[take_class(a) + i * a.plan.take_classes] = 1;
}

/* Where contributions are in parts, rows have any alignment. */
template <int TYPE, bool WIDE, give_form FORM = LINES>
MOE_DEVICE void combine(const moe_gpu_args &a)
{
    await_kernel();
    const uint64_t begin = a.timeout_ns ? time_ns() : 0;
    trace(a, TRACE_BEGIN);
    give_cursor cursor;
    const give_work work = begin_give(a, &cursor);
    const uint32_t tokens = tokens_by_lane(a);
    const step_view v = view_of(a, a.lane.state->step[blockIdx.x] - 1, begin);
    note_begun(a, v, 1);
#pragma unroll 1
    for (uint32_t i = threadIdx.x;
         is_receiver(a) && take_class(a) + i * a.plan.take_classes < a.geo.max_tokens;
         i += THREADS)
        lost_places(a)[i] = 0;
    __syncthreads();
    trace(a, 2);
    if (a.geo.keeps && (a.phase & MOE_GPU_SEND))
        give_weights(a, v);
    if (is_sender(a)) {
        uint32_t used = 0;
        if (FORM != LINES)
            give_wire<TYPE, FORM == PLAIN_PARTS>(a, v, tokens);
        else
            send_all<TYPE, WIDE>(a, v, work, tokens, &cursor, &used);
        if (sender_number(a) == a.plan.senders - 1 && threadIdx.x / WARP == WARPS - 1) {
            send_drops(a, v);
            count_given(a);
        }
    }
    trace(a, 5);
    if (says_source(a) && is_receiver(a)) {
        if (threadIdx.x < WARP)
            compare_routes<TYPE, WIDE, FORM>(a, v);
        __syncthreads();
    }
    constexpr int parts = FORM == PLAIN_PARTS ? TAKE_PLAIN : TAKE_PARTS;
    /* What runs once is short: its instructions are fetched from far away. */
    if (!is_receiver(a))
        ;
    else if (a.geo.keeps && wants_apart(a, a.rank, a.lane.state->unweighted))
        receive_all<TYPE, WIDE, FORM == LINES ? TAKE_MOST : parts, true>(a, v);
    else if (FORM != LINES)
        receive_all<TYPE, WIDE, parts, false>(a, v);
    else if (a.give_accesses <= WARPS * a.plan.take_slices)
        receive_all<TYPE, WIDE, 1, false>(a, v);
    else
        receive_all<TYPE, WIDE, TAKE_MOST, false>(a, v);
    let_next_begin();
    bulk_wait<0>();
    if (a.trace)
        __syncthreads();
    trace(a, TRACE_END);
}

MOE_KERNEL(moe_combine_bf16, THREADS, combine<MOE_GPU_BF16, false>)
MOE_KERNEL(moe_combine_f16, THREADS, combine<MOE_GPU_F16, false>)
MOE_KERNEL(moe_combine_f32, THREADS, combine<MOE_GPU_F32, false>)
MOE_KERNEL(moe_combine_bf16_wide, THREADS, combine<MOE_GPU_BF16, true>)
MOE_KERNEL(moe_combine_f16_wide, THREADS, combine<MOE_GPU_F16, true>)
MOE_KERNEL(moe_combine_f32_wide, THREADS, combine<MOE_GPU_F32, true>)
MOE_KERNEL(moe_combine_bf16_wire, THREADS, combine<MOE_GPU_BF16, false, PARTS>)
MOE_KERNEL(moe_combine_f16_wire, THREADS, combine<MOE_GPU_F16, false, PARTS>)
MOE_KERNEL(moe_combine_f32_wire, THREADS, combine<MOE_GPU_F32, false, PARTS>)
MOE_KERNEL(moe_combine_bf16_plain, THREADS, combine<MOE_GPU_BF16, false, PLAIN_PARTS>)
MOE_KERNEL(moe_combine_f16_plain, THREADS, combine<MOE_GPU_F16, false, PLAIN_PARTS>)
MOE_KERNEL(moe_combine_f32_plain, THREADS, combine<MOE_GPU_F32, false, PLAIN_PARTS>)
