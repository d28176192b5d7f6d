// Matrix products of a few rows with a weight matrix that is read once, as it lies in memory.
//
// Each product is added up over the inputs by itself, in one order, however many rows and outputs
// there are: rows and outputs only share what has been loaded.
#pragma once

#include "vectors.h"

namespace decodekit {

// Loads the last inputs, fewer than a whole run, and zeros behind them.
template <class T>
inline typename Run<T>::Loaded load_rest(const T* from, int64_t count) {
    T run[Run<T>::LENGTH] = {};
    std::memcpy(run, from, count * sizeof(T));
    return Run<T>::load(run);
}

// Sixteen products at a time: this many rows with this many outputs.
constexpr int ROWS = 4, OUTPUTS = 4;

// How many outputs ahead their weights are fetched, into the second level of cache: what the
// processor fetches by itself reached half of the memory's rate. The fetches are spread over all
// blocks of rows that a weight is used for, so that the memory is never idle.
constexpr int AHEAD = 16;

constexpr int LINE = 64;

template <class T>
__attribute__((noinline)) void add_rest(Floats* sum, const T* const* states,
                                        const T* const* weights, int64_t at, int64_t inputs) {
    for (int r = 0; r < ROWS; ++r)
        for (int o = 0; o < OUTPUTS; ++o)
            sum[r * OUTPUTS + o] = Run<T>::add(sum[r * OUTPUTS + o],
                                               load_rest(weights[o] + at, inputs - at),
                                               load_rest(states[r] + at, inputs - at));
}

// Lane r * OUTPUTS + o is the product of states[r] and weights[o].
//
// With every run of inputs LINES lines of memory are fetched, at and behind `ahead`, which moves on by
// `pace` bytes.
template <class T, int LINES>
inline Floats products(const T* const* states, const T* const* weights, int64_t inputs,
                       const char*& ahead, int64_t pace) {
    constexpr int LENGTH = Run<T>::LENGTH;
    Floats sum[ROWS * OUTPUTS] = {};
    int64_t at = 0;
    for (; at + LENGTH <= inputs; at += LENGTH) {
        typename Run<T>::Loaded weight[OUTPUTS];
        for (int o = 0; o < OUTPUTS; ++o) weight[o] = Run<T>::load(weights[o] + at);
        for (int line = 0; line < LINES; ++line) __builtin_prefetch(ahead + line * LINE, 0, 2);
        ahead += pace;
        for (int r = 0; r < ROWS; ++r) {
            const typename Run<T>::Loaded state = Run<T>::load(states[r] + at);
            for (int o = 0; o < OUTPUTS; ++o)
                sum[r * OUTPUTS + o] = Run<T>::add(sum[r * OUTPUTS + o], weight[o], state);
        }
    }
    if (__builtin_expect(at < inputs, 0)) {
        Floats whole[ROWS * OUTPUTS];
        for (int i = 0; i < ROWS * OUTPUTS; ++i) whole[i] = sum[i];
        add_rest<T>(whole, states, weights, at, inputs);
        return sums(whole);
    }
    return sums(sum);
}

// out[r][o] = sum over i of states[r][i] * weight[o][i], for the outputs from `first` to `last`.
template <class T>
void linear(const T* states, int64_t rows, int64_t inputs, const T* weight, int64_t first,
            int64_t last, float* out, int64_t stride) {
    const int64_t blocks = (rows + ROWS - 1) / ROWS;
    const int64_t pace = OUTPUTS * LINE / blocks;  // a run of each of a block's weights is a line
    for (int64_t o = first; o < last; o += OUTPUTS) {
        const int outputs = last - o < OUTPUTS ? (int)(last - o) : OUTPUTS;
        const T* weights[OUTPUTS];
        for (int i = 0; i < OUTPUTS; ++i) weights[i] = weight + (o + (i < outputs ? i : 0)) * inputs;
        const char* ahead = (const char*)(weights[0] + AHEAD * inputs);
        for (int64_t b = 0; b < blocks; ++b) {
            const int64_t r = b * ROWS;
            const int some = rows - r < ROWS ? (int)(rows - r) : ROWS;
            const T* of_rows[ROWS];
            for (int i = 0; i < ROWS; ++i) of_rows[i] = states + (r + (i < some ? i : 0)) * inputs;
            const Floats found =
                blocks == 1   ? products<T, OUTPUTS>(of_rows, weights, inputs, ahead, pace)
                : blocks <= 3 ? products<T, OUTPUTS / 2>(of_rows, weights, inputs, ahead, pace)
                              : products<T, 1>(of_rows, weights, inputs, ahead, pace);
            float values[LANES];
            store(values, found);
            for (int i = 0; i < some; ++i)
                std::memcpy(out + (r + i) * stride + o, values + i * OUTPUTS,
                            outputs * sizeof(float));
        }
    }
}

}  // namespace decodekit
