// The largest values of one row.
#pragma once

#include <cstdint>

namespace outpace {

// The k <= width largest of `width` floats, largest first, with their places, the earlier of equal ones first; and, unless
// `total` is null, the log of the sum of their exponentials, every value multiplied by `warmth` before.
void top_of_row(const float* from, int64_t width, int k, float* values, int32_t* ids, float warmth, float* total);

}  // namespace outpace
