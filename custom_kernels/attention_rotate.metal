// The queries are rotated, a simdgroup each, and where split 0 attends to the new keys up to this token, so are they:
// in rows of `rotated`. Softmax is in base 2, and what the queries or scores are scaled with has log2(e) in it.
threadgroup float rotated[GT + TOKENS][D];
const float scale = 1.4426950408889634f * metal::precise::rsqrt(float(D));
for (uint r = simd; r < GT + (split == 0 ? l + 1 : 0); r += SIMDS) {
  const bool is_key = r >= GT;
  const size_t token = size_t(b) * L + (is_key ? r - GT : l);
  const device T* row = qkv + token * WIDTH + (is_key ? H + kv_head : tile * GT + r) * D;
  for (uint d = lane; d < D; d += 32) {
    float x = float(row[d]);
    if (d < R) {
      const bool low = d < R / 2;
      const size_t entry = token * (R / 2) + (low ? d : d - R / 2);
      const float turned = float(row[low ? d + R / 2 : d - R / 2]) * sines[entry];
      x = x * cosines[entry] + (low ? -turned : turned);
    }
    rotated[r][d] = float(T(x));
  }
#ifdef TURBO
  float x[N];
  for (uint i = 0; i < N; ++i) x[i] = rotated[r][lane + 32 * i] * sign_of(lane + 32 * i);
  hadamard<N>(lane, x);
  for (uint i = 0; i < N; ++i) rotated[r][lane + 32 * i] = x[i];
#endif
}
threadgroup_barrier(mem_flags::mem_threadgroup);
