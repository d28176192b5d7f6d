// Sixteen lanes of float32, in the vector extensions that GCC and Clang share.
//
// Sums are always taken in the same order: lane by lane, then over the lanes as a fixed tree. So a
// result depends on nothing but the numbers that go into it.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace decodekit {

constexpr int LANES = 16;

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

// The lanes of two vectors, those of the second numbered from 16, in another order.
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

// The sum of the sixteen lanes, as a tree.
inline float sum(Floats v) {
    v += DECODEKIT_SHUFFLE(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    v += DECODEKIT_SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    v += DECODEKIT_SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    v += DECODEKIT_SHUFFLE(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    return v[0];
}

inline float largest(Floats v) {
    v = maximum(v, DECODEKIT_SHUFFLE(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    v = maximum(v, DECODEKIT_SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    v = maximum(v, DECODEKIT_SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    v = maximum(v, DECODEKIT_SHUFFLE(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
    return v[0];
}

typedef float Four __attribute__((vector_size(16)));

// The sums of four vectors' lanes: lane i is the sum of v[i].
inline Four sums_of_four(const Floats* v) {
    Floats two[2];
    for (int i = 0; i < 2; ++i)
        two[i] = DECODEKIT_SHUFFLE(v[2 * i], v[2 * i + 1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9,
                                   25, 12, 28, 13, 29) +
                 DECODEKIT_SHUFFLE(v[2 * i], v[2 * i + 1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11,
                                   27, 14, 30, 15, 31);
    // Each quarter now has v[0], v[1], v[0], v[1] and v[2], v[3], v[2], v[3].
    const Floats four = DECODEKIT_SHUFFLE(two[0], two[1], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25,
                                          12, 13, 28, 29) +
                        DECODEKIT_SHUFFLE(two[0], two[1], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26,
                                          27, 14, 15, 30, 31);
#ifdef DECODEKIT_OLD_GCC
    Four quarter[4];
    std::memcpy(quarter, &four, sizeof four);
    return (quarter[0] + quarter[1]) + (quarter[2] + quarter[3]);
#else
    return (DECODEKIT_SHUFFLE(four, four, 0, 1, 2, 3) + DECODEKIT_SHUFFLE(four, four, 4, 5, 6, 7)) +
           (DECODEKIT_SHUFFLE(four, four, 8, 9, 10, 11) +
            DECODEKIT_SHUFFLE(four, four, 12, 13, 14, 15));
#endif
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
inline void hold(Floats& values) {
#ifdef __AVX512F__
    asm("" : "+v"(values));
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
