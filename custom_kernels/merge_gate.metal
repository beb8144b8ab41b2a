// The attention's splits become one, times the head's gate. A threadgroup of SIMDS simdgroups for each head of each
// token; a simdgroup adds up splits of its own, a lane D / 32 neighbouring dimensions of them.
constexpr uint N = D / 32;
const uint lane = thread_index_in_simdgroup;
const uint simd = simdgroup_index_in_threadgroup;
const uint head = threadgroup_position_in_grid.y;
const size_t token = threadgroup_position_in_grid.z;
const uint L = parts_shape[2];
const uint splits = parts_shape[3];
const size_t first = ((token / L * H + head) * L + token % L) * splits;

// Lane j knows the weights of splits j and j + 32, which are all there can be.
float best[2], weight[2];
float total = 0.0f;
for (uint i = 0; i < 2; ++i) best[i] = lane + 32 * i < splits ? stats[2 * (first + lane + 32 * i)] : -1e30f;
const float most = simd_max(metal::max(best[0], best[1]));
for (uint i = 0; i < 2; ++i) {
  const bool used = lane + 32 * i < splits;
  weight[i] = used ? metal::fast::exp2(best[i] - most) : 0.0f;
  if (used) total += weight[i] * stats[2 * (first + lane + 32 * i) + 1];
}
total = simd_sum(total);

float sums[N];
for (uint i = 0; i < N; ++i) sums[i] = 0.0f;
for (uint j = simd; j < splits; j += SIMDS) {
  const float low = simd_shuffle(weight[0], j % 32);
  const float high = simd_shuffle(weight[1], j % 32);
  const float w = j < 32 ? low : high;
  float x[N];
  load<N>(parts + (first + j) * D + lane * N, x);
  for (uint i = 0; i < N; ++i) sums[i] += w * x[i];
}
threadgroup float all_sums[SIMDS][D];
for (uint i = 0; i < N; ++i) all_sums[simd][lane * N + i] = sums[i];
threadgroup_barrier(mem_flags::mem_threadgroup);

const float gate = gate_of(float(scores[token * H + head]), SILU);
#ifdef TURBO
// One simdgroup turns the whole row back.
if (simd == 0) {
  for (uint i = 0; i < N; ++i) {
    sums[i] = 0.0f;
    for (uint j = 0; j < SIMDS; ++j) sums[i] += all_sums[j][lane * N + i];
  }
  hadamard<N>(lane, sums);
  for (uint i = 0; i < N; ++i) {
    const uint d = lane * N + i;
    out[(token * H + head) * D + d] = T(sums[i] * sign_of(d) / total * gate);
  }
}
#else
for (uint d = thread_index_in_threadgroup; d < D; d += 32 * SIMDS) {
  float sum = 0.0f;
  for (uint j = 0; j < SIMDS; ++j) sum += all_sums[j][d];
  out[(token * H + head) * D + d] = T(sum / total * gate);
}
#endif
