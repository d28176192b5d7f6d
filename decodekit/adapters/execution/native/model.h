// What is handed over from Python: a model, where its weights lie, and the rows of a step.
#pragma once

#include <cstdint>

namespace decodekit {

// Mirrored in library.py, field by field.
struct Layer {
    const void *attention_norm, *qkv, *qkv_bias, *out, *out_bias;
    const void *mlp_norm, *gate_up, *gate_up_bias, *down, *down_bias;
    int64_t window;  // in positions; 0 for none
    double scale;
};

struct Model {
    int64_t layers, hidden, heads, kv_heads, dim, inner, vocabulary;
    double epsilon;
    const void *embedding, *norm, *head, *head_bias;
    const Layer* layer;
};

struct Step {
    int64_t sequences, rows, wanted;
    const int32_t *start;   // of each sequence, its first row; then the number of rows
    const int32_t *prefix;  // of each sequence, how many keys it has in the cache
    const int32_t *token, *position, *tin, *tout;  // of each row
    const int32_t *wanted_row;
    const void* turns;  // [positions, 2 * dim]: cosines, then signed sines
    void* cache;  // [2 * layers, slots, kv_heads, capacity, dim]: keys, then values of a layer
    int64_t slots, capacity;
    void* logits;  // [wanted, vocabulary]
};

}  // namespace decodekit
