// y = W x for one token; a simdgroup takes ROWS rows and 1 / KSPLIT of the columns.
//   NORM   x = norm_weight * residual * rsqrt(mean(residual^2) + EPS), prepared by the threadgroup together
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
#ifdef GEGLU
constexpr uint MATRICES = 2;
#else
constexpr uint MATRICES = 1;
#endif
constexpr uint PER_GROUP = SIMDS / KSPLIT * ROWS;
constexpr uint SEGMENT = K / KSPLIT;
constexpr uint STEPS = (SEGMENT + 32 * V - 1) / (32 * V);
// Groups of rows; a threadgroup takes TURNS of them.
constexpr uint GROUPS = (N + PER_GROUP - 1) / PER_GROUP;
#ifdef GATES
constexpr uint ALL_GROUPS = GROUPS + (H + PER_GROUP - 1) / PER_GROUP;
#else
constexpr uint ALL_GROUPS = GROUPS;
#endif
const uint lane = thread_index_in_simdgroup;
const uint simd = simdgroup_index_in_threadgroup;
const uint part = simd % KSPLIT;
threadgroup float parts[SIMDS][MATRICES][ROWS];
#ifdef NORM
// Value i of a lane's V in a step at [step][i][lane]: what the lanes read at once lies side by side.
threadgroup float normed[STEPS * V * 32];
threadgroup float squares[SIMDS];
float factor = 1.0f;
// A thread's share of the norm is asked for before the weights, behind which it would wait.
constexpr uint PIECES = (K + 128 * SIMDS - 1) / (128 * SIMDS);
float h[PIECES][4], scale[PIECES][4];
for (uint p = 0; p < PIECES; ++p) {
  const uint i = 4 * (thread_index_in_threadgroup + 32 * SIMDS * p);
  if (i < K) {
    load<4>(residual + i, h[p]);
    load<4>(norm_weight + i, scale[p]);
  }
}
#endif

for (uint turn = 0; turn < TURNS; ++turn) {
  const uint group = turn * threadgroups_per_grid.x + threadgroup_position_in_grid.x;
  if (group >= ALL_GROUPS) break;
  const bool gates = group >= GROUPS;
  const uint first_row = (gates ? group - GROUPS : group) * PER_GROUP + simd / KSPLIT * ROWS;
#ifdef CODES
  const device uint32_t* matrix = weight;
  const uint rows = N;
#elif defined(GATES)
  const device T* matrix = gates ? gate_weight : weight;
  const uint rows = gates ? H : N;
#else
  const device T* matrix = weight;
  const uint rows = N;
#endif
  float sums[MATRICES][ROWS];
  for (uint m = 0; m < MATRICES; ++m) {
    for (uint r = 0; r < ROWS; ++r) sums[m][r] = 0.0f;
  }

  for (uint base = 0; base < STEPS; base += AHEAD) {
    // The weights of AHEAD steps are on their way before the first is needed.
    uint words[AHEAD][MATRICES][ROWS][WORDS];
#ifdef CODES
    float code_scale[AHEAD][MATRICES][ROWS], code_bias[AHEAD][MATRICES][ROWS];
#endif
    for (uint a = 0; a < AHEAD; ++a) {
      const uint from = ((base + a) * 32 + lane) * V;
      if (from >= SEGMENT) continue;
#ifdef CODES
      if (gates) continue;
#endif
      for (uint r = 0; r < ROWS; ++r) {
        const size_t element = size_t(metal::min(first_row + r, rows - 1)) * K + part * SEGMENT + from;
        load_words<WORDS>((const device uint*)matrix + element / V * WORDS, words[a][0][r]);
#ifdef GEGLU
        load_words<WORDS>((const device uint*)up_weight + element / V * WORDS, words[a][1][r]);
#endif
#ifdef CODES
        code_scale[a][0][r] = float(scales[element / GROUP]);
        code_bias[a][0][r] = float(biases[element / GROUP]);
#ifdef GEGLU
        code_scale[a][1][r] = float(up_scales[element / GROUP]);
        code_bias[a][1][r] = float(up_biases[element / GROUP]);
#endif
#endif
      }
    }

#ifdef NORM
    if (base == 0 && turn == 0) {
      float sum = 0.0f;
      for (uint p = 0; p < PIECES; ++p) {
        const uint i = 4 * (thread_index_in_threadgroup + 32 * SIMDS * p);
        if (i >= K) break;
        for (uint j = 0; j < 4; ++j) {
          const uint within = (i + j) % (32 * V);
          sum += h[p][j] * h[p][j];
          normed[(i + j) / (32 * V) * (32 * V) + within % V * 32 + within / V] = h[p][j] * scale[p][j];
        }
      }
      sum = simd_sum(sum);
      if (lane == 0) squares[simd] = sum;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      sum = 0.0f;
      for (uint j = 0; j < SIMDS; ++j) sum += squares[j];
      factor = metal::precise::rsqrt(sum / float(K) + EPS);
    }
#endif

    for (uint a = 0; a < AHEAD; ++a) {
      const uint from = ((base + a) * 32 + lane) * V;
      if (from >= SEGMENT) continue;
      const uint k = part * SEGMENT + from;
      float x[V];
#ifdef NORM
      for (uint i = 0; i < V; ++i) x[i] = normed[((base + a) * V + i) * 32 + lane];
#else
      load<V>(input + k, x);
#endif
#ifdef CODES
      float x_sum = 0.0f;
      for (uint i = 0; i < V; ++i) x_sum += x[i];
#endif
      for (uint r = 0; r < ROWS; ++r) {
#ifdef CODES
#ifdef GATES
        if (gates) {
          float w[V];
          load<V>(gate_weight + size_t(metal::min(first_row + r, uint(H) - 1)) * K + k, w);
          for (uint i = 0; i < V; ++i) sums[0][r] += w[i] * x[i];
          continue;
        }
#endif
        const float codes = (dot_words<BITS, V>(matrix, words[a][0][r], x) - x_sum) * CODE_SCALE;
        sums[0][r] += code_scale[a][0][r] * codes + code_bias[a][0][r] * x_sum;
#ifdef GEGLU
        const float up_codes = (dot_words<BITS, V>(up_weight, words[a][1][r], x) - x_sum) * CODE_SCALE;
        sums[1][r] += code_scale[a][1][r] * up_codes + code_bias[a][1][r] * x_sum;
#endif
#else
        sums[0][r] += dot_words<BITS, V>(matrix, words[a][0][r], x);
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

  if (KSPLIT > 1) {
    // The parts of the group before are read by now.
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (lane == 0) {
      for (uint m = 0; m < MATRICES; ++m) {
        for (uint r = 0; r < ROWS; ++r) parts[simd][m][r] = sums[m][r];
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (part != 0) continue;
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
}
