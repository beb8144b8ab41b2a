// y = W x for one token; a simdgroup takes ROWS rows and 1 / KSPLIT of the columns.
//   NORM   x = norm_weight * residual * rsqrt(mean(residual^2) + eps); the sum of squares is taken along the way
//          and its factor applied to the result
//   GATES  rows from N on are those of g_proj, which are never quantised
//   GEGLU  y = GELU(W x) * (W_up x)
//   ADD    y = residual + W x, fp32
constexpr uint V = BITS == 16 ? 8 : 16;
constexpr uint PER_GROUP = SIMDS / KSPLIT;
constexpr uint SEGMENT = K / KSPLIT;
constexpr uint STEPS = (SEGMENT + 32 * V - 1) / (32 * V);
const uint lane = thread_index_in_simdgroup;
const uint simd = simdgroup_index_in_threadgroup;
const uint part = simd % KSPLIT;
const uint first_row = (threadgroup_position_in_grid.x * PER_GROUP + simd / KSPLIT) * ROWS;

float sums[ROWS];
for (uint r = 0; r < ROWS; ++r) sums[r] = 0.0f;
#ifdef GEGLU
float up_sums[ROWS];
for (uint r = 0; r < ROWS; ++r) up_sums[r] = 0.0f;
#endif
#ifdef NORM
float squares = 0.0f;
#endif

#pragma unroll
for (uint step = 0; step < STEPS; ++step) {
  const uint from = (step * 32 + lane) * V;
  if (SEGMENT % (32 * V) != 0 && from >= SEGMENT) break;
  const uint k = part * SEGMENT + from;
  float x[V];
#ifdef NORM
  float scale[V];
  load<V>(residual + k, x);
  load<V>(norm_weight + k, scale);
  for (uint i = 0; i < V; ++i) {
    squares += x[i] * x[i];
    x[i] *= scale[i];
  }
#else
  load<V>(input + k, x);
#endif
  float x_sum = 0.0f;
  if (BITS != 16) {
    for (uint i = 0; i < V; ++i) x_sum += x[i];
  }
  for (uint r = 0; r < ROWS; ++r) {
    const size_t row = metal::min(first_row + r, uint(N) - 1);
#ifdef GATES
    if (first_row + r >= N) {
      const size_t gate_row = metal::min(first_row + r - N, uint(H) - 1);
      sums[r] += dot_row<16, V>(gate_weight, gate_row * K + k, x);
      continue;
    }
#endif
    const size_t at = row * K + k;
    float dot = dot_row<BITS, V>(weight, at, x);
    if (BITS != 16) dot = float(scales[at / GROUP]) * dot + float(biases[at / GROUP]) * x_sum;
    sums[r] += dot;
#ifdef GEGLU
    dot = dot_row<BITS, V>(up_weight, at, x);
    if (BITS != 16) dot = float(up_scales[at / GROUP]) * dot + float(up_biases[at / GROUP]) * x_sum;
    up_sums[r] += dot;
#endif
  }
}

float factor = 1.0f;
#ifdef NORM
factor = metal::precise::rsqrt(simd_sum(squares) / float(K) + eps);
#endif
for (uint r = 0; r < ROWS; ++r) sums[r] = simd_sum(sums[r]) * factor;
#ifdef GEGLU
for (uint r = 0; r < ROWS; ++r) up_sums[r] = simd_sum(up_sums[r]) * factor;
#endif

threadgroup float shared_sums[SIMDS][ROWS];
if (KSPLIT > 1) {
  if (lane == 0) {
    for (uint r = 0; r < ROWS; ++r) shared_sums[simd][r] = sums[r];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (part != 0) return;
  for (uint r = 0; r < ROWS; ++r) {
    for (uint j = 1; j < KSPLIT; ++j) sums[r] += shared_sums[simd + j][r];
  }
}

// Every lane holds all sums: lane r writes row r.
for (uint r = 0; r < ROWS; ++r) {
  const uint row = first_row + r;
  if (lane != r) continue;
#ifdef GATES
  if (row >= N && row < N + H) scores[row - N] = T(sums[r]);
#endif
  if (row >= N) continue;
#if defined(GEGLU)
  y[row] = T(gelu(sums[r]) * up_sums[r]);
#elif defined(ADD)
  y[row] = residual[row] + sums[r];
#else
  y[row] = T(sums[r]);
#endif
}
