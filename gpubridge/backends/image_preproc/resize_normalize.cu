// Crop, resize, normalise, lay out and cast a batch of 8-bit RGB images: one launch for all of them.
//
// The arithmetic is that of Pillow's Image.resize(box=...) for 8-bit images, in integers: first across,
// then down, weights of 22 bits, rounded to 8 bits after each. So the levels are Pillow's, not only near
// them. Images that Pillow resizes down first come `transposed`: rows and columns have changed places in
// all that is said of them. (Compile with --fmad=false: weights come from sums in double precision.) What a level
// becomes in the output is looked up in a table that the host has made.
//
// A block makes a tile of TILE_WIDTH x TILE_HEIGHT outputs of one image. It walks down the rows of the
// source that the tile needs, STEP_ROWS at a time, and along them, STEP_PIXELS at a time:
//   load    12 bytes (4 pixels) per thread become three words, one per channel
//   across  a warp takes a column of the tile, its lanes one row each: weights are the same for all
//           lanes, and no two read the same bank; one dot product is 4 pixels of one channel
//   down    a warp takes a row of the tile, its lanes one column each
// A weight has 23 bits and a sign, a dot product takes bytes: each is split into three.

enum Filter { NEAREST = 0, BILINEAR = 1, BICUBIC = 2, LANCZOS = 3 };

constexpr int PRECISION = 22;
constexpr int TILE_WIDTH = 32;
constexpr int TILE_HEIGHT = 16;
constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int COLUMNS_OF_WARP = TILE_WIDTH / WARPS;
constexpr int ROWS_OF_WARP = TILE_HEIGHT / WARPS;
constexpr int STEP_ROWS = 32;
constexpr int STEP_ROW_QUADS = STEP_ROWS / 4;
constexpr int QUADS = 24;
constexpr int STEP_PIXELS = 4 * QUADS;
// Odd, so that 32 lanes with a row each find 32 banks.
constexpr int ROW_WORDS = 3 * QUADS + 1;
constexpr int COLUMN_WORDS = STEP_ROW_QUADS + 1;

typedef unsigned char Byte;
typedef unsigned long long Address;

// The host has the same layout: gpubridge/backends/image_preproc/fused_kernel.py.
struct Image {
  Address origin;       // of the first pixel of the upright image
  Address first;        // only bytes from here on may be read,
  Address end;          // and only those before this
  Address target;       // where the output goes
  long long dx;         // bytes from a pixel to its right neighbour in the upright image,
  long long dy;         // and to the one below it
  int width;            // of the upright image
  int height;
  float left;           // the part of it that is resized
  float top;
  float extent_x;
  float extent_y;
  int target_left;      // the part of the output that it is resized to; the rest is padding
  int target_top;
  int target_width;
  int target_height;
  int transposed;
  int unused;
};

// Bytes of the weights of 4 neighbours: weight = low + 256 * middle + 65536 * high (signed).
struct __align__(16) Weights {
  unsigned low;
  unsigned middle;
  unsigned high;
  unsigned unused;
};

// What an output pixel takes from its axis: sources [first, last), weighed around the centre.
struct Taps {
  double centre;
  double total;
  int first;
  int last;
};

// One axis of an image, as Pillow sees it.
struct Axis {
  double start;
  double scale;
  double narrow;  // what the filter's argument is multiplied by, when many sources become one
  double support;
  int size;
  int most;  // sources of an output at most
};

#ifdef __CUDACC__
// Bytes of pixels have no sign, those of weights have one: no intrinsic mixes the two.
__device__ __forceinline__ int dot_signed(unsigned pixels, unsigned weights, int sum) {
  int result;
  asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(result) : "r"(pixels), "r"(weights), "r"(sum));
  return result;
}
#endif

__device__ __forceinline__ double sinc(double x) {
  if (x == 0.0) return 1.0;
  x = x * 3.14159265358979323846;
  return sin(x) / x;
}

__device__ __forceinline__ double filter_value(int filter, double x) {
  if (filter == LANCZOS) return x >= -3.0 && x < 3.0 ? sinc(x) * sinc(x / 3) : 0.0;
  x = fabs(x);
  if (filter == BILINEAR) return x < 1.0 ? 1.0 - x : 0.0;
  const double a = -0.5;
  if (x < 1.0) return ((a + 2.0) * x - (a + 3.0)) * x * x + 1;
  return x < 2.0 ? (((x - 5) * x + 8) * x - 4) * a : 0.0;
}

__device__ Axis axis_of(int filter, int size, float start, float extent, int target) {
  Axis axis;
  axis.size = size;
  axis.start = start;
  axis.scale = static_cast<double>(extent) / target;
  const double stretch = axis.scale < 1.0 ? 1.0 : axis.scale;
  axis.narrow = 1.0 / stretch;
  axis.support = (filter == LANCZOS ? 3.0 : filter == BICUBIC ? 2.0 : 1.0) * stretch;
  axis.most = filter == NEAREST ? 1 : static_cast<int>(ceil(axis.support)) * 2 + 1;
  return axis;
}

__device__ __forceinline__ double tap_value(int filter, const Axis& axis, double centre, int source) {
  if (filter == NEAREST) return 1.0;
  return filter_value(filter, (source - centre + 0.5) * axis.narrow);
}

__device__ Taps taps_of(int filter, const Axis& axis, int index) {
  Taps taps;
  taps.total = 1.0;
  if (filter == NEAREST) {
    // Pillow adds step by step, with the rounding of each.
    double position = axis.start + axis.scale * 0.5;
#pragma unroll 1
    for (int step = 0; step < index; ++step) position += axis.scale;
    taps.centre = 0.0;
    taps.first = position < 0.0 ? 0 : static_cast<int>(position);
    taps.last = position < 0.0 || taps.first >= axis.size ? taps.first : taps.first + 1;
    return taps;
  }
  taps.centre = axis.start + (index + 0.5) * axis.scale;
  taps.first = static_cast<int>(taps.centre - axis.support + 0.5);
  if (taps.first < 0) taps.first = 0;
  taps.last = static_cast<int>(taps.centre + axis.support + 0.5);
  if (taps.last > axis.size) taps.last = axis.size;
  double total = 0.0;
#pragma unroll 1
  for (int source = taps.first; source < taps.last; ++source)
    total += tap_value(filter, axis, taps.centre, source);
  taps.total = total == 0.0 ? 1.0 : total;
  return taps;
}

// Write the weight of one source into its byte of three words; nothing for a source that is no tap.
__device__ __forceinline__ void set_weight(int filter, const Axis& axis, const Taps& taps, int source,
                                           Weights* weights) {
  int weight = 0;
  if (source >= taps.first && source < taps.last) {
    const double value =
        tap_value(filter, axis, taps.centre, source) / taps.total * (1 << PRECISION);
    weight = static_cast<int>(value < 0.0 ? value - 0.5 : value + 0.5);
  }
  const unsigned bits = static_cast<unsigned>(weight);
  reinterpret_cast<Byte*>(&weights->low)[source % 4] = static_cast<Byte>(bits);
  reinterpret_cast<Byte*>(&weights->middle)[source % 4] = static_cast<Byte>(bits >> 8);
  reinterpret_cast<Byte*>(&weights->high)[source % 4] = static_cast<Byte>(bits >> 16);
}

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

// Fill `source` with the pixels from (column, row) on, as far as they are needed; zero below the image.
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
  if (nbytes == 4) reinterpret_cast<unsigned*>(target)[index] = value;
  else if (nbytes == 2) reinterpret_cast<unsigned short*>(target)[index] = static_cast<unsigned short>(value);
  else reinterpret_cast<Byte*>(target)[index] = static_cast<Byte>(value);
}

// Grid: tiles, images. `values` has 3 x 256 words: what each level of each channel
// becomes, in the low `value_bytes` of each. `padding` is 0xBBGGRR.
extern "C" __global__ void __launch_bounds__(THREADS, 4)
    resize_normalize(const Image* images, const unsigned* values, int width, int height, int filter,
                     int channels_last, int value_bytes, unsigned padding) {
  __shared__ unsigned source[STEP_ROWS * ROW_WORDS];
  __shared__ unsigned resized[3 * TILE_WIDTH * COLUMN_WORDS];  // across only, columns of 4-row words
  __shared__ Weights across[TILE_WIDTH * QUADS];
  __shared__ Weights down[TILE_HEIGHT * QUADS];
  __shared__ Taps taps[TILE_WIDTH + TILE_HEIGHT];
  __shared__ Run runs[TILE_WIDTH + TILE_HEIGHT];
  __shared__ unsigned table[3 * 256];
  // What the loops seldom look at: in registers it would cost blocks that could run beside this one.
  __shared__ Image image;
  __shared__ Axis axes[2];

  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  if (thread == 0) {
    image = images[blockIdx.y];
    axes[0] = axis_of(filter, image.width, image.left, image.extent_x, image.target_width);
    axes[1] = axis_of(filter, image.height, image.top, image.extent_y, image.target_height);
  }
  for (int i = thread; i < 3 * 256; i += THREADS) table[i] = values[i];
  __syncthreads();
  const Axis &axis_x = axes[0], &axis_y = axes[1];
  const int outputs_x = image.transposed ? height : width;
  const int outputs_y = image.transposed ? width : height;
  const int tiles_x = (outputs_x + TILE_WIDTH - 1) / TILE_WIDTH;
  // The tile, in the coordinates of the resized image; what lies outside of that is padding.
  const int tile_x = static_cast<int>(blockIdx.x) % tiles_x * TILE_WIDTH - image.target_left;
  const int tile_y = static_cast<int>(blockIdx.x) / tiles_x * TILE_HEIGHT - image.target_top;
  const int begin_x = larger(tile_x, 0), end_x = smaller(tile_x + TILE_WIDTH, image.target_width);
  const int begin_y = larger(tile_y, 0), end_y = smaller(tile_y + TILE_HEIGHT, image.target_height);
  const bool any = begin_x < end_x && begin_y < end_y;
  if (any && thread < TILE_WIDTH) {
    if (tile_x + thread >= begin_x && tile_x + thread < end_x)
      taps[thread] = taps_of(filter, axis_x, tile_x + thread);
  } else if (any && thread < TILE_WIDTH + TILE_HEIGHT) {
    const int index = tile_y + thread - TILE_WIDTH;
    if (index >= begin_y && index < end_y) taps[thread] = taps_of(filter, axis_y, index);
  }
  __syncthreads();

  int sums[ROWS_OF_WARP][3];
#pragma unroll
  for (int k = 0; k < ROWS_OF_WARP; ++k)
    sums[k][0] = sums[k][1] = sums[k][2] = 1 << (PRECISION - 1);

  const Taps* taps_x = taps;
  const Taps* taps_y = taps + TILE_WIDTH;
  Run* runs_x = runs;
  Run* runs_y = runs + TILE_WIDTH;
  const Run none = {0, 0, 0, 0};
  const bool whole_x = quads_of(axis_x) <= QUADS, whole_y = quads_of(axis_y) <= QUADS;
  const int row_begin = any ? taps_y[begin_y - tile_y].first & ~3 : 0;
  const int row_end = any ? taps_y[end_y - 1 - tile_y].last : 0;
  const int column_begin = any ? taps_x[begin_x - tile_x].first & ~3 : 0;
  // At least one step, even for outputs that find no source: the barriers below are in the loop.
  const int column_end = any ? larger(taps_x[end_x - 1 - tile_x].last, column_begin + 1) : 0;

  for (int row = row_begin; row < row_end; row += STEP_ROWS) {
    if (row == row_begin || !whole_y) {
      const int room = 4 * (whole_y ? quads_of(axis_y) : STEP_ROW_QUADS);
#pragma unroll 1
      for (int i = thread; i < TILE_HEIGHT * room; i += THREADS) {
        const int index = i / room, place = i % room;
        if (tile_y + index < begin_y || tile_y + index >= end_y) continue;
        const int base = whole_y ? taps_y[index].first & ~3 : row;
        set_weight(filter, axis_y, taps_y[index], base + place, down + index * QUADS + place / 4);
      }
    }
    if (thread < TILE_HEIGHT) {
      const bool inside = tile_y + thread >= begin_y && tile_y + thread < end_y;
      runs_y[thread] = inside ? run_of(taps_y[thread], row, STEP_ROW_QUADS, thread, whole_y) : none;
    }
    int row_sums[COLUMNS_OF_WARP][3];
#pragma unroll
    for (int k = 0; k < COLUMNS_OF_WARP; ++k)
      row_sums[k][0] = row_sums[k][1] = row_sums[k][2] = 1 << (PRECISION - 1);

    for (int column = column_begin; column < column_end; column += STEP_PIXELS) {
      if ((row == row_begin && column == column_begin) || !whole_x) {
        const int room = 4 * (whole_x ? quads_of(axis_x) : QUADS);
#pragma unroll 1
        for (int i = thread; i < TILE_WIDTH * room; i += THREADS) {
          const int index = i / room, place = i % room;
          if (tile_x + index < begin_x || tile_x + index >= end_x) continue;
          const int base = whole_x ? taps_x[index].first & ~3 : column;
          set_weight(filter, axis_x, taps_x[index], base + place, across + index * QUADS + place / 4);
        }
      }
      if (thread < TILE_WIDTH) {
        const bool inside = tile_x + thread >= begin_x && tile_x + thread < end_x;
        runs_x[thread] = inside ? run_of(taps_x[thread], column, QUADS, thread, whole_x) : none;
      }
      load_step(image, column, column_end, row, source);
      __syncthreads();
#pragma unroll
      for (int k = 0; k < COLUMNS_OF_WARP; ++k) {
        const Run run = runs_x[warp * COLUMNS_OF_WARP + k];
        add_run(run.count, across + run.weights, source + lane * ROW_WORDS + run.quad, QUADS,
                row_sums[k]);
      }
      __syncthreads();
    }
#pragma unroll
    for (int k = 0; k < COLUMNS_OF_WARP; ++k) {
      const int index = warp * COLUMNS_OF_WARP + k;
      for (int c = 0; c < 3; ++c)
        reinterpret_cast<Byte*>(resized + (c * TILE_WIDTH + index) * COLUMN_WORDS)[lane] =
            static_cast<Byte>(level(row_sums[k][c]));
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < ROWS_OF_WARP; ++k) {
      const Run run = runs_y[warp * ROWS_OF_WARP + k];
      add_run(run.count, down + run.weights, resized + lane * COLUMN_WORDS + run.quad,
              TILE_WIDTH * COLUMN_WORDS, sums[k]);
    }
    __syncthreads();
  }

  const int x = tile_x + image.target_left + lane;
  if (x >= outputs_x) return;
#pragma unroll
  for (int k = 0; k < ROWS_OF_WARP; ++k) {
    const int index = warp * ROWS_OF_WARP + k, y = tile_y + image.target_top + index;
    if (y >= outputs_y) continue;
    const bool inside = tile_x + lane >= begin_x && tile_x + lane < end_x &&
                        tile_y + index >= begin_y && tile_y + index < end_y;
    const long long pixel =
        image.transposed ? static_cast<long long>(x) * width + y : static_cast<long long>(y) * width + x;
    const long long plane = static_cast<long long>(width) * height;
#pragma unroll
    for (int c = 0; c < 3; ++c) {
      const unsigned value = table[c * 256 + (inside ? level(sums[k][c]) : byte_of(padding, c))];
      store(image.target, channels_last ? pixel * 3 + c : c * plane + pixel, value, value_bytes);
    }
  }
}
