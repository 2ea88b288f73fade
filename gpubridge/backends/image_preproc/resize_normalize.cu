// Crop, resize, normalise, lay out and cast a batch of 8-bit RGB images: one launch for all of
// them.
//
// The arithmetic is that of Pillow's Image.resize(box=...) for 8-bit images, in integers: first
// across, then down, weights of 22 bits, rounded to 8 bits after each. So the levels are Pillow's,
// not only near them. Images that Pillow resizes down first come `transposed`: rows and columns
// have changed places in all that is said of them. (Compile with --fmad=false: weights come from
// sums in double precision.) What a level becomes in the output is looked up in a table that the
// host has made.
//
// A block makes a tile of TILE_WIDTH x TILE_HEIGHT outputs of one image. It walks down the rows of
// the source that the tile needs, STEP_ROWS at a time, and along them, STEP_PIXELS at a time:
//   load    12 bytes (4 pixels) per thread become three words, one per channel
//   across  a warp takes a column of the tile, its lanes one row each: weights are the same for all
//           lanes, and no two read the same bank; one dot product is 4 pixels of one channel
//   down    a warp takes a row of the tile, its lanes one column each
// A weight has 23 bits and a sign, a dot product takes bytes: each is split into three.

#include "resample_weights.cuh"

constexpr int TILE_WIDTH = 32;
constexpr int TILE_HEIGHT = 16;
constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int COLUMNS_OF_WARP = TILE_WIDTH / WARPS;
constexpr int ROWS_OF_WARP = TILE_HEIGHT / WARPS;
constexpr int STEP_ROWS = 32;
constexpr int STEP_ROW_QUADS = STEP_ROWS / 4;
// What a block holds of a row: the more, the fewer steps, and the fewer blocks that share a
// multiprocessor's memory (shared_quads in kernels.py).
#ifndef SHARED_QUADS
#define SHARED_QUADS 24
#endif
constexpr int QUADS = SHARED_QUADS;
static_assert(QUADS % 2 == 0 && QUADS >= STEP_ROW_QUADS,
              "an odd row of words; room for a step down");
constexpr int STEP_PIXELS = 4 * QUADS;
// Odd, so that 32 lanes with a row each find 32 banks.
constexpr int ROW_WORDS = 3 * QUADS + 1;
constexpr int COLUMN_WORDS = STEP_ROW_QUADS + 1;

typedef unsigned long long Address;

// The host has the same layout: gpubridge/backends/image_preproc/kernels.py.
struct Image {
  Address origin;  // of the first pixel of the part of the upright image that is resized
  Address first;   // only bytes from here on may be read,
  Address end;     // and only those before this
  Address target;  // where the output goes
  long long dx;    // bytes from a pixel to its right neighbour in the upright image,
  long long dy;    // and to the one below it
  double start_x;  // where the outputs begin in it, in its pixels,
  double start_y;
  double step_x;  // and how far it is from one to the next
  double step_y;
  int width;  // of the part of the upright image that is resized
  int height;
  int target_left;  // the part of the output that it is resized to; the rest is padding
  int target_top;
  int target_width;
  int target_height;
  int transposed;
  int unused;
};

#ifdef __CUDACC__
// Bytes of pixels have no sign, those of weights have one: no intrinsic mixes the two.
__device__ __forceinline__ int dot_signed(unsigned pixels, unsigned weights, int sum) {
  int result;
  asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(result) : "r"(pixels), "r"(weights), "r"(sum));
  return result;
}
#endif

// Whether all weights of an output fit into a row of QUADS; else they are made step by step.
__device__ __forceinline__ int quads_of(const Axis& axis) { return (axis.most + 6) / 4; }

__device__ __forceinline__ unsigned level(int sum) {
  const int value = sum >> PRECISION;
  return static_cast<unsigned>(value < 0 ? 0 : value > 255 ? 255 : value);
}

__device__ __forceinline__ unsigned byte_of(unsigned word, int index) {
  return word >> (8 * index) & 255u;
}

// Four pixels from any 12 bytes, by aligned words; `at` is where the first begins.
__device__ __forceinline__ void load_words(Address at, unsigned channel[3]) {
  const unsigned* words = reinterpret_cast<const unsigned*>(at & ~static_cast<Address>(3));
  const unsigned shift = static_cast<unsigned>(at & 3) * 8;
  const unsigned w0 = __ldg(words), w1 = __ldg(words + 1), w2 = __ldg(words + 2);
  const unsigned w3 = __ldg(words + 3);
  const unsigned a = __funnelshift_r(w0, w1, shift);  // R0 G0 B0 R1
  const unsigned b = __funnelshift_r(w1, w2, shift);  // G1 B1 R2 G2
  const unsigned c = __funnelshift_r(w2, w3, shift);  // B2 R3 G3 B3
  channel[0] = __byte_perm(__byte_perm(a, b, 0x0630), c, 0x5210);
  channel[1] = __byte_perm(__byte_perm(a, b, 0x0741), c, 0x6210);
  channel[2] = __byte_perm(__byte_perm(a, b, 0x0052), c, 0x7410);
}

// Four pixels of a row, pixel by pixel: at edges, and of turned or mirrored images.
__device__ void load_pixels(const Image& image, int x, int y, unsigned channel[3]) {
  channel[0] = channel[1] = channel[2] = 0;
  for (int j = 0; j < 4 && x + j < image.width; ++j) {
    const Byte* pixel =
        reinterpret_cast<const Byte*>(image.origin + (x + j) * image.dx + y * image.dy);
    for (int c = 0; c < 3; ++c) channel[c] |= static_cast<unsigned>(__ldg(pixel + c)) << (8 * j);
  }
}

// Fill `source` with the pixels from (column, row) on, as far as they are needed; zero below the
// image.
__device__ void load_step(const Image& image, int column, int column_end, int row,
                          unsigned* source) {
  const bool along_rows = image.dx == 3 || image.dx == -3;
  for (int slot = threadIdx.x; slot < STEP_ROWS * QUADS; slot += THREADS) {
    // Neighbouring lanes read neighbouring bytes, also where the image lies on its side.
    const int r = along_rows ? slot / QUADS : slot % STEP_ROWS;
    const int q = along_rows ? slot % QUADS : slot / STEP_ROWS;
    const int x = column + 4 * q, y = row + r;
    if (x >= column_end) continue;
    unsigned channel[3] = {0, 0, 0};
    if (y < image.height) {
      const Address at = image.origin + x * image.dx + y * image.dy;
      const Address aligned = at & ~static_cast<Address>(3);
      if (image.dx == 3 && x + 4 <= image.width && aligned >= image.first &&
          aligned + 16 <= image.end)
        load_words(at, channel);
      else
        load_pixels(image, x, y, channel);
    }
    for (int c = 0; c < 3; ++c) source[r * ROW_WORDS + c * QUADS + q] = channel[c];
  }
}

__device__ __forceinline__ int larger(int a, int b) { return a > b ? a : b; }
__device__ __forceinline__ int smaller(int a, int b) { return a < b ? a : b; }

// What an output takes from a step: so many quads, from these weights and these pixels on.
struct __align__(16) Run {
  int count;
  int weights;
  int quad;
  int unused;
};

// The run of an output in the `quads` that a step begins at source `begin` with.
__device__ __forceinline__ Run run_of(const Taps& taps, int begin, int quads, int row, bool whole) {
  const int from = larger(taps.first / 4, begin / 4);
  const int to = smaller((taps.last + 3) / 4, begin / 4 + quads);
  const int base = whole ? taps.first / 4 : begin / 4;
  return {larger(to - from, 0), row * QUADS + from - base, from - begin / 4, 0};
}

// Add a run: `words` are those of red, `gap` words before those of green.
__device__ __forceinline__ void add_run(int count, const Weights* weights, const unsigned* words,
                                        int gap, int sums[3]) {
  unsigned low[3], middle[3] = {0, 0, 0};
  int high[3] = {0, 0, 0};
#pragma unroll
  for (int c = 0; c < 3; ++c) low[c] = static_cast<unsigned>(sums[c]);
  // Few turns as a rule: unrolled, the code would not fit into the instruction cache.
#pragma unroll 1
  for (const Weights* end = weights + count; weights < end; ++weights, ++words) {
    const Weights weight = *weights;
#pragma unroll
    for (int c = 0; c < 3; ++c) {
      const unsigned pixels = words[c * gap];
      low[c] = __dp4a(pixels, weight.low, low[c]);
      middle[c] = __dp4a(pixels, weight.middle, middle[c]);
      high[c] = dot_signed(pixels, weight.high, high[c]);
    }
  }
#pragma unroll
  for (int c = 0; c < 3; ++c)
    sums[c] = static_cast<int>(low[c] + middle[c] * 256u + static_cast<unsigned>(high[c]) * 65536u);
}

__device__ __forceinline__ void store(Address target, long long index, unsigned value, int nbytes) {
  if (nbytes == 4)
    reinterpret_cast<unsigned*>(target)[index] = value;
  else if (nbytes == 2)
    reinterpret_cast<unsigned short*>(target)[index] = static_cast<unsigned short>(value);
  else
    reinterpret_cast<Byte*>(target)[index] = static_cast<Byte>(value);
}

// What the threads of a block share.
struct Shared {
  unsigned source[STEP_ROWS * ROW_WORDS];
  unsigned resized[3 * TILE_WIDTH * COLUMN_WORDS];  // across only, columns of 4-row words
  Weights across[TILE_WIDTH * QUADS];
  Weights down[TILE_HEIGHT * QUADS];
  Taps taps_x[TILE_WIDTH];
  Taps taps_y[TILE_HEIGHT];
  Run runs_x[TILE_WIDTH];
  Run runs_y[TILE_HEIGHT];
  // What the loops seldom look at: in registers it would cost blocks that could run beside this
  // one.
  Image image;
  Axis axis_x;
  Axis axis_y;
};

// The outputs of a tile along one axis, in the coordinates of the resized image: what is not in
// [begin, end) is padding.
struct Span {
  int at;
  int begin;
  int end;
};

__device__ __forceinline__ Span span_of(int at, int length, int target) {
  return {at, larger(at, 0), smaller(at + length, target)};
}

__device__ __forceinline__ bool has(const Span& span, int index) {
  return span.at + index >= span.begin && span.at + index < span.end;
}

// Make the weights of a tile's outputs along an axis: all, or those of a step that begins at
// `begin`.
__device__ __forceinline__ void make_weights(int filter, const Axis& axis, const Span& span,
                                             const Taps* taps, int outputs, int begin, int quads,
                                             bool whole, Weights* weights) {
  const int room = 4 * (whole ? quads_of(axis) : quads);
#pragma unroll 1
  for (int i = threadIdx.x; i < outputs * room; i += THREADS) {
    const int index = i / room, place = i % room;
    if (!has(span, index)) continue;
    const int base = whole ? taps[index].first & ~3 : begin;
    set_weight(filter, axis, taps[index], base + place, weights + index * QUADS + place / 4);
  }
}

// Find what each output takes from a step; nothing for padding.
__device__ __forceinline__ void find_runs(const Span& span, const Taps* taps, int outputs,
                                          int begin, int quads, bool whole, Run* runs) {
  const int index = threadIdx.x;
  if (index >= outputs) return;
  const Run none = {0, 0, 0, 0};
  runs[index] = has(span, index) ? run_of(taps[index], begin, quads, index, whole) : none;
}

// Resize STEP_ROWS rows of the source across, into `resized`.
__device__ __forceinline__ void resize_across(Shared& shared, int filter, const Span& span, int row,
                                              bool first) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const bool whole = quads_of(shared.axis_x) <= QUADS;
  const int begin = shared.taps_x[span.begin - span.at].first & ~3;
  // At least one step, even for outputs that find no source: there are barriers in it.
  const int end = larger(shared.taps_x[span.end - 1 - span.at].last, begin + 1);
  int sums[COLUMNS_OF_WARP][3];
#pragma unroll
  for (int k = 0; k < COLUMNS_OF_WARP; ++k)
    sums[k][0] = sums[k][1] = sums[k][2] = 1 << (PRECISION - 1);
  for (int column = begin; column < end; column += STEP_PIXELS) {
    if ((first && column == begin) || !whole)
      make_weights(filter, shared.axis_x, span, shared.taps_x, TILE_WIDTH, column, QUADS, whole,
                   shared.across);
    find_runs(span, shared.taps_x, TILE_WIDTH, column, QUADS, whole, shared.runs_x);
    load_step(shared.image, column, end, row, shared.source);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < COLUMNS_OF_WARP; ++k) {
      const Run run = shared.runs_x[warp * COLUMNS_OF_WARP + k];
      add_run(run.count, shared.across + run.weights, shared.source + lane * ROW_WORDS + run.quad,
              QUADS, sums[k]);
    }
    __syncthreads();
  }
#pragma unroll
  for (int k = 0; k < COLUMNS_OF_WARP; ++k)
    for (int c = 0; c < 3; ++c) {
      const int column = c * TILE_WIDTH + warp * COLUMNS_OF_WARP + k;
      reinterpret_cast<Byte*>(shared.resized + column * COLUMN_WORDS)[lane] =
          static_cast<Byte>(level(sums[k][c]));
    }
}

// Resize a tile into `sums`: a column per lane, ROWS_OF_WARP rows per warp.
__device__ __forceinline__ void resize_tile(Shared& shared, int filter, const Span& span_x,
                                            const Span& span_y, int sums[ROWS_OF_WARP][3]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const bool whole = quads_of(shared.axis_y) <= QUADS;
  const int begin = shared.taps_y[span_y.begin - span_y.at].first & ~3;
  const int end = shared.taps_y[span_y.end - 1 - span_y.at].last;
  for (int row = begin; row < end; row += STEP_ROWS) {
    if (row == begin || !whole)
      make_weights(filter, shared.axis_y, span_y, shared.taps_y, TILE_HEIGHT, row, STEP_ROW_QUADS,
                   whole, shared.down);
    find_runs(span_y, shared.taps_y, TILE_HEIGHT, row, STEP_ROW_QUADS, whole, shared.runs_y);
    resize_across(shared, filter, span_x, row, row == begin);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < ROWS_OF_WARP; ++k) {
      const Run run = shared.runs_y[warp * ROWS_OF_WARP + k];
      add_run(run.count, shared.down + run.weights, shared.resized + lane * COLUMN_WORDS + run.quad,
              TILE_WIDTH * COLUMN_WORDS, sums[k]);
    }
    __syncthreads();
  }
}

// Grid: tiles, images. `values` has 3 x 256 words: what each level of each channel becomes, in the
// low `value_bytes` of each. `padding` is 0xBBGGRR.
extern "C" __global__ void __launch_bounds__(THREADS, 4)
    resize_normalize(const Image* images, const unsigned* values, int width, int height, int filter,
                     int channels_last, int value_bytes, unsigned padding) {
  __shared__ Shared shared;
  const int thread = threadIdx.x;
  if (thread == 0) {
    const Image image = images[blockIdx.y];
    shared.image = image;
    shared.axis_x = axis_of(filter, image.width, image.start_x, image.step_x);
    shared.axis_y = axis_of(filter, image.height, image.start_y, image.step_y);
  }
  __syncthreads();

  const Image& image = shared.image;
  const int outputs_x = image.transposed ? height : width;
  const int outputs_y = image.transposed ? width : height;
  const int tiles_x = (outputs_x + TILE_WIDTH - 1) / TILE_WIDTH;
  const int tile_x = static_cast<int>(blockIdx.x) % tiles_x * TILE_WIDTH;
  const int tile_y = static_cast<int>(blockIdx.x) / tiles_x * TILE_HEIGHT;
  const Span span_x = span_of(tile_x - image.target_left, TILE_WIDTH, image.target_width);
  const Span span_y = span_of(tile_y - image.target_top, TILE_HEIGHT, image.target_height);
  int sums[ROWS_OF_WARP][3];
#pragma unroll
  for (int k = 0; k < ROWS_OF_WARP; ++k)
    sums[k][0] = sums[k][1] = sums[k][2] = 1 << (PRECISION - 1);
  if (span_x.begin < span_x.end && span_y.begin < span_y.end) {
    const int other = thread - TILE_WIDTH;
    if (thread < TILE_WIDTH && has(span_x, thread))
      shared.taps_x[thread] = taps_of(filter, shared.axis_x, span_x.at + thread);
    else if (other >= 0 && other < TILE_HEIGHT && has(span_y, other))
      shared.taps_y[other] = taps_of(filter, shared.axis_y, span_y.at + other);
    __syncthreads();
    resize_tile(shared, filter, span_x, span_y, sums);
  }

  const int lane = thread % 32, x = tile_x + lane;
  if (x >= outputs_x) return;
  const long long plane = static_cast<long long>(width) * height;
#pragma unroll
  for (int k = 0; k < ROWS_OF_WARP; ++k) {
    const int index = thread / 32 * ROWS_OF_WARP + k, y = tile_y + index;
    if (y >= outputs_y) continue;
    const bool inside = has(span_x, lane) && has(span_y, index);
    const long long pixel = image.transposed ? static_cast<long long>(x) * width + y
                                             : static_cast<long long>(y) * width + x;
#pragma unroll
    for (int c = 0; c < 3; ++c) {
      const unsigned value =
          __ldg(values + c * 256 + (inside ? level(sums[k][c]) : byte_of(padding, c)));
      store(image.target, channels_last ? pixel * 3 + c : c * plane + pixel, value, value_bytes);
    }
  }
}
