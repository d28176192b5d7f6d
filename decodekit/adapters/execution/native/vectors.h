// Lanes of float32, in the vector extensions that GCC and Clang share.
//
// Sums are always taken in the same order: lane by lane, then over the lanes as a fixed tree. So on
// one machine a result depends on nothing but the numbers that go into it.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace decodekit {

// A vector is one register of AVX-512 or AVX2, or two of SSE or NEON. With 16 lanes and the blocks
// of AVX-512 the sums did not fit into the 16 registers of AVX2: 9 rows took four times as long.
#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

// The lanes of two vectors, those of the second numbered from LANES, in another order.
#if defined(__clang__) || (__GNUC__ >= 12 && !defined(DECODEKIT_OLD_GCC))
#define DECODEKIT_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#undef DECODEKIT_OLD_GCC
#define DECODEKIT_OLD_GCC 1
#define DECODEKIT_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})
#endif

struct bfloat16 {
    uint16_t bits;
};

inline Floats zeros() { return Floats{}; }

inline Floats all(float value) { return Floats{} + value; }

inline Floats load(const float* from) {
    Floats values;
    std::memcpy(&values, from, sizeof values);
    return values;
}

inline Floats load(const bfloat16* from) {
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
#ifdef __AVX512F__  // GCC 12 makes eight instructions of the conversion
    return (Floats)((Words)_mm512_cvtepu16_epi32((__m256i)halves) << 16);
#else
    return (Floats)(__builtin_convertvector(halves, Words) << 16);
#endif
}

inline void store(float* to, Floats values) { std::memcpy(to, &values, sizeof values); }

// The bits of bfloat16 in the upper halves, rounded to the nearest, ties to even; the lower halves
// mean nothing. What is not a number stays so.
inline Words rounded(Floats values) {
    const Words bits = (Words)values;
    const Words nan = (Words)(values != values);
    return ((bits + 0x7fff + ((bits >> 16) & 1)) & ~nan) | (nan & 0x7fc00000);
}

inline void store(bfloat16* to, Floats values) {
#if defined(__AVX512BF16__)
    const __m256bh halves = _mm512_cvtneps_pbh((__m512)values);
#elif defined(__AVX512F__)
    const __m256i halves = _mm512_cvtepi32_epi16((__m512i)(rounded(values) >> 16));
#else
    const Halves halves = __builtin_convertvector(rounded(values) >> 16, Halves);
#endif
    std::memcpy(to, &halves, sizeof halves);
}

// Of the two; `b` where one of them is not a number.
inline Floats maximum(Floats a, Floats b) { return a > b ? a : b; }

using Lanes = std::make_integer_sequence<int, LANES>;

// Each lane's value goes to the lane whose number differs by the bit DISTANCE.
template <int DISTANCE, int... LANE>
inline Floats exchanged(Floats v, std::integer_sequence<int, LANE...>) {
    return DECODEKIT_SHUFFLE(v, v, (LANE ^ DISTANCE)...);
}

// The sum of the lanes, as a tree.
template <int DISTANCE = LANES / 2>
inline float sum(Floats v) {
    v += exchanged<DISTANCE>(v, Lanes{});
    if constexpr (DISTANCE > 1) return sum<DISTANCE / 2>(v);
    return v[0];
}

template <int DISTANCE = LANES / 2>
inline float largest(Floats v) {
    v = maximum(v, exchanged<DISTANCE>(v, Lanes{}));
    if constexpr (DISTANCE > 1) return largest<DISTANCE / 2>(v);
    return v[0];
}

typedef float Four __attribute__((vector_size(16)));

// In each four lanes, the first two of a and of b in turn, plus the last two likewise.
template <int... LANE>
inline Floats sums_of_two(Floats a, Floats b, std::integer_sequence<int, LANE...>) {
    return DECODEKIT_SHUFFLE(a, b, (LANE - LANE % 4 + LANE % 4 / 2 + LANE % 2 * LANES)...) +
           DECODEKIT_SHUFFLE(a, b, (LANE - LANE % 4 + LANE % 4 / 2 + LANE % 2 * LANES + 2)...);
}

// In each four lanes, the first two of a and then of b, plus the last two likewise.
template <int... LANE>
inline Floats sums_of_pairs(Floats a, Floats b, std::integer_sequence<int, LANE...>) {
    return DECODEKIT_SHUFFLE(a, b, (LANE - LANE % 4 + LANE % 2 + LANE % 4 / 2 * LANES)...) +
           DECODEKIT_SHUFFLE(a, b, (LANE - LANE % 4 + LANE % 2 + LANE % 4 / 2 * LANES + 2)...);
}

// The sums of four vectors' lanes: lane i is the sum of v[i].
inline Four sums_of_four(const Floats* v) {
    // Each four lanes have v[0], v[1], v[0], v[1] and v[2], v[3], v[2], v[3]; then all four.
    const Floats sums = sums_of_pairs(sums_of_two(v[0], v[1], Lanes{}),
                                      sums_of_two(v[2], v[3], Lanes{}), Lanes{});
    Four part[LANES / 4];
    std::memcpy(part, &sums, sizeof sums);
    Four all = part[0] + part[1];
    if constexpr (LANES == 16) all += part[2] + part[3];
    return all;
}

// e to the power of each lane, to about 1 part in 10 million; 0 below -87.7. No lane is over 88.
inline Floats exponential(Floats x) {
    x = maximum(all(-88.0f), x);
    // x = n log 2 + r with |r| <= log 2 / 2; adding and taking 1.5 * 2^23 away rounds.
    const Floats shift = all(12582912.0f);
    const Floats n = (x * 1.44269504f + shift) - shift;
    const Floats r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    // The Taylor polynomial of degree 7: its error at log 2 / 2 is 5e-9.
    Floats p = r * (1.0f / 5040) + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    // The exponent alone, which is 0 for n = -127.
    return p * (Floats)((__builtin_convertvector(n, Ints) + 127) << 23);
}

// Keeps a vector in its register: GCC else loads it again for each of its uses.
inline void hold([[maybe_unused]] Floats& values) {
#if defined(__AVX512F__)
    asm("" : "+v"(values));
#elif defined(__AVX__)
    asm("" : "+x"(values));
#endif
}

// Consecutive numbers of a type, as they are loaded at once, and what is done with them.
template <class T>
struct Run;

template <>
struct Run<float> {
    static constexpr int LENGTH = LANES;
    using Loaded = Floats;
    static Loaded load(const float* from) {
        Loaded run = decodekit::load(from);
        hold(run);
        return run;
    }

    // The product of two runs, added lane by lane.
    static Floats add(Floats sum, Loaded a, Loaded b) { return sum + a * b; }
};

// Two numbers lie in one word, and a bfloat16 is the upper half of a float32.
template <>
struct Run<bfloat16> {
    static constexpr int LENGTH = 2 * LANES;
    static Words words(const bfloat16* from) {
        Words words;
        std::memcpy(&words, from, sizeof words);
        return words;
    }
#ifdef __AVX512BF16__
    using Loaded = __m512bh;
    static Loaded load(const bfloat16* from) {
        Loaded run;
        std::memcpy(&run, from, sizeof run);
        return run;
    }
    static Floats add(Floats sum, Loaded a, Loaded b) {
        return (Floats)_mm512_dpbf16_ps((__m512)sum, a, b);
    }
#else
    struct Loaded {
        Floats even, odd;
    };
    static Loaded load(const bfloat16* from) {
        return {(Floats)(words(from) << 16), (Floats)(words(from) & 0xffff0000u)};
    }
    static Floats add(Floats sum, const Loaded& a, const Loaded& b) {
        return sum + a.even * b.even + a.odd * b.odd;
    }
#endif
};

}  // namespace decodekit
