// One pass of some rows through all layers of a LLaMA-like model: Touvron et al., arXiv 2302.13971.
//
// A row's results depend on its token, its position and the keys that it sees, in order, and on
// nothing else: not on other rows, places in memory or threads. See linear.h and attention.h.
// Hidden states are float32 from layer to layer; what goes into a matrix product, and keys and
// values, are of the model's type T.
#pragma once

#include "attention.h"
#include "linear.h"
#include "model.h"
#include "view.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <new>
#include <omp.h>
#include <vector>

namespace decodekit {

// Memory that starts at a line of the cache, and means nothing yet.
template <class T>
class Buffer {
  public:
    explicit Buffer(int64_t count)
        : data_((T*)::operator new(count * sizeof(T), std::align_val_t(LINE))) {}
    T* at(int64_t index) const { return data_.get() + index; }

  private:
    struct Free {
        void operator()(T* data) const { ::operator delete(data, std::align_val_t(LINE)); }
    };
    std::unique_ptr<T, Free> data_;
};

// A step on its way through the layers. Every function that has an `id` is called by each thread of
// the team with its own, and does that thread's share; what is between two barriers may run in any
// order.
template <class T>
class Pass {
  public:
    Pass(const Model& model, const Step& step, int threads);
    void run();

  private:
    struct Share {
        int64_t first, last;
    };

    // What thread `id` does of `count` things, in whole units but for the last.
    Share share(int64_t count, int id, int64_t unit = 1) const {
        const int64_t units = (count + unit - 1) / unit;
        return {std::min(count, units * id / team_ * unit),
                std::min(count, units * (id + 1) / team_ * unit)};
    }

    T* cached(int64_t entry, int64_t row, int64_t head) const {
        const int64_t place = (entry * step_.slots + sequence_[row]) * model_.kv_heads + head;
        return (T*)step_.cache + place * step_.capacity * model_.dim;
    }

    void embed(int id) const;
    void norm(const float* from, const void* weight, T* to) const;
    void norms(const void* weight, int id) const;
    void project(const T* from, int64_t rows, int64_t inputs, const void* weight, const void* bias,
                 const Share& share, float* to, int64_t outputs) const;
    const View& view_of(int64_t window) const;
    void turn(int64_t layer, int64_t row, int64_t head) const;
    void attend(int64_t layer, const View& view, const Group& group, int id) const;
    void join(const View& view, const Group& group, int id) const;
    void add(const T* from, int64_t inputs, const void* weight, const void* bias, int id) const;
    void gate(const Layer& layer, int id) const;
    void through(int64_t index, int id) const;
    void to_logits(int id) const;

    const Model& model_;
    const Step& step_;
    const int threads_;
    const int64_t heads_in_;  // of queries, keys and values together
    const int64_t heads_;     // numbers of all query heads of a row
    const int64_t group_;     // query heads of a kv head
    const int64_t stride_;    // numbers of one partial result of attention
    std::vector<int32_t> sequence_;  // of each row
    std::vector<View> views_;
    int team_ = 1;
    Buffer<float> hidden_;  // [rows, hidden], from layer to layer
    Buffer<float> wide_;    // [rows, ...]: what a matrix product gives
    Buffer<float> parts_;   // partial results of attention, of one group of rows
    Buffer<float> some_;    // of each thread, two times SOME outputs of all rows
    Buffer<T> states_;      // [rows, ...]: what goes into a matrix product
    Buffer<T> queries_;     // [rows, heads, dim], turned
    Buffer<T> inner_;       // [rows, inner]: what goes into the last product of the MLP
};

constexpr int64_t HELD = 16 << 20;  // bytes of partial results of attention

constexpr int64_t SOME = 64;  // outputs of each row at a time that go on at once

inline int64_t most_parts(const std::vector<View>& views) {
    size_t most = 0;
    for (const View& view : views)
        for (const Group& group : view.groups) most = std::max(most, group.parts.size());
    return most;
}

template <class T>
Pass<T>::Pass(const Model& model, const Step& step, int threads)
    : model_(model),
      step_(step),
      threads_(threads),
      heads_in_(model.heads + 2 * model.kv_heads),
      heads_(model.heads * model.dim),
      group_(model.heads / model.kv_heads),
      stride_(LANES + model.dim),
      views_(views_of(model, step,
                      HELD / (model.heads * stride_ * (int64_t)sizeof(float)))),
      hidden_(step.rows * model.hidden),
      wide_(step.rows * std::max(heads_in_ * model.dim, model.hidden)),
      parts_(most_parts(views_) * model.heads * stride_),
      some_(threads * 2 * step.rows * SOME),
      states_(step.rows * std::max(model.hidden, heads_)),
      queries_(step.rows * heads_),
      inner_(step.rows * model.inner) {
    for (int64_t s = 0; s < step.sequences; ++s)
        sequence_.insert(sequence_.end(), step.start[s + 1] - step.start[s], (int32_t)s);
}

template <class T>
const View& Pass<T>::view_of(int64_t window) const {
    return *std::find_if(views_.begin(), views_.end(),
                         [&](const View& view) { return view.window == window; });
}

template <class T>
void Pass<T>::run() {
#pragma omp parallel num_threads(threads_)
    {
        const int id = omp_get_thread_num();
#pragma omp single
        team_ = omp_get_num_threads();
        embed(id);
        for (int64_t index = 0; index < model_.layers; ++index) through(index, id);
        to_logits(id);
    }
}

template <class T>
void Pass<T>::through(int64_t index, int id) const {
    const Layer& layer = model_.layer[index];
    const View& view = view_of(layer.window);
    const int64_t rows = step_.rows, width = heads_in_ * model_.dim;
    norms(layer.attention_norm, id);
#pragma omp barrier
    project(states_.at(0), rows, model_.hidden, layer.qkv, layer.qkv_bias,
            share(width, id, LANES), wide_.at(0), width);
#pragma omp barrier
    const Share some = share(rows * heads_in_, id);
    for (int64_t i = some.first; i < some.last; ++i) turn(index, i / heads_in_, i % heads_in_);
#pragma omp barrier
    for (const Group& group : view.groups) {
        attend(index, view, group, id);
#pragma omp barrier
        join(view, group, id);
#pragma omp barrier
    }
    add(states_.at(0), heads_, layer.out, layer.out_bias, id);
#pragma omp barrier
    norms(layer.mlp_norm, id);
#pragma omp barrier
    gate(layer, id);
#pragma omp barrier
    add(inner_.at(0), model_.inner, layer.down, layer.down_bias, id);
#pragma omp barrier
}

template <class T>
void Pass<T>::embed(int id) const {
    const Share some = share(step_.rows, id);
    for (int64_t row = some.first; row < some.last; ++row) {
        const T* from = (const T*)model_.embedding + step_.token[row] * model_.hidden;
        for (int64_t i = 0; i < model_.hidden; i += LANES)
            store(hidden_.at(row * model_.hidden + i), load(from + i));
    }
}

// Zhang and Sennrich, arXiv 1910.07467.
template <class T>
void Pass<T>::norm(const float* from, const void* weight, T* to) const {
    Floats squares = zeros();
    for (int64_t i = 0; i < model_.hidden; i += LANES) {
        const Floats some = load(from + i);
        squares += some * some;
    }
    const float mean = sum(squares) / (float)model_.hidden;
    const float factor = 1.0f / std::sqrt(mean + (float)model_.epsilon);
    for (int64_t i = 0; i < model_.hidden; i += LANES)
        store(to + i, load(from + i) * factor * load((const T*)weight + i));
}

// The hidden states of all rows, normed.
template <class T>
void Pass<T>::norms(const void* weight, int id) const {
    const Share some = share(step_.rows, id);
    for (int64_t row = some.first; row < some.last; ++row)
        norm(hidden_.at(row * model_.hidden), weight, states_.at(row * model_.hidden));
}

// The outputs of a share, with their bias, to rows of `outputs` numbers.
template <class T>
void Pass<T>::project(const T* from, int64_t rows, int64_t inputs, const void* weight,
                      const void* bias, const Share& share, float* to, int64_t outputs) const {
    linear(from, rows, inputs, (const T*)weight, share.first, share.last, to, outputs);
    if (!bias) return;
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t o = share.first; o < share.last; o += LANES)
            store(to + row * outputs + o,
                  load(to + row * outputs + o) + load((const T*)bias + o));
}

// Turns a row's query or key to its position (Su et al., arXiv 2104.09864); writes keys and values
// to the cache.
template <class T>
void Pass<T>::turn(int64_t layer, int64_t row, int64_t head) const {
    const int64_t dim = model_.dim, heads = model_.heads, kv_heads = model_.kv_heads;
    const float* states = wide_.at((row * heads_in_ + head) * dim);
    const int64_t sequence = sequence_[row];
    const int64_t place = step_.prefix[sequence] + row - step_.start[sequence];
    if (head >= heads + kv_heads) {
        T* value = cached(2 * layer + 1, row, head - heads - kv_heads) + place * dim;
        for (int64_t i = 0; i < dim; i += LANES) store(value + i, load(states + i));
        return;
    }
    float twice[2 * MOST_DIM];
    std::memcpy(twice, states, dim * sizeof(float));
    std::memcpy(twice + dim, states, dim * sizeof(float));
    const T* cosines = (const T*)step_.turns + step_.position[row] * 2 * dim;
    T* to = head < heads ? queries_.at((row * heads + head) * dim)
                         : cached(2 * layer, row, head - heads) + place * dim;
    for (int64_t i = 0; i < dim; i += LANES)
        store(to + i, load(twice + i) * load(cosines + i) +
                          load(twice + dim / 2 + i) * load(cosines + dim + i));
}

template <class T>
void Pass<T>::attend(int64_t layer, const View& view, const Group& group, int id) const {
    const int64_t dim = model_.dim, parts = group.parts.size();
    const float scale = (float)model_.layer[layer].scale;
    const Share some = share(model_.kv_heads * parts, id);
    for (int64_t i = some.first; i < some.last; ++i) {
        const int64_t kv_head = i / parts;
        const Part part = group.parts[i % parts];
        const Seen& seen = view.seen[part.row];
        const int64_t begin = part.number * PART, end = std::min(begin + PART, seen.count);
        for (int64_t h = 0; h < group_; h += MOST_HEADS) {
            const int64_t head = kv_head * group_ + h;
            const int64_t place = view.first[part.row] - view.first[group.first] + part.number;
            attend_kernel<T>(dim, std::min((int64_t)MOST_HEADS, group_ - h))(
                queries_.at((part.row * model_.heads + head) * dim), scale,
                cached(2 * layer, part.row, kv_head), cached(2 * layer + 1, part.row, kv_head),
                seen, begin, end, parts_.at((place * model_.heads + head) * stride_));
        }
    }
}

template <class T>
void Pass<T>::join(const View& view, const Group& group, int id) const {
    const Share some = share((group.last - group.first) * model_.heads, id);
    for (int64_t i = some.first; i < some.last; ++i) {
        const int64_t row = group.first + i / model_.heads, head = i % model_.heads;
        const int64_t first = view.first[row] - view.first[group.first];
        join_parts(parts_.at((first * model_.heads + head) * stride_), view.parts_of(row),
                   model_.heads * stride_, model_.dim,
                   states_.at((row * model_.heads + head) * model_.dim));
    }
}

// Adds a projection to the hidden states.
template <class T>
void Pass<T>::add(const T* from, int64_t inputs, const void* weight, const void* bias,
                  int id) const {
    const Share some = share(model_.hidden, id, LANES);
    project(from, step_.rows, inputs, weight, bias, some, wide_.at(0), model_.hidden);
    for (int64_t row = 0; row < step_.rows; ++row)
        for (int64_t o = some.first; o < some.last; o += LANES) {
            float* hidden = hidden_.at(row * model_.hidden + o);
            store(hidden, load(hidden) + load(wide_.at(row * model_.hidden + o)));
        }
}

// silu(gate) * up, where silu(x) = x / (1 + exp(-x)); some outputs of both at a time, so that they
// are still in the cache when they are multiplied.
template <class T>
void Pass<T>::gate(const Layer& layer, int id) const {
    const int64_t inner = model_.inner, rows = step_.rows;
    const Share share = this->share(inner, id, LANES);
    float* gates = some_.at(id * 2 * rows * SOME);
    float* ups = gates + rows * SOME;
    for (int64_t first = share.first; first < share.last; first += SOME) {
        const int64_t last = std::min(first + SOME, share.last);
        project(states_.at(0), rows, model_.hidden, layer.gate_up, layer.gate_up_bias,
                {first, last}, gates - first, SOME);
        project(states_.at(0), rows, model_.hidden, layer.gate_up, layer.gate_up_bias,
                {first + inner, last + inner}, ups - first - inner, SOME);
        for (int64_t row = 0; row < rows; ++row)
            for (int64_t o = 0; o < last - first; o += LANES) {
                const Floats gate = load(gates + row * SOME + o), up = load(ups + row * SOME + o);
                const Floats e = exponential(-maximum(all(-88.0f), gate));
                store(inner_.at(row * inner + first + o), gate / (e + 1.0f) * up);
            }
    }
}

template <class T>
void Pass<T>::to_logits(int id) const {
    const int64_t wanted = step_.wanted, vocabulary = model_.vocabulary;
    Share some = share(wanted, id);
    for (int64_t row = some.first; row < some.last; ++row)
        norm(hidden_.at(step_.wanted_row[row] * model_.hidden), model_.norm,
             states_.at(row * model_.hidden));
#pragma omp barrier
    some = share(vocabulary, id, SOME);
    float* found = some_.at(id * 2 * step_.rows * SOME);
    for (int64_t first = some.first; first < some.last; first += SOME) {
        const int64_t last = std::min(first + SOME, some.last);
        project(states_.at(0), wanted, model_.hidden, model_.head, model_.head_bias, {first, last},
                found - first, SOME);
        for (int64_t row = 0; row < wanted; ++row)
            for (int64_t o = first; o < last; o += LANES)
                store((T*)step_.logits + row * vocabulary + o,
                      load(found + row * SOME + o - first));
    }
}

}  // namespace decodekit
