// The simdgroups' parts become one: maxima and sums of all heads first, then the outputs head by head, which
// PUT_OUTPUT(head, factor) puts into a simdgroup's row of `all_o`.
threadgroup_barrier(mem_flags::mem_threadgroup);
// Unrolled, so that the outputs are in registers.
#pragma unroll
for (uint h = 0; h < GT; ++h) {
  // Lane j looks at simdgroup j.
  const float best = lane < SIMDS ? all_best[h][lane] : -1e30f;
  const float most = simd_max(best);
  const float sum_of_weights = simd_sum(lane < SIMDS ? all_total[h][lane] * metal::fast::exp2(best - most) : 0.0f);
  const float shrink = metal::fast::exp2(all_best[h][simd] - most);
  PUT_OUTPUT(h, shrink)
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint head = tile * GT + h;
#ifdef FINAL
  const float gate = gate_of(float(scores[(size_t(b) * L + l) * H + head]), SILU);
#else
  const size_t to = ((size_t(b) * H + head) * L + l) * splits + split;
  if (thread_index_in_threadgroup == 0) {
    stats[2 * to] = most;
    stats[2 * to + 1] = sum_of_weights;
  }
#endif
  for (uint d = thread_index_in_threadgroup; d < D / PARTS; d += SIMDS * 32) {
    float sum = 0.0f;
    for (uint j = 0; j < SIMDS; ++j) sum += all_o[j][d];
#ifdef FINAL
    out[((size_t(b) * L + l) * H + head) * D + part * (D / PARTS) + d] = T(sum / sum_of_weights * gate);
#else
    parts[to * D + d] = sum;
#endif
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
#undef PUT_OUTPUT
#undef ROW
