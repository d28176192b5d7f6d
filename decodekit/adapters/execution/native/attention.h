// Attention of one row over the keys that it sees, wherever they lie.
//
// The keys come in the order of their positions and are taken in parts of PART of them, counted
// from the first one that the row sees. So neither the order of the sums nor the parts depend on
// where a guess lies in memory or on what other rows there are.
#pragma once

#include "vectors.h"

#include <algorithm>

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

// How runs of values are added up by weight: those of KEYS keys at a time, as PIECES vectors in an
// order of their own, which `write` undoes.
template <class T>
struct Values;

template <>
struct Values<float> {
    static constexpr int KEYS = 1, PIECES = 1;
    using Weight = float;
    static void load(const float* const* rows, int64_t at, Floats* pieces) {
        pieces[0] = decodekit::load(rows[0] + at);
    }
    static Floats add(Floats sum, Floats piece, const float* weight) {
        return sum + piece * *weight;
    }
    static void write(const Floats* pieces, float* to) { store(to, pieces[0]); }
};

// The even and the odd numbers of a run: either is a shift or a mask away.
template <>
struct Values<bfloat16> {
    static constexpr int PIECES = 2;
#ifdef __AVX512BF16__
    // The same number of two keys lies in one word, and the weights of the two likewise.
    static constexpr int KEYS = 2;
    using Weight = bfloat16;
    static void load(const bfloat16* const* rows, int64_t at, Floats* pieces) {
        const Words first = Run<bfloat16>::words(rows[0] + at);
        const Words second = Run<bfloat16>::words(rows[1] + at);
        pieces[0] = (Floats)((first & 0xffffu) | (second << 16));
        pieces[1] = (Floats)((first >> 16) | (second & 0xffff0000u));
    }
    static Floats add(Floats sum, Floats piece, const bfloat16* weights) {
        uint32_t both;
        std::memcpy(&both, weights, sizeof both);
        return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(Words)piece,
                                        (__m512bh)(Words{} + both));
    }
#else
    static constexpr int KEYS = 1;
    using Weight = float;
    static void load(const bfloat16* const* rows, int64_t at, Floats* pieces) {
        const Words words = Run<bfloat16>::words(rows[0] + at);
        pieces[0] = (Floats)(words << 16);
        pieces[1] = (Floats)(words & 0xffff0000u);
    }
    static Floats add(Floats sum, Floats piece, const float* weight) {
        return sum + piece * *weight;
    }
#endif
    static void write(const Floats* pieces, bfloat16* to) {
        const Words both = rounded(pieces[0]) >> 16 | (rounded(pieces[1]) & 0xffff0000u);
        std::memcpy(to, &both, sizeof both);
    }
};

// Scores of HEADS queries, RUNS runs each, with keys `begin` to `end`; LEAST behind them.
template <class T, int RUNS, int HEADS>
inline void score(const T* query, float scale, const T* keys, const Seen& seen, int64_t begin,
                  int64_t end, float (*scores)[PART]) {
    constexpr int LENGTH = Run<T>::LENGTH, D = RUNS * LENGTH;
    for (int64_t start = begin; start < end; start += 4) {
        const T* key[4];
        for (int k = 0; k < 4; ++k) key[k] = keys + seen.place(std::min(start + k, end - 1)) * D;
        Floats products[HEADS][4];
        for (int h = 0; h < HEADS; ++h)
            for (int k = 0; k < 4; ++k) products[h][k] = zeros();
        int at = 0;
        do {
            if constexpr (LANES == 16) {
                typename Run<T>::Loaded of_key[4];
                for (int k = 0; k < 4; ++k) of_key[k] = Run<T>::load(key[k] + at);
                for (int h = 0; h < HEADS; ++h) {
                    const typename Run<T>::Loaded of_query = Run<T>::load(query + h * D + at);
                    for (int k = 0; k < 4; ++k)
                        products[h][k] = Run<T>::add(products[h][k], of_key[k], of_query);
                }
            } else {
                typename Run<T>::Loaded of_query[HEADS];
                for (int h = 0; h < HEADS; ++h) of_query[h] = Run<T>::load(query + h * D + at);
                for (int k = 0; k < 4; ++k) {
                    const typename Run<T>::Loaded of_key = Run<T>::load(key[k] + at);
                    for (int h = 0; h < HEADS; ++h)
                        products[h][k] = Run<T>::add(products[h][k], of_key, of_query[h]);
                }
            }
            at += LENGTH;
        } while (at < D);
        for (int h = 0; h < HEADS; ++h) {
            const Four found = sums_of_four(products[h]) * scale;
            std::memcpy(scores[h] + start - begin, &found, sizeof found);
        }
    }
    const int64_t count = end - begin, whole = (count + LANES - 1) / LANES * LANES;
    for (int h = 0; h < HEADS; ++h)
        for (int64_t i = count; i < whole; ++i) scores[h][i] = LEAST;
}

// How many of RUNS runs are added up at a time, by `sums` vectors each that stay in registers: a
// divisor of their number.
constexpr int most_runs(int runs, int sums) {
    int most = runs;
    while (most > 1 && (runs % most || most * sums > (LANES == 16 ? 32 : 12))) --most;
    return most;
}

// The sums of value * weight for each head over the keys `begin` to `end`, of some runs from `at`
// on; in pieces, those of the next head LANES + D floats further on.
template <class T, int RUNS, int HEADS>
inline void add_values(const T* values, const Seen& seen, int64_t begin, int64_t end,
                       const typename Values<T>::Weight (*weights)[PART], int64_t at, float* out) {
    constexpr int LENGTH = Run<T>::LENGTH, D = RUNS * LENGTH, KEYS = Values<T>::KEYS,
                  PIECES = Values<T>::PIECES, COUNT = most_runs(RUNS, HEADS * PIECES);
    const int64_t count = end - begin;
    Floats found[HEADS][COUNT * PIECES];
    for (int h = 0; h < HEADS; ++h)
        for (int p = 0; p < COUNT * PIECES; ++p) found[h][p] = zeros();
    int64_t i = 0;
    do {
        const T* value[KEYS];
        for (int k = 0; k < KEYS; ++k)
            value[k] = values + seen.place(begin + std::min(i + k, count - 1)) * D;
        for (int r = 0; r < COUNT; ++r) {
            Floats pieces[PIECES];
            Values<T>::load(value, (at + r) * LENGTH, pieces);
            for (int h = 0; h < HEADS; ++h)
                for (int p = 0; p < PIECES; ++p)
                    found[h][r * PIECES + p] =
                        Values<T>::add(found[h][r * PIECES + p], pieces[p], weights[h] + i);
        }
        i += KEYS;
    } while (i < count);
    for (int h = 0; h < HEADS; ++h)
        for (int p = 0; p < COUNT * PIECES; ++p)
            store(out + h * (LANES + D) + p * LANES, found[h][p]);
}

// Queries of HEADS heads, D numbers or RUNS runs each, with keys `begin` to `end` of one kv head.
//
// Writes, for each head, the largest score, the sum of exp(score - largest), and the sum of
// exp(score - largest) * value, in pieces: LANES + D floats in all, the first two in lanes 0 and 1.
template <class T, int RUNS, int HEADS>
void attend_part(const T* query, float scale, const T* keys, const T* values, const Seen& seen,
                 int64_t begin, int64_t end, float* out) {
    using Weight = typename Values<T>::Weight;
    constexpr int D = RUNS * Run<T>::LENGTH, PIECES = Values<T>::PIECES;
    const int64_t count = end - begin;
    float scores[HEADS][PART];
    Weight weights[HEADS][PART];
    score<T, RUNS, HEADS>(query, scale, keys, seen, begin, end, scores);
    for (int h = 0; h < HEADS; ++h) {
        Floats most = load(scores[h]);
        for (int64_t i = LANES; i < count; i += LANES) most = maximum(most, load(scores[h] + i));
        const float top = largest(most);
        Floats total = zeros();
        for (int64_t i = 0; i < count; i += LANES) {
            store(weights[h] + i, exponential(load(scores[h] + i) - top));
            total += load(weights[h] + i);  // as it was rounded
        }
        out[h * (LANES + D)] = top;
        out[h * (LANES + D) + 1] = sum(total);
    }
    for (int64_t at = 0; at < RUNS; at += most_runs(RUNS, HEADS * PIECES))
        add_values<T, RUNS, HEADS>(values, seen, begin, end, weights, at,
                                   out + (1 + at * PIECES) * LANES);
}

// Joins the parts of one head: parts[p * stride] is what `attend_part` wrote of part p.
template <class T>
void join_parts(const float* parts, int64_t count, int64_t stride, int64_t dim, T* out) {
    float top = parts[0];
    for (int64_t p = 1; p < count; ++p) top = parts[p * stride] > top ? parts[p * stride] : top;
    float total = 0.0f;
    constexpr int64_t PIECES = Values<T>::PIECES;
    Floats sum[MOST_DIM / LANES] = {};
    for (int64_t p = 0; p < count; ++p) {
        const float* part = parts + p * stride;
        const float weight = exponential(all(part[0] - top))[0];
        total += weight * part[1];
        for (int64_t c = 0; c < dim / LANES; ++c)
            sum[c] += weight * load(part + LANES + c * LANES);
    }
    for (int64_t c = 0; c < dim / LANES; ++c) sum[c] /= total;
    for (int64_t c = 0; c < dim / LANES; c += PIECES) Values<T>::write(sum + c, out + c * LANES);
}

template <class T>
using AttendPart = void (*)(const T*, float, const T*, const T*, const Seen&, int64_t, int64_t,
                            float*);

constexpr int MOST_HEADS = LANES == 16 ? 4 : 3;  // of one kv head at a time

template <class T, int DIM>
AttendPart<T> attend_heads(int64_t heads) {
    constexpr int RUNS = DIM / Run<T>::LENGTH;
    if constexpr (RUNS * Run<T>::LENGTH != DIM) {
        return nullptr;
    } else {
        switch (heads) {
            case 1: return attend_part<T, RUNS, 1>;
            case 2: return attend_part<T, RUNS, 2>;
            case 3: return attend_part<T, RUNS, std::min(3, MOST_HEADS)>;
            default: return attend_part<T, RUNS, MOST_HEADS>;
        }
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
