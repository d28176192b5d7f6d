// Attention of one row over the keys that it sees, wherever they lie.
//
// The keys come in the order of their positions and are taken in parts of PART of them, counted from
// the first one that the row sees. So neither the order of the sums nor the parts depend on where a
// guess lies in memory or on what other rows there are.
#pragma once

#include "vectors.h"

namespace decodekit {

constexpr int64_t PART = 128;

constexpr float LEAST = -3.0e38f;

constexpr int64_t MOST_DIM = 256;

// What one row sees: places first, first + 1, ... in memory, and then the places in `others`.
struct Seen {
    int64_t first;
    int64_t run;
    const int32_t* others;
    int64_t count;  // run and others together

    int64_t place(int64_t key) const { return key < run ? first + key : others[key - run]; }
};

// Queries of HEADS heads, D numbers each, with keys `begin` to `end` of one kv head; D is RUNS runs.
//
// Writes, for each head, the largest score, the sum of exp(score - largest), and the sum of
// exp(score - largest) * value, widened: LANES + D floats in all, the first two in lanes 0 and 1.
template <class T, int RUNS, int HEADS>
void attend_part(const T* query, float scale, const T* keys, const T* values, const Seen& seen,
                 int64_t begin, int64_t end, float* out) {
    constexpr int LENGTH = Run<T>::LENGTH, D = RUNS * LENGTH, PIECES = LENGTH / LANES;
    const int64_t count = end - begin;
    float weights[HEADS][PART];
    Floats most[HEADS];
    for (int h = 0; h < HEADS; ++h) most[h] = all(LEAST);
    for (int64_t start = 0; start < count; start += LANES) {
        const int some = count - start < LANES ? (int)(count - start) : LANES;
        Floats products[HEADS][LANES];
        for (int i = 0; i < some; ++i) {
            const T* key = keys + seen.place(begin + start + i) * D;
            Floats product[HEADS] = {};
            for (int r = 0; r < RUNS; ++r) {
                const typename Run<T>::Loaded part = Run<T>::load(key + r * LENGTH);
                for (int h = 0; h < HEADS; ++h)
                    product[h] = Run<T>::add(product[h], part,
                                             Run<T>::load(query + h * D + r * LENGTH));
            }
            for (int h = 0; h < HEADS; ++h) products[h][i] = product[h];
        }
        for (int h = 0; h < HEADS; ++h) {
            for (int i = some; i < LANES; ++i) products[h][i] = zeros();
            Floats scores = sums(products[h]) * scale;
            for (int i = some; i < LANES; ++i) scores[i] = LEAST;
            most[h] = maximum(most[h], scores);
            store(weights[h] + start, scores);
        }
    }
    for (int h = 0; h < HEADS; ++h) {
        const float top = largest(most[h]);
        Floats total = zeros();
        for (int64_t start = 0; start < count; start += LANES) {
            const Floats weight = exponential(load(weights[h] + start) - top);
            store(weights[h] + start, weight);
            total += weight;
        }
        out[h * (LANES + D)] = top;
        out[h * (LANES + D) + 1] = sum(total);
    }
    Floats found[HEADS][RUNS * PIECES] = {};
    for (int64_t i = 0; i < count; ++i) {
        const T* value = values + seen.place(begin + i) * D;
        Floats parts[RUNS * PIECES];
        for (int r = 0; r < RUNS; ++r) Run<T>::widen(value + r * LENGTH, parts + r * PIECES);
        for (int h = 0; h < HEADS; ++h)
            for (int p = 0; p < RUNS * PIECES; ++p) found[h][p] += parts[p] * weights[h][i];
    }
    for (int h = 0; h < HEADS; ++h)
        for (int p = 0; p < RUNS * PIECES; ++p)
            store(out + h * (LANES + D) + (1 + p) * LANES, found[h][p]);
}

// Joins the parts of one head: parts[p * stride] is what `attend_part` wrote of part p.
template <class T>
void join_parts(const float* parts, int64_t count, int64_t stride, int64_t dim, T* out) {
    float top = parts[0];
    for (int64_t p = 1; p < count; ++p) top = parts[p * stride] > top ? parts[p * stride] : top;
    float total = 0.0f;
    constexpr int64_t PIECES = Run<T>::LENGTH / LANES;
    Floats sum[MOST_DIM / LANES] = {};
    for (int64_t p = 0; p < count; ++p) {
        const float* part = parts + p * stride;
        const float weight = exponential(all(part[0] - top))[0];
        total += weight * part[1];
        for (int64_t c = 0; c < dim / LANES; ++c)
            sum[c] += weight * load(part + LANES + c * LANES);
    }
    for (int64_t c = 0; c < dim / LANES; ++c) sum[c] /= total;
    for (int64_t c = 0; c < dim / LANES; c += PIECES) Run<T>::narrow(sum + c, out + c * LANES);
}

template <class T>
using AttendPart = void (*)(const T*, float, const T*, const T*, const Seen&, int64_t, int64_t,
                            float*);

constexpr int MOST_HEADS = 4;  // of one kv head at a time

template <class T, int DIM>
AttendPart<T> attend_heads(int64_t heads) {
    constexpr int RUNS = DIM / Run<T>::LENGTH;
    if constexpr (RUNS * Run<T>::LENGTH != DIM) return nullptr;
    switch (heads) {
        case 1: return attend_part<T, RUNS, 1>;
        case 2: return attend_part<T, RUNS, 2>;
        case 3: return attend_part<T, RUNS, 3>;
        default: return attend_part<T, RUNS, MOST_HEADS>;
    }
}

// Returns `attend_part` for heads of a size and a number of them, at most MOST_HEADS; null if there
// is none.
template <class T>
AttendPart<T> attend_kernel(int64_t dim, int64_t heads) {
    switch (dim) {
        case 16: return attend_heads<T, 16>(heads);
        case 32: return attend_heads<T, 32>(heads);
        case 64: return attend_heads<T, 64>(heads);
        case 80: return attend_heads<T, 80>(heads);
        case 96: return attend_heads<T, 96>(heads);
        case 128: return attend_heads<T, 128>(heads);
        case MOST_DIM: return attend_heads<T, MOST_DIM>(heads);
        default: return nullptr;
    }
}

}  // namespace decodekit
