// The largest of a row's values, looked for in pieces that come in any order.
#pragma once

#include <cstdint>

#include "simd.h"

namespace outpace {

class Largest {
   public:
    // Values [begin, end) of a row; `begin` in whole registers.
    void look(const float* row, int begin, int end) {
        vf tops = splat(value);
        int at = begin;
        for (; at + LANES <= end; at += LANES) {
            const vf x = load(row + at);
            wrong |= x != x;
            tops = max(x, tops);
        }
        float top = highest(tops);
        for (; at < end; ++at) wrong |= splat(-(row[at] != row[at])), top = row[at] > top ? row[at] : top;
        if (!(top > value) && !(top == value && end <= place)) return;
        for (at = begin; at < end && row[at] != top; ++at) {}
        if (at < end) value = top, place = at;
    }

    void join(const Largest& other) {
        wrong |= other.wrong;
        if (other.value > value || (other.value == value && other.place < place)) value = other.value, place = other.place;
    }

    // The first place of the largest value; -1 where none is above -infinity, or one is NaN.
    int32_t at() const {
        for (int lane = 0; lane < LANES; ++lane)
            if (wrong[lane]) return -1;
        return place;
    }

   private:
    vi wrong = {};  // lanes that have seen NaN
    float value = -__builtin_inff();
    int32_t place = -1;
};

}  // namespace outpace
