// Cache rows in the format of turbo.py: rotated, R x = H diag(signs) x / sqrt(D), with one scale and for each value
// one of 16 levels, which lie about a Gaussian's. Code 8 s + t is level t of sign s.

// The levels as bytes: a row's values are its scale times byte - MIDDLE, and sign 1 has the bytes' complement.
constant constexpr uint LOW_LEVELS = 0xab9e9285u;
constant constexpr uint HIGH_LEVELS = 0xffe0cbbau;
constant constexpr float MIDDLE = 127.5f;

// For each of four codes in a word's lower half, the byte of low and high that it tells, or that byte's complement.
METAL_FUNC uint look_up(uint codes, uint low, uint high) {
  uint bytes = 0;
  for (uint i = 0; i < 4; ++i) {
    const uint t = (codes >> (4 * i)) & 7u;
    const uint byte = ((t < 4 ? low : high) >> (t % 4 * 8)) & 0xffu;
    bytes |= ((codes >> (4 * i + 3)) & 1u ? 255u - byte : byte) << (8 * i);
  }
  return bytes;
}

METAL_FUNC uint levels_of(uint codes) { return look_up(codes, LOW_LEVELS, HIGH_LEVELS); }

// N words of bytes for stored codes.
template <int N>
METAL_FUNC void spread(const thread uint* stored, thread uint* words) {
  for (int i = 0; i < N; ++i) words[i] = levels_of(stored[i / 2] >> (i % 2 * 16));
}

METAL_FUNC float sign_of(uint d) {
  uint hash = d * 0x9e3779b1u;
  hash = (hash ^ (hash >> 15)) * 0x85ebca77u;
  return hash >> 31 ? -1.0f : 1.0f;
}

// H x / sqrt(32 N) for a row that a simdgroup holds, bit by bit of the index; N is a power of two.
template <int N>
METAL_FUNC void hadamard(uint lane, thread float* x) {
  for (int bit = 1; bit < N; bit *= 2) {
    for (int i = 0; i < N; ++i) {
      if (i & bit) continue;
      const float a = x[i], b = x[i + bit];
      x[i] = a + b;
      x[i + bit] = a - b;
    }
  }
  const float scale = metal::precise::rsqrt(float(32 * N));
  for (int i = 0; i < N; ++i) {
    float y = x[i];
    for (uint mask = 1; mask < 32; mask *= 2) {
      const float other = simd_shuffle_xor(y, mask);
      y = lane & mask ? other - y : y + other;
    }
    x[i] = y * scale;
  }
}

// Stores a rotated row, each lane its neighbouring values x, which become what the codes stand for. The scale keeps the
// row's norm. Only where `write` says so does the row go to the cache.
template <int N, class T>
METAL_FUNC void store_levels(device uint* codes, device T* scales, size_t row, uint lane, bool write, thread float* x) {
  float squares = 0.0f;
  for (int i = 0; i < N; ++i) squares += x[i] * x[i];
  squares = simd_sum(squares);
  // A Gaussian's deviation is STEPS of the bytes' steps.
  constexpr float STEPS = 46.65885f;
  const float steps = squares > 0.0f ? STEPS * metal::precise::rsqrt(squares / float(32 * N)) : 0.0f;
  uint word = 0;
  float found = 0.0f;
  for (int i = 0; i < N; ++i) {
    const float size = metal::abs(x[i]) * steps;
    uint t = 0;
    for (uint next = 0; next < 7; ++next) {
      // Midway between two levels.
      const uint both = (next < 3 ? LOW_LEVELS >> (8 * next) : next == 3 ? (LOW_LEVELS >> 24) | (HIGH_LEVELS << 8)
                                                                         : HIGH_LEVELS >> (8 * (next - 4)));
      t += size > 0.5f * float((both & 0xffu) + ((both >> 8) & 0xffu)) - MIDDLE ? 1u : 0u;
    }
    const uint code = t + (x[i] < 0.0f ? 8u : 0u);
    word |= code << (4 * i);
    x[i] = float(levels_of(code) & 0xffu) - MIDDLE;
    found += x[i] * x[i];
  }
  const float scale = float(T(metal::precise::sqrt(squares / simd_sum(found))));
  for (int i = 0; i < N; ++i) x[i] *= scale;
  // Lanes that share a word put their codes together.
  const uint shift = lane * N * 4 % 32;
  word <<= shift;
  for (uint mask = 1; mask * N * 4 < 32; mask *= 2) word |= simd_shuffle_xor(word, mask);
  if (write && lane == 0) scales[row] = T(scale);
  if (write && shift == 0) codes[row * (N * 4) + lane * N / 8] = word;
}
