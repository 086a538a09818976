// The products of formats whose high bits lie apart: a file of its own, so that it is compiled beside the others.

#include "superblocks.h"

#include <stdexcept>

#include "linear.h"

namespace outpace {

namespace {

template <Format F>
Product chosen(int m, int n) {
    constexpr Product two[] = {product_superblocks<F, 1, 2>, product_superblocks<F, 2, 2>, product_superblocks<F, 3, 2>,
                               product_superblocks<F, 4, 2>, product_superblocks<F, 5, 2>, product_superblocks<F, 6, 2>};
    constexpr Product one[] = {product_superblocks<F, 1, 1>, product_superblocks<F, 2, 1>, product_superblocks<F, 3, 1>,
                               product_superblocks<F, 4, 1>, product_superblocks<F, 5, 1>, product_superblocks<F, 6, 1>};
    if (n == 4) return product_superblocks<F, 1, 4>;  // more rows would not fit the registers
    return n == 2 ? two[m - 1] : one[m - 1];
}

}  // namespace

Product product_of_superblocks(Format format, int m, int n) {
    switch (format) {
        case Q5: return chosen<Q5>(m, n);
        case Q5M: return chosen<Q5M>(m, n);
        case Q4K: return chosen<Q4K>(m, n);
        case Q5K: return chosen<Q5K>(m, n);
        case Q6K: return chosen<Q6K>(m, n);
        default: throw std::invalid_argument("unknown format");
    }
}

}  // namespace outpace
