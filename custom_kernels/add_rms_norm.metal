// h = residual + delta; x = weight * h * rsqrt(mean(h^2) + EPS). One threadgroup of THREADS threads a row.
constexpr uint PER_THREAD = (H + THREADS - 1) / THREADS;
const uint thread_index = thread_index_in_threadgroup;
const size_t row = size_t(threadgroup_position_in_grid.x) * H;

float values[PER_THREAD];
float squares = 0.0f;
for (uint j = 0; j < PER_THREAD; ++j) {
  const uint i = j * THREADS + thread_index;
  values[j] = 0.0f;
  if (i < H) {
    values[j] = residual[row + i];
    if (HAS_DELTA) values[j] += float(delta[row + i]);
    h[row + i] = values[j];
  }
  squares += values[j] * values[j];
}

threadgroup float partial[THREADS / 32];
squares = simd_sum(squares);
if (thread_index_in_simdgroup == 0) partial[simdgroup_index_in_threadgroup] = squares;
threadgroup_barrier(mem_flags::mem_threadgroup);
float total = 0.0f;
for (uint j = 0; j < THREADS / 32; ++j) total += partial[j];
const float scale = metal::precise::rsqrt(total / float(H) + EPS);

for (uint j = 0; j < PER_THREAD; ++j) {
  const uint i = j * THREADS + thread_index;
  if (i < H) x[row + i] = T(float(weight[i]) * (values[j] * scale));
}
