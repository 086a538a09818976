#include "linear.h"

namespace outpace {

namespace {

template <Format F, int N>
struct Plain {
    template <int M>
    static constexpr Product rows() {
        if constexpr (F == F32) return product_f32<M, N>;
        else if constexpr (F == BF16) return product_bf16<M, N>;
        else return product_quantised<F, M, N>;
    }
};

}  // namespace

Product product(Format format, int m, int n) {
    switch (format) {
        case F32: return of_tiles<Plain, F32>(m, n);
        case BF16: return of_tiles<Plain, BF16>(m, n);
        case Q8: return of_tiles<Plain, Q8>(m, n);
        case Q4: return of_tiles<Plain, Q4>(m, n);
        case Q4M: return of_tiles<Plain, Q4M>(m, n);
        default: return product_of_superblocks(format, m, n);
    }
}

}  // namespace outpace
