// out[b, l, head, :] = x[b, head, l, :] * a(score), a = sigmoid or a(s) = s sigmoid(s). A threadgroup of D threads
// for each head of each token.
const uint d = thread_index_in_threadgroup;
const uint head = threadgroup_position_in_grid.y;
const size_t token = threadgroup_position_in_grid.z;
#ifdef DOT
threadgroup float partial[D / 32];
float sum = 0.0f;
for (uint i = d; i < K; i += D) sum += float(hidden[token * K + i]) * float(weight[head * K + i]);
sum = simd_sum(sum);
if (thread_index_in_simdgroup == 0) partial[simdgroup_index_in_threadgroup] = sum;
threadgroup_barrier(mem_flags::mem_threadgroup);
float score = HAS_BIAS ? float(bias[head]) : 0.0f;
for (uint j = 0; j < D / 32; ++j) score += partial[j];
#else
const float score = float(scores[token * H + head]);
#endif

const size_t L = x_shape[2];
const size_t from = ((token / L * H + head) * L + token % L) * D + d;
out[(token * H + head) * D + d] = T(float(x[from]) * gate_of(score, SILU));
