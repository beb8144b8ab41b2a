// One part of the keys for one tile of query heads of one token, its online softmax, and the new keys and values,
// which are rotated here and go to their cache rows in place. Threadgroup (split, tile of GT heads, token); a
// simdgroup takes U keys at a time, a lane D / 32 neighbouring dimensions of them. With FINAL there is one split,
// and the result is gated here.
constexpr uint N = D / 32;
// Scores of a simdgroup at a time, with GT * U of them in use, and the lanes that end up with each.
constexpr uint SHARE = 32 / SCORES;
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
// The dimension that dimension d is rotated with.
#define PARTNER(d) ((d) < R / 2 ? (d) + R / 2 : ((d) < R ? (d) - R / 2 : (d)))

// Cached keys that this token sees: positions [first, offset), of which this split takes [begin, end).
const uint first = WINDOW > 0 && position + 1 > WINDOW ? position + 1 - WINDOW : 0;
const uint count = offset > first ? offset - first : 0;
const uint per_split = (count + splits - 1) / splits;
const uint begin = first + metal::min(split * per_split, count);
const uint end = first + metal::min((split + 1) * per_split, count);
const uint begin_row = begin % capacity;
const size_t base = (size_t(b) * KV + kv_head) * capacity;

float q[GT][N], o[GT][N];
// Score i = h * U + u of head h and key u ends up in SHARE lanes from SHARE * i on, and with it the running maximum
// of the head and the sum of its weights of such keys. The maximum starts finite: exp2(-inf + inf) would be NaN.
const uint slot = lane / SHARE;
float lane_best = -1e30f;
float lane_total = 0.0f;

for (uint at = begin + simd * U, step = 0; step == 0 || at < end; at += SIMDS * U, ++step) {
  float k[U][N], v[U][N];
  if (at < end) {
    for (uint u = 0; u < U; ++u) {
      uint row = begin_row + (metal::min(at + u, end - 1) - begin);
      if (row >= capacity) row -= capacity;
      load<N>(keys + (base + row) * D + d0, k[u]);
      load<N>(values + (base + row) * D + d0, v[u]);
    }
  }

  // The queries are prepared while the first keys are on their way.
  if (step == 0) {
    float c[N], s[N];
    for (uint i = 0; i < N; ++i) {
      const uint d = d0 + i;
      const size_t entry = (size_t(b) * L + l) * (R / 2) + d % (R / 2);
      c[i] = d < R ? cosines[entry] : 1.0f;
      s[i] = d < R ? (d < R / 2 ? -sines[entry] : sines[entry]) : 0.0f;
    }
    // Softmax in base 2: the scale and log2(e) go into the queries.
    const float scale = 1.4426950408889634f * metal::precise::rsqrt(float(D));
    for (uint h = 0; h < GT; ++h) {
      const device T* row = qkv + (size_t(b) * L + l) * WIDTH + (tile * GT + h) * D;
      float x[N];
      load<N>(row + d0, x);
      for (uint i = 0; i < N; ++i) {
        q[h][i] = scale * float(T(x[i] * c[i] + float(row[PARTNER(d0 + i)]) * s[i]));
        o[h][i] = 0.0f;
      }
    }
  }
  if (at >= end) break;

  float dots[SCORES];
  for (uint i = 0; i < SCORES; ++i) dots[i] = 0.0f;
  for (uint u = 0; u < U; ++u) {
    for (uint h = 0; h < GT; ++h) {
      for (uint i = 0; i < N; ++i) dots[h * U + u] += q[h][i] * k[u][i];
    }
  }
  // All sums over the lanes at once: each exchange halves the sums that a lane is concerned with.
  for (uint width = SCORES / 2, mask = 16; width > 0; width /= 2, mask /= 2) {
    const bool upper = lane & mask;
    for (uint i = 0; i < width; ++i) {
      const float sent = upper ? dots[i] : dots[i + width];
      dots[i] = (upper ? dots[i + width] : dots[i]) + simd_shuffle_xor(sent, mask);
    }
  }
  float score = dots[0];
  for (uint mask = SHARE / 2; mask > 0; mask /= 2) score += simd_shuffle_xor(score, mask);
  if (at + slot % U >= end) score = -INFINITY;

  float next = metal::max(lane_best, score);
  for (uint mask = SHARE; mask < SHARE * U; mask *= 2) next = metal::max(next, simd_shuffle_xor(next, mask));
  const float shrink = metal::fast::exp2(lane_best - next);
  const float weight = metal::fast::exp2(score - next);
  lane_best = next;
  lane_total = lane_total * shrink + weight;
  for (uint h = 0; h < GT; ++h) {
    const float factor = simd_shuffle(shrink, SHARE * h * U);
    for (uint i = 0; i < N; ++i) o[h][i] *= factor;
    for (uint u = 0; u < U; ++u) {
      const float p = simd_shuffle(weight, SHARE * (h * U + u));
      for (uint i = 0; i < N; ++i) o[h][i] += p * v[u][i];
    }
  }
}

for (uint mask = SHARE; mask < SHARE * U; mask *= 2) lane_total += simd_shuffle_xor(lane_total, mask);
float best[GT], total[GT];
for (uint h = 0; h < GT; ++h) {
  best[h] = simd_shuffle(lane_best, SHARE * h * U);
  total[h] = simd_shuffle(lane_total, SHARE * h * U);
}

// The new tokens up to this one: split 0 attends to them from the projection's row; the cache gets each of them
// from the threadgroup of the same token and of the first tile of its KV head.
for (uint t = simd; t <= l && split == 0; t += SIMDS) {
  const device T* row = qkv + (size_t(b) * L + t) * WIDTH + (H + kv_head) * D;
  float key[N], value[N];
  load<N>(row + d0, key);
  load<N>(row + KV * D + d0, value);
  for (uint i = 0; i < N; ++i) {
    const uint d = d0 + i;
    const size_t entry = (size_t(b) * L + t) * (R / 2) + d % (R / 2);
    const float c = d < R ? cosines[entry] : 1.0f;
    const float s = d < R ? (d < R / 2 ? -sines[entry] : sines[entry]) : 0.0f;
    key[i] = float(T(key[i] * c + float(row[PARTNER(d)]) * s));
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
  const uint head = tile * GT + h;
  float sum_of_weights = 0.0f;
  for (uint j = 0; j < SIMDS; ++j) {
    sum_of_weights += all_total[j][h] * metal::fast::exp2(all_best[j][h] - most);
  }
#ifdef FINAL
  const float gate = gate_of(float(scores[(size_t(b) * L + l) * H + head]), SILU);
#else
  const size_t to = ((size_t(b) * H + head) * L + l) * splits + split;
  if (thread_index_in_threadgroup == 0) {
    stats[2 * to] = most;
    stats[2 * to + 1] = sum_of_weights;
  }
#endif
  for (uint d = thread_index_in_threadgroup; d < D; d += SIMDS * 32) {
    float sum = 0.0f;
    for (uint j = 0; j < SIMDS; ++j) sum += all_o[j][d];
#ifdef FINAL
    out[((size_t(b) * L + l) * H + head) * D + d] = T(sum / sum_of_weights * gate);
#else
    parts[to * D + d] = sum;
#endif
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
#undef PARTNER
