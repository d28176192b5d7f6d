// Matrix products of a few rows with a weight matrix that is read once, as it lies in memory.
//
// Each product is added up over the inputs by itself, in one order, however many rows and outputs
// there are: rows and outputs only share what has been loaded.
#pragma once

#include "vectors.h"

#include <algorithm>

namespace decodekit {

// Of a block: its sums have to fit into the registers, 32 or 16 of them.
constexpr int OUTPUTS = 4, MOST_ROWS = LANES == 16 ? 6 : 3;

// So many outputs at a time, while the weights of the next ones are fetched into the second level
// of cache: what the processor fetches by itself reached half of the memory's rate. The fetches
// are spread over everything that is done meanwhile, so that the memory is never idle.
constexpr int64_t PANEL = 16;

// Bytes of states that are used again before others are, in the first level of cache; and of those
// that all outputs are computed for before others are, in the second.
constexpr int64_t KEPT = 24 << 10, GROUP = 256 << 10;

constexpr int LINE = 64;

// The products of ROWS rows of states with OUTPUTS rows of a weight.
//
// With every run of inputs LINES lines of memory are fetched, at and behind `ahead`, which moves on
// by `pace` bytes. Where there are few registers, those of the states are held rather than those of
// the weights, as there are fewer.
template <class T, int ROWS, int LINES>
__attribute__((noinline)) void block(const T* states, const T* weight, int64_t inputs,
                                     const char* ahead, int64_t pace, float* out,
                                     int64_t stride) {
    constexpr int LENGTH = Run<T>::LENGTH;
    Floats sum[ROWS][OUTPUTS];
    for (int r = 0; r < ROWS; ++r)
        for (int o = 0; o < OUTPUTS; ++o) sum[r][o] = zeros();
    int64_t at = 0;
    do {  // not `for`: the compiler would keep the sums in memory for a loop that may be empty
        for (int line = 0; line < LINES; ++line) __builtin_prefetch(ahead + line * LINE, 0, 2);
        ahead += pace;
        if constexpr (LANES == 16) {
            typename Run<T>::Loaded loaded[OUTPUTS];
            for (int o = 0; o < OUTPUTS; ++o) loaded[o] = Run<T>::load(weight + o * inputs + at);
            for (int r = 0; r < ROWS; ++r) {
                const typename Run<T>::Loaded state = Run<T>::load(states + r * inputs + at);
                for (int o = 0; o < OUTPUTS; ++o)
                    sum[r][o] = Run<T>::add(sum[r][o], loaded[o], state);
            }
        } else {
            typename Run<T>::Loaded loaded[ROWS];
            for (int r = 0; r < ROWS; ++r) loaded[r] = Run<T>::load(states + r * inputs + at);
            for (int o = 0; o < OUTPUTS; ++o) {
                const typename Run<T>::Loaded run = Run<T>::load(weight + o * inputs + at);
                for (int r = 0; r < ROWS; ++r) sum[r][o] = Run<T>::add(sum[r][o], run, loaded[r]);
            }
        }
        at += LENGTH;
    } while (at < inputs);
    for (int r = 0; r < ROWS; ++r) {
        const Four found = sums_of_four(sum[r]);
        std::memcpy(out + r * stride, &found, sizeof found);
    }
}

template <class T>
using Block = void (*)(const T*, const T*, int64_t, const char*, int64_t, float*, int64_t);

template <class T, int LINES>
Block<T> block_of(int64_t rows) {
    switch (rows) {
        case 1: return block<T, 1, LINES>;
        case 2: return block<T, 2, LINES>;
        case 3: return block<T, std::min(3, MOST_ROWS), LINES>;
        case 4: return block<T, std::min(4, MOST_ROWS), LINES>;
        case 5: return block<T, std::min(5, MOST_ROWS), LINES>;
        default: return block<T, MOST_ROWS, LINES>;
    }
}

template <class T>
void linear_of_group(const T* states, int64_t rows, int64_t inputs, const T* weight, int64_t first,
            int64_t last, float* out, int64_t stride) {
    const int64_t blocks = (rows + MOST_ROWS - 1) / MOST_ROWS;
    constexpr int64_t RUN = Run<T>::LENGTH * sizeof(T);
    constexpr int FETCHED = std::max(OUTPUTS * RUN / LINE, (int64_t)2);  // lines, with one block
    const int64_t pace = OUTPUTS * RUN / blocks;
    const int64_t bytes = inputs / Run<T>::LENGTH * pace;
    Block<T> kernels[2];  // for the smaller and the larger blocks
    for (int64_t i = 0; i < 2; ++i) {
        const int64_t some = rows / blocks + i;
        kernels[i] = some > MOST_ROWS ? nullptr
                     : blocks == 1    ? block_of<T, FETCHED>(some)
                     : blocks <= 3    ? block_of<T, FETCHED / 2>(some)
                                      : block_of<T, 1>(some);
    }
    const int64_t kept = std::max((int64_t)1, KEPT / (MOST_ROWS * inputs * (int64_t)sizeof(T)));
    for (int64_t panel = first; panel < last; panel += PANEL) {
        const int64_t end = std::min(panel + PANEL, last);
        const char* ahead = (const char*)(weight + end * inputs);
        for (int64_t some = 0; some < blocks; some += kept)
            for (int64_t o = panel; o < end; o += OUTPUTS)
                for (int64_t b = some; b < std::min(some + kept, blocks); ++b) {
                    const int64_t row = rows * b / blocks, next = rows * (b + 1) / blocks;
                    kernels[next - row - rows / blocks](states + row * inputs, weight + o * inputs,
                                                        inputs, ahead, pace,
                                                        out + row * stride + o, stride);
                    ahead += bytes;
                }
    }
}

// out[r][o] = sum over i of states[r][i] * weight[o][i], for the outputs from `first` to `last`.
// The number of inputs is one of whole runs, that of the outputs a multiple of OUTPUTS.
template <class T>
void linear(const T* states, int64_t rows, int64_t inputs, const T* weight, int64_t first,
            int64_t last, float* out, int64_t stride) {
    const int64_t most = std::max((int64_t)MOST_ROWS, GROUP / (inputs * (int64_t)sizeof(T)));
    const int64_t groups = (rows + most - 1) / most;
    for (int64_t group = 0; group < groups; ++group) {
        const int64_t row = rows * group / groups, next = rows * (group + 1) / groups;
        linear_of_group(states + row * inputs, next - row, inputs, weight, first, last,
                        out + row * stride, stride);
    }
}

}  // namespace decodekit
