// y = W x for one token; a simdgroup takes ROWS rows and 1 / KSPLIT of the columns.
//   NORM   x = norm_weight * residual * rsqrt(mean(residual^2) + eps), prepared by the threadgroup together
//   GATES  the last threadgroups take the rows of g_proj, which are never quantised
//   GEGLU  y = GELU(W x) * (W_up x)
//   ADD    y = residual + W x, fp32
//   CODES  W is quantised: codes of BITS bits, with a scale and a bias for GROUP columns
#ifdef CODES
constexpr uint V = 16;
constexpr uint WORDS = V * BITS / 32;
constexpr float CODE_SCALE = 1u << BITS;
#else
constexpr uint V = 8;
constexpr uint WORDS = V * sizeof(T) / 4;
#endif
constexpr uint PER_GROUP = SIMDS / KSPLIT * ROWS;
constexpr uint SEGMENT = K / KSPLIT;
constexpr uint STEPS = (SEGMENT + 32 * V - 1) / (32 * V);
const uint lane = thread_index_in_simdgroup;
const uint simd = simdgroup_index_in_threadgroup;
const uint part = simd % KSPLIT;
uint first_row = threadgroup_position_in_grid.x * PER_GROUP + simd / KSPLIT * ROWS;

#ifdef GEGLU
constexpr uint MATRICES = 2;
#else
constexpr uint MATRICES = 1;
#endif
#ifdef GATES
constexpr uint GROUPS = (N + PER_GROUP - 1) / PER_GROUP;
const bool gates = threadgroup_position_in_grid.x >= GROUPS;
if (gates) first_row -= GROUPS * PER_GROUP;
#else
const bool gates = false;
#endif
#ifdef NORM
threadgroup float normed[K];
threadgroup float squares[SIMDS];
float factor = 1.0f;
#endif

float sums[MATRICES][ROWS];
for (uint m = 0; m < MATRICES; ++m) {
  for (uint r = 0; r < ROWS; ++r) sums[m][r] = 0.0f;
}

for (uint base = 0; base < STEPS; base += AHEAD) {
  // The weights of AHEAD steps are on their way before the first is needed.
  uint words[AHEAD][MATRICES][ROWS][WORDS];
  for (uint a = 0; a < AHEAD; ++a) {
    const uint from = ((base + a) * 32 + lane) * V;
    if (from >= SEGMENT || gates) continue;
    for (uint r = 0; r < ROWS; ++r) {
      const size_t row = metal::min(first_row + r, uint(N) - 1);
      const size_t at = (row * K + part * SEGMENT + from) / V * WORDS;
      load_words<WORDS>((const device uint*)weight + at, words[a][0][r]);
#ifdef GEGLU
      load_words<WORDS>((const device uint*)up_weight + at, words[a][1][r]);
#endif
    }
  }

#ifdef NORM
  if (base == 0) {
    float sum = 0.0f;
    for (uint i = 4 * thread_index_in_threadgroup; i < K; i += 128 * SIMDS) {
      float h[4], scale[4];
      load<4>(residual + i, h);
      load<4>(norm_weight + i, scale);
      for (uint j = 0; j < 4; ++j) {
        sum += h[j] * h[j];
        normed[i + j] = h[j] * scale[j];
      }
    }
    sum = simd_sum(sum);
    if (lane == 0) squares[simd] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    sum = 0.0f;
    for (uint j = 0; j < SIMDS; ++j) sum += squares[j];
    factor = metal::precise::rsqrt(sum / float(K) + eps);
  }
#endif

  for (uint a = 0; a < AHEAD; ++a) {
    const uint from = ((base + a) * 32 + lane) * V;
    if (from >= SEGMENT) continue;
    const uint k = part * SEGMENT + from;
    float x[V];
#ifdef NORM
    for (uint i = 0; i < V; ++i) x[i] = normed[k + i];
#else
    load<V>(input + k, x);
#endif
#ifdef CODES
    float x_sum = 0.0f;
    for (uint i = 0; i < V; ++i) x_sum += x[i];
#endif
    for (uint r = 0; r < ROWS; ++r) {
#ifdef GATES
      if (gates) {
        float w[V];
        load<V>(gate_weight + size_t(metal::min(first_row + r, uint(H) - 1)) * K + k, w);
        for (uint i = 0; i < V; ++i) sums[0][r] += w[i] * x[i];
        continue;
      }
#endif
#ifdef CODES
      const size_t group = (size_t(metal::min(first_row + r, uint(N) - 1)) * K + k) / GROUP;
      const float codes = (dot_words<BITS, V>(weight, words[a][0][r], x) - x_sum) * CODE_SCALE;
      sums[0][r] += float(scales[group]) * codes + float(biases[group]) * x_sum;
#ifdef GEGLU
      const float up_codes = (dot_words<BITS, V>(up_weight, words[a][1][r], x) - x_sum) * CODE_SCALE;
      sums[1][r] += float(up_scales[group]) * up_codes + float(up_biases[group]) * x_sum;
#endif
#else
      sums[0][r] += dot_words<BITS, V>(weight, words[a][0][r], x);
#ifdef GEGLU
      sums[1][r] += dot_words<BITS, V>(up_weight, words[a][1][r], x);
#endif
#endif
    }
  }
}

for (uint m = 0; m < MATRICES; ++m) {
  for (uint r = 0; r < ROWS; ++r) {
    sums[m][r] = simd_sum(sums[m][r]);
#ifdef NORM
    sums[m][r] *= factor;
#endif
  }
}

// At the function's scope, where Metal wants threadgroup variables.
threadgroup float parts[SIMDS][MATRICES][ROWS];
if (KSPLIT > 1) {
  if (lane == 0) {
    for (uint m = 0; m < MATRICES; ++m) {
      for (uint r = 0; r < ROWS; ++r) parts[simd][m][r] = sums[m][r];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (part != 0) return;
  for (uint j = 1; j < KSPLIT; ++j) {
    for (uint m = 0; m < MATRICES; ++m) {
      for (uint r = 0; r < ROWS; ++r) sums[m][r] += parts[simd + j][m][r];
    }
  }
}

// Every lane holds all sums: lane r writes row r.
for (uint r = 0; r < ROWS; ++r) {
  const uint row = first_row + r;
  if (lane != r) continue;
#ifdef GATES
  if (gates) {
    if (row < H) scores[row] = T(sums[0][r]);
    continue;
  }
#endif
  if (row >= N) continue;
#if defined(GEGLU)
  y[row] = T(gelu(sums[0][r]) * sums[1][r]);
#elif defined(ADD)
  y[row] = residual[row] + sums[0][r];
#else
  y[row] = T(sums[0][r]);
#endif
}
