// What all calls from Python share: one at a time, checked, their failures kept for outpace_error.
#pragma once

#include <functional>

#include "api.h"
#include "model.h"

namespace outpace {

// Run it under the lock of the pool of threads. Returns 0, or 1 after an exception.
int guarded(const std::function<void()>& run);

// Throws for tokens that are not in the model's embedding.
void check_tokens(const Model& m, const int32_t* tokens, int count);

// Run a forward after checking what it is given; then `then(thread, threads)` on every thread, with the logits there.
void run_forward(const outpace_model& model, const outpace_forward& job, const std::function<void(int, int)>& then = {});

// Of one head's key or value of one token.
size_t kv_row_bytes(const Model& m);

}  // namespace outpace
