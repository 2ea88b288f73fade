// Pillow's weights of an antialiased resize: what an output pixel takes from which sources of its
// axis.
//
// Sums and products are those of Pillow's C code, in double precision and in its order; the weights
// are rounded to whole numbers of 22 bits.
#pragma once

enum Filter { NEAREST = 0, BILINEAR = 1, BICUBIC = 2, LANCZOS = 3 };

constexpr int PRECISION = 22;

typedef unsigned char Byte;

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

__device__ Axis axis_of(int filter, int size, double start, double step) {
  Axis axis;
  axis.size = size;
  axis.start = start;
  axis.scale = step;
  const double stretch = axis.scale < 1.0 ? 1.0 : axis.scale;
  axis.narrow = 1.0 / stretch;
  axis.support = (filter == LANCZOS ? 3.0 : filter == BICUBIC ? 2.0 : 1.0) * stretch;
  axis.most = filter == NEAREST ? 1 : static_cast<int>(ceil(axis.support)) * 2 + 1;
  return axis;
}

__device__ __forceinline__ double tap_value(int filter, const Axis& axis, double centre,
                                            int source) {
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
__device__ __forceinline__ void set_weight(int filter, const Axis& axis, const Taps& taps,
                                           int source, Weights* weights) {
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
