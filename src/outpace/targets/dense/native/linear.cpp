#include "linear.h"

namespace outpace {

namespace {

template <Format F, int N>
Product by_rows(int m) {
    if constexpr (F == F32) {
        constexpr Product table[] = {product_f32<1, N>, product_f32<2, N>, product_f32<3, N>,
                                     product_f32<4, N>, product_f32<5, N>, product_f32<6, N>};
        return table[m - 1];
    } else if constexpr (F == BF16 && N == 2) {
        constexpr Product table[] = {product_bf16<1, N>, product_bf16<2, N>, product_bf16<3, N>, product_bf16<4, N>,
                                     product_bf16<5, N>, product_bf16<6, N>, product_bf16<7, N>, product_bf16<8, N>,
                                     product_bf16<9, N>, product_bf16<10, N>, product_bf16<11, N>, product_bf16<12, N>};
        return table[m - 1];
    } else if constexpr (F == BF16) {
        constexpr Product table[] = {product_bf16<1, N>, product_bf16<2, N>, product_bf16<3, N>,
                                     product_bf16<4, N>, product_bf16<5, N>, product_bf16<6, N>};
        return table[m - 1];
    } else if constexpr (N == 4) {
        return product_quantised<F, 1, 4>;  // more rows would not fit the registers
    } else {
        constexpr Product table[] = {product_quantised<F, 1, N>, product_quantised<F, 2, N>, product_quantised<F, 3, N>,
                                     product_quantised<F, 4, N>, product_quantised<F, 5, N>, product_quantised<F, 6, N>};
        return table[m - 1];
    }
}

template <Format F>
Product by_tiles(int m, int n) {
    return n == 4 ? by_rows<F, 4>(m) : n == 2 ? by_rows<F, 2>(m) : by_rows<F, 1>(m);
}

}  // namespace

Product product(Format format, int m, int n) {
    switch (format) {
        case F32: return by_tiles<F32>(m, n);
        case BF16: return by_tiles<BF16>(m, n);
        case Q8: return by_tiles<Q8>(m, n);
        case Q4: return by_tiles<Q4>(m, n);
        case Q4M: return by_tiles<Q4M>(m, n);
        default: return product_of_superblocks(format, m, n);
    }
}

}  // namespace outpace
