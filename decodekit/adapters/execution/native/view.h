// Which keys each row of a step sees: TreeMask of mask.py, as places in the cache.
#pragma once

#include "attention.h"
#include "model.h"

#include <algorithm>
#include <vector>

namespace decodekit {

// A part of the keys that a row sees.
struct Part {
    int32_t row, number;
};

// Rows whose partial results are held at once.
struct Group {
    int64_t first, last;      // its rows
    std::vector<Part> parts;  // of all of them, those of the same keys together
};

// What the rows of a step see in layers with one window.
struct View {
    int64_t window;
    std::vector<Seen> seen;      // of each row
    std::vector<int32_t> others; // the places that `seen` points to
    std::vector<int64_t> first;  // of each row, where its parts start; then the number of parts
    std::vector<Group> groups;

    int64_t parts_of(int64_t row) const { return first[row + 1] - first[row]; }
};

// Adds what one row sees.
inline void see(View& view, const Step& step, int64_t sequence, int32_t row) {
    const int64_t prefix = step.prefix[sequence];
    const int64_t hidden = view.window ? step.position[row] - view.window + 1 : 0;
    Seen seen{std::min(std::max(hidden, (int64_t)0), prefix), 0, nullptr, 0};
    seen.run = prefix - seen.first;
    const int32_t from = step.start[sequence], to = step.start[sequence + 1];
    for (int32_t key = from; key < to; ++key) {
        if (step.tin[key] > step.tin[row] || step.tin[row] >= step.tout[key] ||
            step.position[key] < hidden)
            continue;
        const int64_t place = prefix + key - from;
        if (!seen.run) seen.first = place;
        // A chain goes on where the prefix ends.
        if (place == seen.first + seen.run && seen.count == 0)
            ++seen.run;
        else
            view.others.push_back((int32_t)place), ++seen.count;
    }
    seen.count += seen.run;
    view.seen.push_back(seen);
    view.first.push_back(view.first.back() + (seen.count + PART - 1) / PART);
}

// Divides the rows so that no group has more than `most` parts, unless it is a single row.
inline void group(View& view, int64_t rows, int64_t most) {
    for (int64_t row = 0; row < rows; ++row) {
        const bool fits = !view.groups.empty() &&
                          view.first[row + 1] - view.first[view.groups.back().first] <= most;
        if (!fits) view.groups.push_back({row, row, {}});
        view.groups.back().last = row + 1;
    }
    for (Group& group : view.groups) {
        int64_t longest = 0;
        for (int64_t row = group.first; row < group.last; ++row)
            longest = std::max(longest, view.parts_of(row));
        for (int32_t number = 0; number < longest; ++number)
            for (int64_t row = group.first; row < group.last; ++row)
                if (number < view.parts_of(row)) group.parts.push_back({(int32_t)row, number});
    }
}

inline View view_of(const Step& step, int64_t window, int64_t most) {
    View view{window, {}, {}, {0}, {}};
    std::vector<size_t> starts;
    for (int64_t sequence = 0; sequence < step.sequences; ++sequence)
        for (int32_t row = step.start[sequence]; row < step.start[sequence + 1]; ++row) {
            starts.push_back(view.others.size());
            see(view, step, sequence, row);
        }
    for (int64_t row = 0; row < step.rows; ++row)  // now that they do not move any more
        view.seen[row].others = view.others.data() + starts[row];
    group(view, step.rows, most);
    return view;
}

// One view for each window that a layer has; its groups have at most `most` parts.
inline std::vector<View> views_of(const Model& model, const Step& step, int64_t most) {
    std::vector<View> views;
    for (int64_t layer = 0; layer < model.layers; ++layer) {
        const int64_t window = model.layer[layer].window;
        if (std::none_of(views.begin(), views.end(),
                         [&](const View& view) { return view.window == window; }))
            views.push_back(view_of(step, window, most));
    }
    return views;
}

}  // namespace decodekit
