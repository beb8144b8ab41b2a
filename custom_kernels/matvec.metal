// Dot products of one lane's share of a weight row with V values x, for the weight formats of MLX.

// Unsigned integers below 2^23 to fp32 without a conversion instruction.
METAL_FUNC float small_uint(uint u) { return as_type<float>(0x4b000000u | u) - 8388608.0f; }

// A plain row; `at` is the first element.
template <int BITS, int V, typename T>
METAL_FUNC float dot_row(const device T* weight, size_t at, const thread float* x) {
  float w[V];
  load<V>(weight + at, w);
  float sum = 0.0f;
  for (int i = 0; i < V; ++i) sum += w[i] * x[i];
  return sum;
}

// A row of codes of BITS bits, low bits first. An element is scale * code + bias, so that its dot product is
// scale * (codes . x) + bias * sum(x), of which this is codes . x.
template <int BITS, int V>
METAL_FUNC float dot_row(const device uint32_t* weight, size_t at, const thread float* x) {
  const device uint32_t* codes = weight + at * BITS / 32;
  constexpr int PER_WORD = 32 / BITS;
  constexpr uint MASK = (1u << BITS) - 1u;
  uint words[V / PER_WORD];
  if (BITS == 8) {
    const uint4 u = *(const device uint4*)codes;
    words[0] = u.x;
    words[1] = u.y;
    words[V / PER_WORD - 2] = u.z;
    words[V / PER_WORD - 1] = u.w;
  } else {
    const uint2 u = *(const device uint2*)codes;
    words[0] = u.x;
    words[1] = u.y;
  }
  float sum = 0.0f;
  for (int j = 0; j < V / PER_WORD; ++j) {
    for (int i = 0; i < PER_WORD; ++i) {
      sum += small_uint((words[j] >> (BITS * i)) & MASK) * x[PER_WORD * j + i];
    }
  }
  return sum;
}
