// What Python calls: see library.py.
#include "largest.h"
#include "pass.h"

using namespace decodekit;

// Whether there is a kernel for heads of a size.
extern "C" int decodekit_has_heads_of(int64_t dim, int half) {
    return half ? attend_kernel<bfloat16>(dim, 1) != nullptr
                : attend_kernel<float>(dim, 1) != nullptr;
}

extern "C" int decodekit_run(const Model* model, const Step* step, int half, int threads) {
    try {
        if (half)
            Pass<bfloat16>(*model, *step, threads).run();
        else
            Pass<float>(*model, *step, threads).run();
    } catch (const std::bad_alloc&) {
        return 1;
    }
    return 0;
}

// The largest of each of `count` rows and its place.
extern "C" void decodekit_largest(const void* rows, int64_t count, int64_t width, int half,
                                  float* best, int64_t* places) {
    for (int64_t row = 0; row < count; ++row)
        best[row] = half ? largest_of((const bfloat16*)rows + row * width, width, places + row)
                         : largest_of((const float*)rows + row * width, width, places + row);
}
