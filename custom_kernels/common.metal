// Vector loads that widen to fp32.

// x[0..N) = p[0..N) in fp32, in loads as wide as the alignment of p allows: p is a multiple of N elements from
// the start of its buffer.
template <int N>
METAL_FUNC void load(const device float* p, thread float* x) {
  if (N % 4 == 0) {
    for (int i = 0; i < N / 4; ++i) {
      const float4 u = ((const device float4*)p)[i];
      x[4 * i] = u.x;
      x[4 * i + 1] = u.y;
      x[4 * i + 2] = u.z;
      x[4 * i + 3] = u.w;
    }
  } else {
    for (int i = 0; i < N; ++i) x[i] = p[i];
  }
}

METAL_FUNC float low_bfloat(uint u) { return as_type<float>(u << 16); }
METAL_FUNC float high_bfloat(uint u) { return as_type<float>(u & 0xffff0000u); }

METAL_FUNC float low_half(uint u) { return float(as_type<half>(ushort(u & 0xffffu))); }
METAL_FUNC float high_half(uint u) { return float(as_type<half>(ushort(u >> 16))); }

template <int N>
METAL_FUNC void load(const device bfloat16_t* p, thread float* x) {
  if (N % 8 == 0) {
    for (int i = 0; i < N / 8; ++i) {
      const uint4 u = ((const device uint4*)p)[i];
      x[8 * i] = low_bfloat(u.x);
      x[8 * i + 1] = high_bfloat(u.x);
      x[8 * i + 2] = low_bfloat(u.y);
      x[8 * i + 3] = high_bfloat(u.y);
      x[8 * i + 4] = low_bfloat(u.z);
      x[8 * i + 5] = high_bfloat(u.z);
      x[8 * i + 6] = low_bfloat(u.w);
      x[8 * i + 7] = high_bfloat(u.w);
    }
  } else if (N % 2 == 0) {
    for (int i = 0; i < N / 2; ++i) {
      const uint u = ((const device uint*)p)[i];
      x[2 * i] = low_bfloat(u);
      x[2 * i + 1] = high_bfloat(u);
    }
  } else {
    for (int i = 0; i < N; ++i) x[i] = float(p[i]);
  }
}

template <int N>
METAL_FUNC void load(const device float16_t* p, thread float* x) {
  if (N % 8 == 0) {
    for (int i = 0; i < N / 8; ++i) {
      const uint4 u = ((const device uint4*)p)[i];
      x[8 * i] = low_half(u.x);
      x[8 * i + 1] = high_half(u.x);
      x[8 * i + 2] = low_half(u.y);
      x[8 * i + 3] = high_half(u.y);
      x[8 * i + 4] = low_half(u.z);
      x[8 * i + 5] = high_half(u.z);
      x[8 * i + 6] = low_half(u.w);
      x[8 * i + 7] = high_half(u.w);
    }
  } else if (N % 2 == 0) {
    for (int i = 0; i < N / 2; ++i) {
      const uint u = ((const device uint*)p)[i];
      x[2 * i] = low_half(u);
      x[2 * i + 1] = high_half(u);
    }
  } else {
    for (int i = 0; i < N; ++i) x[i] = float(p[i]);
  }
}
