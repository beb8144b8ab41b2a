// Cache rows in MLX's affine format: codes of BITS bits, low bits first, with a scale and a bias for GROUP values.

// A lane's share of a row of 32 N values. Lanes that share a word all hold it.
template <int N, int BITS, int GROUP>
struct Share {
  uint words[N * BITS >= 32 ? N * BITS / 32 : 1];
  float scale;
  float bias;
};

template <int N, int BITS, int GROUP, class P>
METAL_FUNC void fetch(const device uint* codes, P scales, P biases, size_t row, uint lane,
                      thread Share<N, BITS, GROUP>& share) {
  load_words<(N * BITS >= 32 ? N * BITS / 32 : 1)>(codes + row * (N * BITS) + lane * N * BITS / 32, share.words);
  const size_t group = row * (32 * N / GROUP) + lane * N / GROUP;
  share.scale = float(scales[group]);
  share.bias = float(biases[group]);
}

// A code is put at bit AT of a mantissa, where it reads as 1 + code / 2^(23 - AT): no conversion from integer. A code
// of 8 bits goes to a byte of its own, which some GPUs do at once, and the bias is rounded by 2^-9 of a step.
template <int N, int BITS, int GROUP, class P>
METAL_FUNC void decode(const device uint*, P, P, uint lane, const thread Share<N, BITS, GROUP>& share,
                       thread float* x) {
  constexpr uint AT = BITS == 8 ? 8 : 23 - BITS;
  const float scale = share.scale * float(1u << (23 - AT));
  const float bias = share.bias - scale;
  for (int i = 0; i < N; ++i) {
    const int at = i * BITS % 32;
    const uint word = N * BITS < 32 ? share.words[0] >> (lane * N * BITS % 32) : share.words[i * BITS / 32];
    x[i] = as_type<float>(metal::insert_bits(0x3f800000u, word >> at, AT, uint(BITS))) * scale + bias;
  }
}

// Quantises a row as mx.quantize does, each lane its values x; they become what the codes stand for. Only where
// `write` says so does the row go to the cache.
template <int N, int BITS, int GROUP, class T>
METAL_FUNC void quantise(device uint* codes, device T* scales, device T* biases, size_t row, uint lane, bool write,
                         thread Share<N, BITS, GROUP>& share, thread float* x) {
  constexpr float MOST = (1u << BITS) - 1u;
  constexpr uint WORDS = N * BITS >= 32 ? N * BITS / 32 : 1;
  float low = x[0], high = x[0];
  for (int i = 1; i < N; ++i) {
    low = metal::min(low, x[i]);
    high = metal::max(high, x[i]);
  }
  for (uint mask = 1; mask < GROUP / N; mask *= 2) {
    low = metal::min(low, simd_shuffle_xor(low, mask));
    high = metal::max(high, simd_shuffle_xor(high, mask));
  }
  // The edge of larger magnitude is met exactly, and so is zero.
  const bool from_low = metal::abs(low) > metal::abs(high);
  float scale = metal::max((high - low) / MOST, 1e-7f);
  if (!from_low) scale = -scale;
  const float edge = from_low ? low : high;
  const float steps = metal::rint(edge / scale);
  if (steps != 0.0f) scale = edge / steps;
  const float bias = steps != 0.0f ? edge : 0.0f;
  const uint shift = lane * N * BITS % 32;
  for (uint w = 0; w < WORDS; ++w) share.words[w] = 0;
  for (int i = 0; i < N; ++i) {
    const float code = metal::min(metal::max(metal::rint((x[i] - bias) / scale), 0.0f), MOST);
    share.words[i * BITS / 32] |= uint(code) << (i * BITS % 32 + shift);
  }
  // Lanes that share a word put their codes together.
  for (uint mask = 1; mask * N * BITS < 32; mask *= 2) share.words[0] |= simd_shuffle_xor(share.words[0], mask);
  const size_t group = row * (32 * N / GROUP) + lane * N / GROUP;
  if (write && lane * N % GROUP == 0) {
    scales[group] = T(scale);
    biases[group] = T(bias);
  }
  if (write && shift == 0) {
    for (uint w = 0; w < WORDS; ++w) codes[row * (N * BITS) + lane * N * BITS / 32 + w] = share.words[w];
  }
  share.scale = float(T(scale));
  share.bias = float(T(bias));
  decode(codes, scales, biases, lane, share, x);
}

// N words of codes as products of matrices take them: as they are stored.
template <int N>
METAL_FUNC void spread(const thread uint* stored, thread uint* words) {
  for (int i = 0; i < N; ++i) words[i] = stored[i];
}
