// Where a row of logits is largest.
#pragma once

#include "vectors.h"

#include <cmath>

namespace decodekit {

// The largest number of a row of whole vectors, and the first place where it is. If one is not a
// number, neither is the largest.
template <class T>
float largest_of(const T* row, int64_t width, int64_t* place) {
    Floats best = load(row);
    Ints where = {};
    Ints broken = best != best;
    for (int64_t at = LANES; at < width; at += LANES) {
        const Floats some = load(row + at);
        const Ints larger = some > best;
        best = larger ? some : best;
        where = (where & ~larger) | (larger & (int32_t)at);
        broken |= some != some;
    }
    float top = best[0];
    *place = where[0];
    for (int lane = 1; lane < LANES; ++lane)
        if (best[lane] > top || (best[lane] == top && where[lane] + lane < *place)) {
            top = best[lane];
            *place = where[lane] + lane;
        }
    for (int lane = 0; lane < LANES; ++lane)
        if (broken[lane]) top = NAN;
    return top;
}

}  // namespace decodekit
