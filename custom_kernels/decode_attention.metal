// One part of the keys for one tile of query heads of one token, its online softmax, and the new keys and values,
// which are rotated here and go to their cache rows in place. Threadgroup (split, tile of GT heads, token); a
// simdgroup takes U keys at a time, a lane D / 32 neighbouring dimensions of them. With FINAL there is one split, and
// the result is gated here; threadgroups are (part, head, token), and each sums up D / PARTS dimensions of the values.
// With CODES the cache is quantised, and the new rows are too.
// Scores of a simdgroup at a time, with GT * U of them in use, and the lanes that end up with each.
constexpr uint SHARE = 32 / SCORES;
#include "attention_begin.metal"
#ifdef CODES
#define KEYS keys, key_scales, key_biases
#define VALUES values, value_scales, value_biases
using Key = Share<N, BITS, GROUP>;
using Value = Key;
#else
#define KEYS keys
#define VALUES values
using Key = Share<N>;
using Value = Share<VN>;
#endif
// Fetches U rows, or a piece of each, from position at < end on: neighbours, which one address does for, or around the
// ring's end and up to the last of them; beyond it, where weights are 0, once more the last.
#define FETCH(BUFFERS, pieces, piece, rows)                                                      \
  if (at + U <= end && ROW(at) + U <= capacity) {                                                \
    const size_t row = base + ROW(at);                                                           \
    for (uint u = 0; u < U; ++u) fetch(BUFFERS, (row + u) * pieces + piece, lane, rows[u]);      \
  } else {                                                                                       \
    for (uint u = 0; u < U; ++u) {                                                               \
      fetch(BUFFERS, (base + ROW(metal::min(at + u, end - 1))) * pieces + piece, lane, rows[u]); \
    }                                                                                            \
  }

Key k[U];
Value v[U];
uint at = begin + simd * U;
if (at < end) {
  FETCH(KEYS, 1, 0, k)
  FETCH(VALUES, PARTS, part, v)
}

// While the first keys are on their way.
#include "attention_rotate.metal"
float q[GT][N], o[GT][VN];
for (uint h = 0; h < GT; ++h) {
  for (uint i = 0; i < N; ++i) q[h][i] = rotated[h][d0 + i] * scale;
  for (uint i = 0; i < VN; ++i) o[h][i] = 0.0f;
}

// Score i = h * U + u of head h and key u ends up in SHARE lanes from SHARE * i on, and with it the running maximum
// of the head and the sum of its weights of such keys. The maximum starts finite: exp2(-inf + inf) would be NaN.
const uint slot = lane / SHARE;
float lane_best = -1e30f;
float lane_total = 0.0f;

// The new tokens up to this one, a simdgroup each.
if (split == 0 && simd <= l) {
#include "attention_append.metal"
  if (offset + t >= first) {
    for (uint h = 0; h < GT; ++h) {
      float dot = 0.0f;
      for (uint i = 0; i < N; ++i) dot += q[h][i] * key[i];
      const float score = simd_sum(dot);
      if (slot / U == h) {
        lane_best = score;
        lane_total = slot % U == 0 ? 1.0f : 0.0f;
      }
      for (uint i = 0; i < VN; ++i) o[h][i] = value[i];
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
    FETCH(KEYS, 1, 0, k)
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
      for (uint i = 0; i < VN; ++i) o[h][i] *= factor;
    }
  }
  for (uint u = 0; u < U; ++u) {
    float x[VN];
    decode(VALUES, lane, v[u], x);
    for (uint h = 0; h < GT; ++h) {
      const float p = simd_shuffle(weight, SHARE * (h * U + u));
      for (uint i = 0; i < VN; ++i) o[h][i] += p * x[i];
    }
  }
  if (at < end) {
    FETCH(VALUES, PARTS, part, v)
  }
}

for (uint mask = SHARE; mask < SHARE * U; mask *= 2) lane_total += simd_shuffle_xor(lane_total, mask);

threadgroup float all_best[GT][SIMDS];
threadgroup float all_total[GT][SIMDS];
threadgroup float all_o[SIMDS][D / PARTS];
if (lane % (SHARE * U) == 0 && slot / U < GT) {
  all_best[slot / U][simd] = lane_best;
  all_total[slot / U][simd] = lane_total;
}
#define PUT_OUTPUT(h, factor) \
  for (uint i = 0; i < VN; ++i) all_o[simd][lane * VN + i] = o[h][i] * factor;
#include "attention_end.metal"
#undef FETCH
#undef KEYS
#undef VALUES
