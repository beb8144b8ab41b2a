// One part of the keys for one tile of query heads of one token, its online softmax, and the new keys and values,
// which are rotated here and go to their cache rows in place. Threadgroup (split, tile of GT heads, token); a
// simdgroup takes U keys at a time, a lane D / 32 neighbouring dimensions of them. With FINAL there is one split,
// and the result is gated here. With CODES the cache is quantised, and the new rows are too.
constexpr uint N = D / 32;
// Scores of a simdgroup at a time, with GT * U of them in use, and the lanes that end up with each.
constexpr uint SHARE = 32 / SCORES;
constexpr uint TILES = H / GT;
constexpr uint WIDTH = (H + 2 * KV) * D;
#ifdef CODES
#define KEYS keys, key_scales, key_biases
#define VALUES values, value_scales, value_biases
using Row = Share<N, BITS, GROUP>;
#else
#define KEYS keys
#define VALUES values
using Row = Share<N>;
#endif
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

// Cached keys that this token sees: positions [first, offset), of which this split takes [begin, end).
const uint first = WINDOW > 0 && position + 1 > WINDOW ? position + 1 - WINDOW : 0;
const uint count = offset > first ? offset - first : 0;
const uint per_split = (count + splits - 1) / splits;
const uint begin = first + metal::min(split * per_split, count);
const uint end = first + metal::min((split + 1) * per_split, count);
const uint begin_row = begin % capacity;
const size_t base = (size_t(b) * KV + kv_head) * capacity;
#define ROW(at) wrapped(begin_row + (at) - begin, capacity)
// Fetches U rows from position at < end on: neighbours, which one address does for, or around the ring's end and up to
// the last of them; beyond it, where weights are 0, once more the last.
#define FETCH(BUFFERS, rows)                                                                  \
  if (at + U <= end && ROW(at) + U <= capacity) {                                             \
    const size_t row = base + ROW(at);                                                        \
    for (uint u = 0; u < U; ++u) fetch(BUFFERS, row + u, lane, rows[u]);                      \
  } else {                                                                                    \
    for (uint u = 0; u < U; ++u) {                                                            \
      fetch(BUFFERS, base + ROW(metal::min(at + u, end - 1)), lane, rows[u]);                 \
    }                                                                                         \
  }

Row k[U], v[U];
uint at = begin + simd * U;
if (at < end) {
  FETCH(KEYS, k)
  FETCH(VALUES, v)
}

// While the first keys are on their way, the queries are rotated, a simdgroup each, and where split 0 attends to the
// new keys up to this token, so are they. Softmax is in base 2: the scale and log2(e) go into the queries.
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
    rotated[r][d] = float(T(x)) * (is_key ? 1.0f : scale);
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
float q[GT][N], o[GT][N];
for (uint h = 0; h < GT; ++h) {
  for (uint i = 0; i < N; ++i) {
    q[h][i] = rotated[h][d0 + i];
    o[h][i] = 0.0f;
  }
}

// Score i = h * U + u of head h and key u ends up in SHARE lanes from SHARE * i on, and with it the running maximum
// of the head and the sum of its weights of such keys. The maximum starts finite: exp2(-inf + inf) would be NaN.
const uint slot = lane / SHARE;
float lane_best = -1e30f;
float lane_total = 0.0f;

// The new tokens up to this one, a simdgroup each: the cache gets each of them from the threadgroup of the same token
// and of the first tile of its KV head.
if (split == 0 && simd <= l) {
  const uint t = simd;
  const bool write = t == l && tile % (TILES / KV) == 0;
  float key[N], value[N];
  for (uint i = 0; i < N; ++i) key[i] = rotated[GT + t][d0 + i];
  load<N>(qkv + (size_t(b) * L + t) * WIDTH + (H + KV + kv_head) * D + d0, value);
  const size_t to = base + (offset + t) % capacity;
#ifdef CODES
  Row share;
  quantise((device uint*)keys, (device T*)key_scales, (device T*)key_biases, to, lane, write, share, key);
  quantise((device uint*)values, (device T*)value_scales, (device T*)value_biases, to, lane, write, share, value);
#else
  if (write) {
    for (uint i = 0; i < N; ++i) {
      ((device T*)keys)[to * D + d0 + i] = T(key[i]);
      ((device T*)values)[to * D + d0 + i] = T(value[i]);
    }
  }
#endif
  if (offset + t >= first) {
    for (uint h = 0; h < GT; ++h) {
      float dot = 0.0f;
      for (uint i = 0; i < N; ++i) dot += q[h][i] * key[i];
      const float score = simd_sum(dot);
      if (slot / U == h) {
        lane_best = score;
        lane_total = slot % U == 0 ? 1.0f : 0.0f;
      }
      for (uint i = 0; i < N; ++i) o[h][i] = value[i];
    }
  }
}

// Keys and values take turns: each are asked for as soon as those before are used.
while (at < end) {
  float dots[SCORES];
  for (uint i = 0; i < SCORES; ++i) dots[i] = 0.0f;
  for (uint u = 0; u < U; ++u) {
    float x[N];
    decode(KEYS, lane, k[u], x);
    for (uint h = 0; h < GT; ++h) {
      for (uint i = 0; i < N; ++i) dots[h * U + u] += q[h][i] * x[i];
    }
  }
  const uint now = at;
  at += SIMDS * U;
  if (at < end) {
    FETCH(KEYS, k)
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
  if (now + slot % U >= end) score = -INFINITY;

  float next = metal::max(lane_best, score);
  for (uint mask = SHARE; mask < SHARE * U; mask *= 2) next = metal::max(next, simd_shuffle_xor(next, mask));
  const float shrink = metal::fast::exp2(lane_best - next);
  const float weight = metal::fast::exp2(score - next);
  lane_best = next;
  lane_total = lane_total * shrink + weight;
  // A new maximum is rare.
  if (simd_any(shrink != 1.0f)) {
    for (uint h = 0; h < GT; ++h) {
      const float factor = simd_shuffle(shrink, SHARE * h * U);
      for (uint i = 0; i < N; ++i) o[h][i] *= factor;
    }
  }
  for (uint u = 0; u < U; ++u) {
    float x[N];
    decode(VALUES, lane, v[u], x);
    for (uint h = 0; h < GT; ++h) {
      const float p = simd_shuffle(weight, SHARE * (h * U + u));
      for (uint i = 0; i < N; ++i) o[h][i] += p * x[i];
    }
  }
  if (at < end) {
    FETCH(VALUES, v)
  }
}

for (uint mask = SHARE; mask < SHARE * U; mask *= 2) lane_total += simd_shuffle_xor(lane_total, mask);

// The simdgroups' parts become one: maxima and sums of all heads first, then the outputs head by head.
threadgroup float all_best[GT][SIMDS];
threadgroup float all_total[GT][SIMDS];
threadgroup float all_o[SIMDS][D];
if (lane % (SHARE * U) == 0 && slot / U < GT) {
  all_best[slot / U][simd] = lane_best;
  all_total[slot / U][simd] = lane_total;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint h = 0; h < GT; ++h) {
  // Lane j looks at simdgroup j.
  const float best = lane < SIMDS ? all_best[h][lane] : -1e30f;
  const float most = simd_max(best);
  const float sum_of_weights = simd_sum(lane < SIMDS ? all_total[h][lane] * metal::fast::exp2(best - most) : 0.0f);
  const float shrink = metal::fast::exp2(all_best[h][simd] - most);
  for (uint i = 0; i < N; ++i) all_o[simd][d0 + i] = o[h][i] * shrink;
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
#undef FETCH
#undef ROW
#undef KEYS
#undef VALUES
