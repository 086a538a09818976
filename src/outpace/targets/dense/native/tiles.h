// Matrix tiles (Intel AMX): eight registers of sixteen rows of 64 bytes, and products of one with another.
//
// A thin layer over the instructions: on x86-64 they are always compiled in, and whether they are used is decided when
// the program runs. With OUTPACE_EMULATED_TILES a plain C++ model of them takes their place, on any processor.
//
// C (rows, 16) += A (rows, width) * B (width, 16) in bfloat16, the inputs of B interleaved in pairs as weights are packed. Every row of C is computed by itself, in an order that the instruction fixes.
#pragma once

#include "simd.h"

#if defined(OUTPACE_EMULATED_TILES)
#define TILE_CODE
#elif defined(__x86_64__) && defined(__linux__) && __has_include(<amxtileintrin.h>)
#define OUTPACE_TILES 1
#if defined(__clang__)
#define TILE_CODE __attribute__((target("amx-tile,amx-bf16")))
#else
#define TILE_CODE  // g++ takes the instructions in assembly anywhere
#endif
#else
#define TILE_CODE
#endif

namespace outpace {
namespace tiles {

constexpr int ROWS = 16, ROW_BYTES = 64;

// How the registers are used: C in 0 to 3, A in 4 and 5, B in 6 and 7.
constexpr int SUMS = 0, INPUTS = 4, WEIGHTS = 6;

// Whether this process may use tiles: the processor and the system have them and grant them, and OUTPACE_TILES is not 0.
// The answer never changes, for it decides the order of bfloat16's sums.
bool usable();

// What LDTILECFG reads.
struct alignas(64) Shapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};
static_assert(sizeof(Shapes) == 64, "as the processor reads it");

#if defined(OUTPACE_EMULATED_TILES)

// The instructions' definitions in Intel's manual. They end the process where the processor would raise an exception.
void load_shapes(const Shapes& shapes);
void release_all();
void zero(int tile);
void load(int tile, const void* from, size_t stride);
void store(int tile, void* to, size_t stride);
void dot_bf16(int c, int a, int b);

template <int T> INLINE void zero() { zero(T); }
template <int T> INLINE void load(const void* from, size_t stride) { load(T, from, stride); }
template <int T> INLINE void store(void* to, size_t stride) { store(T, to, stride); }
template <int C, int A, int B> INLINE void dot_bf16() { dot_bf16(C, A, B); }

#elif defined(OUTPACE_TILES)

INLINE TILE_CODE void load_shapes(const Shapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
INLINE TILE_CODE void release_all() { asm volatile("tilerelease"); }
template <int T> INLINE TILE_CODE void zero() { asm volatile("tilezero %%tmm%c0" ::"i"(T)); }
template <int T> INLINE TILE_CODE void load(const void* from, size_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T> INLINE TILE_CODE void store(void* to, size_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}
template <int C, int A, int B> INLINE TILE_CODE void dot_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

#else  // never reached: usable() is false

INLINE void load_shapes(const Shapes&) {}
INLINE void release_all() {}
template <int T> INLINE void zero() {}
template <int T> INLINE void load(const void*, size_t) {}
template <int T> INLINE void store(void*, size_t) {}
template <int C, int A, int B> INLINE void dot_bf16() {}

#endif

// Set this thread's registers up for `rows` of A, `width` bytes each. Until they are released nothing is done again.
void shape(int rows, int width);

// Give this thread's registers back: a processor with tiles in use runs slower and saves more state.
void release();

}  // namespace tiles
}  // namespace outpace
