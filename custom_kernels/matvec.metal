// The dot product of one lane's share of a weight row, in the formats of MLX and as it is in memory, with V values x.

// Plain rows; the pointer only tells the dtype.
template <int BITS, int V>
METAL_FUNC float dot_words(const device float*, const thread uint* words, const thread float* x) {
  float sum = 0.0f;
  for (int i = 0; i < V; ++i) sum += as_type<float>(words[i]) * x[i];
  return sum;
}

template <int BITS, int V>
METAL_FUNC float dot_words(const device bfloat16_t*, const thread uint* words, const thread float* x) {
  float sum = 0.0f;
  for (int i = 0; i < V / 2; ++i) sum += low_bfloat(words[i]) * x[2 * i] + high_bfloat(words[i]) * x[2 * i + 1];
  return sum;
}

template <int BITS, int V>
METAL_FUNC float dot_words(const device float16_t*, const thread uint* words, const thread float* x) {
  float sum = 0.0f;
  for (int i = 0; i < V / 2; ++i) sum += low_half(words[i]) * x[2 * i] + high_half(words[i]) * x[2 * i + 1];
  return sum;
}

// A row of codes of BITS bits, low bits first. A code is put at the top of a mantissa, where it reads as
// 1 + code / 2^BITS: this is x summed plus codes . x / 2^BITS, with no conversion from integer.
template <int BITS, int V>
METAL_FUNC float dot_words(const device uint32_t*, const thread uint* words, const thread float* x) {
  constexpr int PER_WORD = 32 / BITS;
  constexpr int TOP = 23 - BITS;
  constexpr uint MASK = ((1u << BITS) - 1u) << TOP;
  float sum = 0.0f;
  for (int j = 0; j < V / PER_WORD; ++j) {
    for (int i = 0; i < PER_WORD; ++i) {
      const uint code = BITS * i < TOP ? words[j] << (TOP - BITS * i) : words[j] >> (BITS * i - TOP);
      sum += as_type<float>(0x3f800000u | (code & MASK)) * x[PER_WORD * j + i];
    }
  }
  return sum;
}
