// What Python calls. The structures are mirrored in binding.py.
#pragma once

#include <cstdint>

extern "C" {

struct outpace_model;  // a packed model

struct outpace_shape {
    int32_t layers, hidden, heads, kv_heads, head_size, intermediate, vocabulary;
    int32_t activation;      // 1 SiLU, 2 GELU (tanh)
    int32_t kv_format;       // 0 float32, 1 bfloat16, 2 int8
    float epsilon, attention_scale, softcap, embedding_scale;
};

// A matrix's rows as Python has them: floats, or the blocks of a GGUF file.
struct outpace_matrix {
    int32_t format, outputs, inputs;
    const float* rows;                          // (outputs, inputs), for plain formats
    const uint8_t* const* blocks;               // (outputs) where each row's blocks lie, null for zeros; for the others
    const float* bias;                          // (outputs) or null
};

// One sequence's share of a forward.
struct outpace_part {
    int32_t first, rows, old;                   // its rows among all; rows of its tree that an earlier pass has run
    int32_t committed, capacity, causal;        // causal: a piece of prompt, whose K/V goes straight to the store
    int32_t side_rows;                          // that `side` has room for, at least old + rows
    int32_t lays_root;                          // not causal: row 0's K/V also goes to the store, behind the committed ones
    void* store;                                // (layers, 2, kv_heads, capacity) rows, laid as key_values.h says
    void* side;                                 // (layers, 2, kv_heads, side_rows) rows, of which old + rows are used; null when causal
    const int32_t* positions;                   // (old + rows)
    const int32_t *seen_start, *seen;           // per new row: which rows of the tree it sees
    const int32_t* subset;                      // committed positions to read, ascending; null for all
    int32_t subset_count, subset_by_head;       // (count) for all heads alike, or (layers, kv_heads, count)
};

struct outpace_forward {
    int32_t rows, parts, start, stop;
    const int32_t* tokens;                      // (rows)
    const float* states;                        // (rows, hidden) to begin with instead of tokens; or null
    const float* before;                        // (rows, the entry's inputs) that the entry makes those states of; or null
    const int32_t* second;                      // (rows) tokens that layer 0 reads beside them; null where it does not
    const outpace_model* words;                 // whose embeddings these are
    const uint8_t *skip_attention, *skip_mlp;   // (layers) or null
    const outpace_part* part;
    int32_t taps;
    const int32_t* tap_layers;                  // ascending
    float* const* tap_rows;                     // each (rows, hidden)
    int32_t tap_normed;                         // whether the last layer's output is tapped behind the final norm
    float* queries;                             // (layers, rows, heads, width) rotated queries of layers that run; or null
    float* logits;                              // (rows, logit_stride) or null
    int64_t logit_stride;
    int32_t* best;                              // (rows) where each row's largest logit is, the first of equal ones; -1
                                                // where none is above -infinity, or one is NaN. Null: nobody asks
};

// Rows of a forward's K/V that become a sequence's next committed ones.
struct outpace_commitment {
    void* store;                                // of `capacity` rows, `length` of them committed
    const void* side;                           // (layers, 2, kv_heads, side_rows)
    const int32_t* chosen;                      // (rows) of them
    int32_t capacity, length, side_rows, rows;
};

// Rows that grow from the committed ones of several sequences: each call runs a level of rows, each after any row of an
// earlier one, whose state it begins with, and which is kept here with its K/V until the next beginning.
struct outpace_branches;

// What a row begins with: the state of the row before it; that behind the norm of the entry; or what the entry makes of
// the embedding of the row's token and that state side by side.
enum { OUTPACE_STATE, OUTPACE_NORMED_STATE, OUTPACE_EMBEDDING_AND_STATE };

// A sequence, and its next rows, which are committed.
struct outpace_root {
    void* store;                                // with room for them
    const float* entering;                      // (rows, the entry's inputs), or (rows, hidden) in models without one
    int32_t capacity, committed, rows, position;// position: of the first of them
};

// What is read of each row's logits.
struct outpace_reading {
    int32_t k;                                  // how many of the largest; 0: none
    const float* warmth;                        // (rows) what multiplies them in the totals
    float* values;                              // (rows, k), largest first
    int32_t* ids;                               // (rows, k)
    float* totals;                              // (rows) logs of the sums of exponentials
    float* logits;                              // (rows, logit_stride) or null
    int64_t logit_stride;
};

// How a tree's candidates are sorted, and the rate at which those of each kind are accepted. Kind (d - 1) * width + b: of
// depth d, from `depths` on alike, and bucket b of probability; or rank b among siblings, where there are no edges.
struct outpace_tree_kinds {
    const double* rates;                        // (depths, width); null: probabilities are taken as they are
    const double *edges, *centres;              // (width - 1), (width) of the buckets; or null
    double floor, ceiling;                      // less likely candidates are left out but for each node's first; at most
    int32_t depths, width;
};

// A deterministic tree, as TreePlan in targets/branches.py has it.
struct outpace_tree_plan {
    int32_t depth, max_nodes, topk, expand;     // each at least 1
    int32_t cost_count, id_count;
    double confidence, base_tokens, level, inverse_temperature, children_share;
    const double* costs;                        // (cost_count) of rounds with so many draft tokens
    const int32_t* ids;                         // (id_count) the token of each column of the logits
    outpace_tree_kinds kinds;
};

// The drafts of a call, valid until the next one: of every tree three counts and five lists, as DraftTree::report lays
// them, end to end; the probabilities of the nodes of all trees; and the seconds of each level behind the roots.
struct outpace_drafts {
    const int32_t* numbers;
    const double *probs, *seconds;
    int32_t number_count, prob_count, levels;
};

enum { OUTPACE_QKV0, OUTPACE_QKV1, OUTPACE_QKV2, OUTPACE_ATTENTION_OUT, OUTPACE_GATE_UP, OUTPACE_DOWN, OUTPACE_MATRICES };
enum { OUTPACE_NORM1, OUTPACE_NORM2, OUTPACE_POST1, OUTPACE_POST2, OUTPACE_QUERY_NORM, OUTPACE_KEY_NORM, OUTPACE_NORMS };

const char* outpace_error();                    // of this thread's last failed call
outpace_model* outpace_create(const outpace_shape*);
void outpace_destroy(outpace_model*);
// Returns 2 where blocks have a scale that is not finite.
// `layer` -1 and `slot` 0: the embedding; 1: the LM head, or the embedding again when `matrix` is null; 2: the entry,
// which makes the first layer's states of something else.
int outpace_set_matrix(outpace_model*, int layer, int slot, const outpace_matrix* matrix);
// Layer -1: the final norm (slot 0), that of layer 0's second input (1), which doubles the inputs of its products, and
// those of the entry's inputs (2), each `hidden` of them by themselves, and that of what it makes (3). Without weights there
// is no norm; but the final one's are ones until they are set.
int outpace_set_norm(outpace_model*, int layer, int slot, const float* weights, int count);
int outpace_set_layer(outpace_model*, int layer, int window, int rotation);
int outpace_set_rotation(outpace_model*, int index, const float* cosines, const float* sines, int positions, int size);
int outpace_set_threads(int threads);
int outpace_run(outpace_model*, const outpace_forward*);
int outpace_embed(outpace_model*, const int32_t* tokens, int count, float* rows);
int outpace_commit(outpace_model*, const outpace_commitment*, int count);
// Committed keys [start, stop) as (layers, kv_heads, stop - start, width) floats.
int outpace_read_keys(outpace_model*, const void* store, int capacity, int start, int stop, float* rows);
int outpace_kv_row_bytes(const outpace_model*); // of one head's key or value of one token
// The k largest of each of `count` rows of `width` floats, largest first: (count, k) values and their places; and the
// log of the sum of each row's exponentials, every value multiplied by `warmth` before, unless `totals` is null.
void outpace_top(const float* rows, int64_t count, int64_t width, int64_t stride, int k, float* values, int32_t* ids,
                 float warmth, float* totals);
// `entering`: how rows begin; `normed`: whether states are kept behind the final norm. The models must outlive it.
outpace_branches* outpace_branches_create(outpace_model*, const outpace_model* words, int entering, int normed);
void outpace_branches_destroy(outpace_branches*);
// Commit the next rows of `count` sequences, `tokens` of all of them end to end, and read the last of each. These are rows
// 0 to count - 1 for what grows; what grew before is forgotten.
int outpace_branches_begin(outpace_branches*, const outpace_root*, int count, const int32_t* tokens, const outpace_reading*);
// Run a level, those of one sequence beside one another: row i holds tokens[i] and follows row after[i]. They are counted on.
int outpace_branches_grow(outpace_branches*, int rows, const int32_t* after, const int32_t* tokens, const outpace_reading*);
// As outpace_branches_begin, and grow a tree by plans[i] from sequence i, level by level, until all are complete.
int outpace_branches_draft(outpace_branches*, const outpace_root*, int count, const int32_t* tokens, const outpace_tree_plan* plans, outpace_drafts*);
// Copy `count` rows of `width` floats.
void outpace_copy_rows(const float* const* from, float* const* to, int count, int width);
int64_t outpace_bytes(const outpace_model*);    // of packed weights
double outpace_read_rate(int threads, int64_t bytes);
double outpace_product_rate(int threads, int kind);
const char* outpace_features();                 // instruction sets that are used here

}
