// Whether tiles may be used here, each thread's setting of them, and the model of the instructions.

#include "tiles.h"

#include <cstdlib>
#include <initializer_list>
#if defined(OUTPACE_TILES)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(OUTPACE_EMULATED_TILES)
#include <cfloat>
#include <cstdio>
#endif

namespace outpace {
namespace tiles {

namespace {

bool switched_off() {
    const char* set = std::getenv("OUTPACE_TILES");
    return set && std::strcmp(set, "0") == 0;
}

#if defined(OUTPACE_EMULATED_TILES)

bool granted() { return true; }

#elif defined(OUTPACE_TILES)

bool bit(unsigned word, int at) { return word >> at & 1; }

// The system switches the registers only for processes that ask. The permission covers all threads.
bool granted() {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !bit(c, 27)) return false;  // XGETBV may be used
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !bit(d, 22) || !bit(d, 24)) return false;  // bf16, tiles
    if (!__get_cpuid_count(0x1d, 1, &a, &b, &c, &d)) return false;
    if ((b & 0xffff) < ROW_BYTES || b >> 16 < 8 || (c & 0xffff) < ROWS) return false;
    unsigned low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, CONFIGURATION = 17, DATA = 18;
    if (!bit(low, CONFIGURATION) || !bit(low, DATA)) return false;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, DATA) == 0;
}

#else

bool granted() { return false; }

#endif

thread_local int shaped = 0;  // rows and width of this thread's setting, 0 without one

}  // namespace

bool usable() {
    static const bool answer = !switched_off() && granted();
    return answer;
}

TILE_CODE void shape(int rows, int width) {
    const int wanted = rows << 8 | width;
    if (shaped == wanted) return;
    Shapes shapes;
    for (int tile = 0; tile < 8; ++tile) {
        shapes.rows[tile] = uint8_t(tile < WEIGHTS ? rows : width / 4);
        shapes.row_bytes[tile] = uint16_t(tile >= INPUTS && tile < WEIGHTS ? width : ROW_BYTES);
    }
    load_shapes(shapes);
    shaped = wanted;
}

TILE_CODE void release() {
    if (!shaped) return;
    release_all();
    shaped = 0;
}

#if defined(OUTPACE_EMULATED_TILES)

namespace {

thread_local struct {
    bool configured = false;
    Shapes shapes;
    uint8_t data[8][ROWS][ROW_BYTES];
} state;

void require(bool allowed, const char* what) {
    if (allowed) return;
    std::fprintf(stderr, "emulated tiles: the processor would refuse this: %s\n", what);
    std::abort();
}

int rows(int tile) { return state.shapes.rows[tile]; }
int row_bytes(int tile) { return state.shapes.row_bytes[tile]; }

void require_tile(int tile) {
    require(state.configured, "no configuration");
    require(tile >= 0 && tile < 8 && rows(tile) > 0, "a tile that is not configured");
}

void require_product(int c, int a, int b) {
    for (int tile : {c, a, b}) require_tile(tile);
    require(c != a && c != b && a != b, "a product of a tile with itself");
    require(rows(c) == rows(a) && row_bytes(c) == row_bytes(b) && row_bytes(a) / 4 == rows(b), "sizes that do not fit");
    require(row_bytes(a) % 4 == 0 && row_bytes(b) % 4 == 0, "rows that are not of whole groups");
}

// Groups of inputs that products leave out: a fault, for the test that wrong kernels are noticed when a model is loaded.
int missing() {
    static const bool faulty = std::getenv("OUTPACE_FAULTY_TILES") != nullptr;
    return faulty;
}

void clear_behind(int tile) {
    for (int m = 0; m < ROWS; ++m) {
        const int kept = m < rows(tile) ? row_bytes(tile) : 0;
        std::memset(state.data[tile][m] + kept, 0, ROW_BYTES - kept);
    }
}

// Denormal numbers as zero, of operands and results.
vf flushed(vf v) {
    vf size = max(v, -v);
    return select(size < FLT_MIN, (vf)((vu)v & 0x80000000u), v);
}

// As FMA instructions compute it, on processors without them too.
vf fused(vf a, vf b, vf c) {
#if defined(__AVX512F__) || defined(__FMA__)
    return fma(a, b, c);
#else
    float sums[LANES];
    for (int i = 0; i < LANES; ++i) sums[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return outpace::load(sums);
#endif
}

}  // namespace

void load_shapes(const Shapes& shapes) {
    require(shapes.palette == 1 && shapes.start_row == 0, "an unknown palette");
    for (uint8_t byte : shapes.reserved) require(byte == 0, "a reserved byte");
    for (int tile = 0; tile < 16; ++tile) {
        require(shapes.rows[tile] <= ROWS && shapes.row_bytes[tile] <= ROW_BYTES, "a tile that is too large");
        require((shapes.rows[tile] == 0) == (shapes.row_bytes[tile] == 0), "half a size");
        require(tile < 8 || shapes.rows[tile] == 0, "a tile that does not exist");
    }
    state.shapes = shapes;
    state.configured = true;
    std::memset(state.data, 0, sizeof state.data);
}

void release_all() { state.configured = false; }

void zero(int tile) {
    require_tile(tile);
    std::memset(state.data[tile], 0, sizeof state.data[tile]);
}

void load(int tile, const void* from, size_t stride) {
    require_tile(tile);
    for (int m = 0; m < rows(tile); ++m)
        std::memcpy(state.data[tile][m], (const uint8_t*)from + m * stride, row_bytes(tile));
    clear_behind(tile);
}

void store(int tile, void* to, size_t stride) {
    require_tile(tile);
    for (int m = 0; m < rows(tile); ++m) std::memcpy((uint8_t*)to + m * stride, state.data[tile][m], row_bytes(tile));
}

// Even and odd inputs are summed apart, each by fused multiplications and additions; then both sums are added to C.
void dot_bf16(int c, int a, int b) {
    require_product(c, a, b);
    const int groups = rows(b) - missing();
    for (int m = 0; m < rows(c); ++m) {
        vf even = {}, odd = {};
        for (int k = 0; k < groups; ++k) {
            bf16 pair[2];
            std::memcpy(pair, state.data[a][m] + 4 * k, 4);
            const vu w = load_as<vu>(state.data[b][k]);
            even = flushed(fused(flushed(splat(widen(pair[0]))), flushed((vf)(w << 16)), even));
            odd = flushed(fused(flushed(splat(widen(pair[1]))), flushed((vf)(w & 0xffff0000u)), odd));
        }
        vf sums = flushed(load_as<vf>(state.data[c][m]));
        sums = flushed(sums + flushed(even + odd));
        store_as(state.data[c][m], sums);
    }
    clear_behind(c);
}

#endif

}  // namespace tiles
}  // namespace outpace
