// One part of the keys for one tile of query heads of one token, its online softmax, and the new keys and values,
// which are rotated here and go to their cache rows in place. Threadgroup (split, tile of GT heads, token); a
// simdgroup takes keys of its own, a lane D / 32 neighbouring dimensions.
constexpr uint N = D / 32;
constexpr uint UNROLL = 4;
constexpr uint TILES = H / GT;
constexpr uint WIDTH = (H + 2 * KV) * D;
const uint split = threadgroup_position_in_grid.x;
const uint splits = threadgroups_per_grid.x;
const uint tile = threadgroup_position_in_grid.y;
const uint L = qkv_shape[1];
const uint b = threadgroup_position_in_grid.z / L;
const uint l = threadgroup_position_in_grid.z % L;
const uint lane = thread_index_in_simdgroup;
const uint simd = simdgroup_index_in_threadgroup;
const uint kv_head = tile * GT / (H / KV);
const uint capacity = keys_shape[2];
const uint offset = uint(positions[b]);
const uint position = offset + l;
const uint d0 = lane * N;

// The dimension that each of this lane's dimensions is rotated with, and the sign of its sine.
uint partner[N];
float sign[N];
uint64_t turn[N];
for (uint i = 0; i < N; ++i) {
  const uint d = d0 + i;
  partner[i] = d < R / 2 ? d + R / 2 : (d < R ? d - R / 2 : d);
  sign[i] = d < R / 2 ? -1.0f : (d < R ? 1.0f : 0.0f);
  turn[i] = d < R ? turns[d < R / 2 ? d : d - R / 2] : 0;
}

float c[N], s[N], x[N];
for (uint i = 0; i < N; ++i) rope_cos_sin(turn[i], position, c[i], s[i]);

// Softmax in base 2: the scale and log2(e) go into the queries.
const float scale = 1.4426950408889634f * metal::precise::rsqrt(float(D));
float q[GT][N];
for (uint h = 0; h < GT; ++h) {
  const device T* row = qkv + (size_t(b) * L + l) * WIDTH + (tile * GT + h) * D;
  load<N>(row + d0, x);
  for (uint i = 0; i < N; ++i) {
    q[h][i] = scale * float(T(x[i] * c[i] + sign[i] * float(row[partner[i]]) * s[i]));
  }
}

float best[GT], total[GT], o[GT][N];
for (uint h = 0; h < GT; ++h) {
  // Finite, so that the first rescaling is exp2(-large) = 0 and not exp2(-inf + inf).
  best[h] = -1e30f;
  total[h] = 0.0f;
  for (uint i = 0; i < N; ++i) o[h][i] = 0.0f;
}

// Cached keys that this token sees: positions [first, offset), of which this split takes [begin, end).
const uint first = WINDOW > 0 && position + 1 > WINDOW ? position + 1 - WINDOW : 0;
const uint count = offset > first ? offset - first : 0;
const uint per_split = (count + splits - 1) / splits;
const uint begin = first + metal::min(split * per_split, count);
const uint end = first + metal::min((split + 1) * per_split, count);
const uint begin_row = begin % capacity;
const size_t base = (size_t(b) * KV + kv_head) * capacity;
for (uint at = begin + simd * UNROLL; at < end; at += SIMDS * UNROLL) {
  float scores[UNROLL][GT];
  size_t rows[UNROLL];
  for (uint u = 0; u < UNROLL; ++u) {
    uint row = begin_row + (metal::min(at + u, end - 1) - begin);
    if (row >= capacity) row -= capacity;
    rows[u] = (base + row) * D + d0;
  }
  for (uint u = 0; u < UNROLL; ++u) {
    load<N>(keys + rows[u], x);
    for (uint h = 0; h < GT; ++h) {
      float dot = 0.0f;
      for (uint i = 0; i < N; ++i) dot += q[h][i] * x[i];
      scores[u][h] = dot;
    }
  }
  for (uint u = 0; u < UNROLL; ++u) {
    for (uint h = 0; h < GT; ++h) {
      const float score = simd_sum(scores[u][h]);
      scores[u][h] = at + u < end ? score : -INFINITY;
    }
  }
  for (uint h = 0; h < GT; ++h) {
    float next = best[h];
    for (uint u = 0; u < UNROLL; ++u) next = metal::max(next, scores[u][h]);
    const float shrink = metal::fast::exp2(best[h] - next);
    best[h] = next;
    total[h] *= shrink;
    for (uint i = 0; i < N; ++i) o[h][i] *= shrink;
    for (uint u = 0; u < UNROLL; ++u) {
      scores[u][h] = metal::fast::exp2(scores[u][h] - next);
      total[h] += scores[u][h];
    }
  }
  for (uint u = 0; u < UNROLL; ++u) {
    load<N>(values + rows[u], x);
    for (uint h = 0; h < GT; ++h) {
      for (uint i = 0; i < N; ++i) o[h][i] += scores[u][h] * x[i];
    }
  }
}

// The new tokens up to this one: split 0 attends to them from the projection's row; the cache gets each of them
// from the threadgroup of the same token and of the first tile of its KV head.
for (uint t = simd; t <= l && split == 0; t += SIMDS) {
  const device T* row = qkv + (size_t(b) * L + t) * WIDTH + (H + kv_head) * D;
  float key[N], value[N];
  load<N>(row + d0, key);
  load<N>(row + KV * D + d0, value);
  for (uint i = 0; i < N; ++i) {
    rope_cos_sin(turn[i], offset + t, c[i], s[i]);
    key[i] = float(T(key[i] * c[i] + sign[i] * float(row[partner[i]]) * s[i]));
  }
  if (t == l && tile % (TILES / KV) == 0) {
    const size_t to = (base + (offset + t) % capacity) * D + d0;
    for (uint i = 0; i < N; ++i) {
      ((device T*)keys)[to + i] = T(key[i]);
      ((device T*)values)[to + i] = T(value[i]);
    }
  }
  if (offset + t < first) continue;
  for (uint h = 0; h < GT; ++h) {
    float dot = 0.0f;
    for (uint i = 0; i < N; ++i) dot += q[h][i] * key[i];
    const float score = simd_sum(dot);
    const float next = metal::max(best[h], score);
    const float shrink = metal::fast::exp2(best[h] - next);
    const float weight = metal::fast::exp2(score - next);
    best[h] = next;
    total[h] = total[h] * shrink + weight;
    for (uint i = 0; i < N; ++i) o[h][i] = o[h][i] * shrink + weight * value[i];
  }
}

// The simdgroups' parts become one: maxima and sums of all heads first, then the outputs head by head.
threadgroup float all_best[SIMDS][GT];
threadgroup float all_total[SIMDS][GT];
threadgroup float all_o[SIMDS][D];
if (lane == 0) {
  for (uint h = 0; h < GT; ++h) {
    all_best[simd][h] = best[h];
    all_total[simd][h] = total[h];
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint h = 0; h < GT; ++h) {
  float most = all_best[0][h];
  for (uint j = 1; j < SIMDS; ++j) most = metal::max(most, all_best[j][h]);
  const float shrink = metal::fast::exp2(best[h] - most);
  for (uint i = 0; i < N; ++i) all_o[simd][d0 + i] = o[h][i] * shrink;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const size_t part = ((size_t(b) * H + tile * GT + h) * L + l) * splits + split;
  for (uint d = thread_index_in_threadgroup; d < D; d += SIMDS * 32) {
    float sum = 0.0f;
    for (uint j = 0; j < SIMDS; ++j) sum += all_o[j][d];
    parts[part * D + d] = sum;
  }
  if (thread_index_in_threadgroup == 0) {
    float sum = 0.0f;
    for (uint j = 0; j < SIMDS; ++j) sum += all_total[j][h] * metal::fast::exp2(all_best[j][h] - most);
    stats[2 * part] = most;
    stats[2 * part + 1] = sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
