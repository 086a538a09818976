// The products of formats whose high bits lie apart: a file of its own, so that it is compiled beside the others.

#include "superblocks.h"

#include <stdexcept>

#include "linear.h"

namespace outpace {

namespace {

template <Format F, int N>
struct HighBitsApart {
    template <int M>
    static constexpr Product rows() { return product_superblocks<F, M, N>; }
};

}  // namespace

Product product_of_superblocks(Format format, int m, int n) {
    switch (format) {
        case Q5: return of_tiles<HighBitsApart, Q5>(m, n);
        case Q5M: return of_tiles<HighBitsApart, Q5M>(m, n);
        case Q4K: return of_tiles<HighBitsApart, Q4K>(m, n);
        case Q5K: return of_tiles<HighBitsApart, Q5K>(m, n);
        case Q6K: return of_tiles<HighBitsApart, Q6K>(m, n);
        default: throw std::invalid_argument("unknown format");
    }
}

}  // namespace outpace
