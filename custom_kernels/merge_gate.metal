// The attention's splits become one, times the head's gate. A threadgroup of D threads for each head of each token.
const uint d = thread_index_in_threadgroup;
const uint head = threadgroup_position_in_grid.y;
const size_t token = threadgroup_position_in_grid.z;
const size_t L = parts_shape[2];
const size_t splits = parts_shape[3];
const size_t first = ((token / L * H + head) * L + token % L) * splits;

float most = stats[2 * first];
for (size_t j = 1; j < splits; ++j) most = metal::max(most, stats[2 * (first + j)]);
float total = 0.0f;
float sum = 0.0f;
for (size_t j = 0; j < splits; ++j) {
  const float weight = metal::fast::exp2(stats[2 * (first + j)] - most);
  total += weight * stats[2 * (first + j) + 1];
  sum += weight * parts[(first + j) * D + d];
}
const float score = float(scores[token * H + head]);
float gate = 1.0f / (1.0f + metal::precise::exp(-score));
if (SILU) gate = gate == 0.0f ? 0.0f : score * gate;
out[(token * H + head) * D + d] = T(sum / total * gate);
