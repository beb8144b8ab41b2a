// As decode_attention.metal, over a quantised cache and with products of matrices: a simdgroup takes 16 keys at a time,
// a code is the bits of a half, and only sums over a group are scaled. Of a matrix' 8 columns the first four are the
// query heads. The others are the heads again: their weights are what the first four lose when they become halves. With
// TURBO rows are in the format of turbo.py, and all is in rotated dimensions, which merge_gate.metal turns back.
#include "attention_begin.metal"
// A lane's share of 64 neighbouring dimensions: 16 codes of a key, or 8 of a value.
constexpr uint BLOCKS = D / 64;
constexpr uint GROUPS = D / GROUP;
constexpr uint WORDS = BITS / 2;
#ifdef TURBO
// Levels have a byte.
constexpr uint CODE_BITS = 8;
#else
constexpr uint CODE_BITS = BITS;
#endif
constexpr uint CODE_WORDS = CODE_BITS / 2;
// Codes of half a word: code p of each half are taken at once.
constexpr uint PAIRS = 16 / CODE_BITS;
constexpr float UNIT = 1.0f / (1 << 24);
// Halves end at 65504: queries are taken smaller, and what is lost in a half, at most 16, so many times.
constexpr float SMALLER = 1.0f / 16;
constexpr float REST = 2048.0f;
const uint row = matrix_row(lane);
const uint column = matrix_column(lane);
#define ROW_BEFORE_END(at) (base + ROW(metal::min(at, end - 1)))

#ifdef TURBO
// Rotated queries have more digits than a half: the last four columns have what the first four lose.
#define ALL_OF(sum) with_rest(sum, column < 4, REST)
#define FETCH_SCALES(rows, scales, biases) load_raw<GROUPS>(rows##_scales + from * GROUPS, scales);
#define WIDEN_SCALES(rows, raw_scales, raw_biases, y)     \
  widen<GROUPS>(rows##_scales, raw_scales[y], scales[y]); \
  for (uint g = 0; g < GROUPS; ++g) biases[y][g] = -MIDDLE * scales[y][g];
#else
#define ALL_OF(sum) (sum)
#define FETCH_SCALES(rows, scales, biases)                 \
  load_raw<GROUPS>(rows##_scales + from * GROUPS, scales); \
  load_raw<GROUPS>(rows##_biases + from * GROUPS, biases);
#define WIDEN_SCALES(rows, raw_scales, raw_biases, y)     \
  widen<GROUPS>(rows##_scales, raw_scales[y], scales[y]); \
  widen<GROUPS>(rows##_biases, raw_biases[y], biases[y]);
#endif

// Of keys `row` and `row` + 8: the codes, in the order of the left operand's columns, scales and biases.
uint k[2][BLOCKS][WORDS], k_scales[2][GROUPS], k_biases[2][GROUPS];
#define FETCH_KEYS                                                                       \
  for (uint y = 0; y < 2; ++y) {                                                         \
    const size_t from = ROW_BEFORE_END(at + 8 * y + row);                                \
    for (uint j = 0; j < BLOCKS; ++j) {                                                  \
      load_words<WORDS>(keys + ((from * BLOCKS + j) * 4 + column / 2) * WORDS, k[y][j]); \
    }                                                                                    \
    FETCH_SCALES(key, k_scales[y], k_biases[y])                                          \
  }

// Of values `column`, `column` + 1 and those 8 further on: codes. Of values `row` and `row` + 8: scales and biases.
uint v[4][BLOCKS][WORDS / 2], v_scales[2][GROUPS], v_biases[2][GROUPS];
#define FETCH_VALUES                                                                                    \
  for (uint y = 0; y < 2; ++y) {                                                                        \
    for (uint e = 0; e < 2; ++e) {                                                                      \
      const size_t from = ROW_BEFORE_END(at + 8 * y + column + e);                                      \
      for (uint j = 0; j < BLOCKS; ++j) {                                                               \
        load_words<WORDS / 2>(values + ((from * BLOCKS + j) * 8 + row) * (WORDS / 2), v[2 * y + e][j]); \
      }                                                                                                 \
    }                                                                                                   \
    const size_t from = ROW_BEFORE_END(at + 8 * y + row);                                               \
    FETCH_SCALES(value, v_scales[y], v_biases[y])                                                       \
  }

uint at = begin + simd * 16;
if (at < end) {
  FETCH_KEYS
  FETCH_VALUES
}

// While the first keys are on their way.
#include "attention_rotate.metal"

// The queries as right operands, and their sums over each group, for the keys' biases.
uint q[BLOCKS][4][2];
float q_sums[GROUPS][2];
for (uint g = 0; g < GROUPS; ++g) q_sums[g][0] = q_sums[g][1] = 0.0f;
for (uint j = 0; j < BLOCKS; ++j) {
  for (uint i = 0; i < 8; ++i) {
    const uint d = 64 * j + 16 * (row / 2) + (i / PAIRS * 2 + row % 2) * PAIRS + i % PAIRS;
    float pair[2];
    for (uint x = 0; x < 2; ++x) {
      pair[x] = column % 4 + x < GT ? rotated[column % 4 + x][d] * SMALLER : 0.0f;
    }
    uint halves = pack_halves(pair[0], pair[1]);
#ifdef TURBO
    if (column >= 4) halves = pack_halves((pair[0] - low_half(halves)) * REST, (pair[1] - high_half(halves)) * REST);
#endif
    q_sums[64 * j / GROUP][0] += low_half(halves);
    q_sums[64 * j / GROUP][1] += high_half(halves);
    q[j][i / 2][i % 2] = right_operand(halves);
  }
}
for (uint g = 0; g < GROUPS; ++g) {
  for (uint x = 0; x < 2; ++x) q_sums[g][x] = ALL_OF(column_sum(q_sums[g][x])) * UNIT;
}

// Of this lane's two columns; sums of weights and of weighted biases are over its own rows yet. The outputs' rows are
// dimensions: 8 row + 2 i and + 1 of block j.
float best[2], total[2], bias_sums[GROUPS][2], o[BLOCKS][4][4];
for (uint x = 0; x < 2; ++x) {
  // Finite: exp2(-inf + inf) would be NaN.
  best[x] = -1e30f;
  total[x] = 0.0f;
  for (uint g = 0; g < GROUPS; ++g) bias_sums[g][x] = 0.0f;
}
for (uint j = 0; j < BLOCKS; ++j) {
  for (uint i = 0; i < 4; ++i) {
    for (uint n = 0; n < 4; ++n) o[j][i][n] = 0.0f;
  }
}

// The new tokens up to this one, a simdgroup each.
if (split == 0 && simd <= l) {
#include "attention_append.metal"
  if (offset + t >= first) {
    for (uint h = 0; h < GT; ++h) {
      float dot = 0.0f;
      for (uint i = 0; i < N; ++i) dot += rotated[h][d0 + i] * key[i];
      const float score = simd_sum(dot) * scale;
      for (uint x = 0; x < 2; ++x) {
        if (column % 4 + x == h) {
          best[x] = score;
          total[x] = row == 0 ? 1.0f : 0.0f;
        }
      }
    }
    for (uint i = 0; i < N; ++i) rotated[GT + t][d0 + i] = value[i];
    simdgroup_barrier(mem_flags::mem_threadgroup);
    if (column < 4) {
      for (uint j = 0; j < BLOCKS; ++j) {
        for (uint i = 0; i < 4; ++i) {
          for (uint n = 0; n < 4; ++n) o[j][i][n] = rotated[GT + t][64 * j + 8 * row + 2 * i + n / 2] * UNIT;
        }
      }
    }
  }
}

// Keys and values take turns: each are asked for as soon as those before are used.
while (at < end) {
  float score[2][2] = {{0.0f, 0.0f}, {0.0f, 0.0f}};
  float scales[2][GROUPS], biases[2][GROUPS];
  for (uint y = 0; y < 2; ++y) {
    WIDEN_SCALES(key, k_scales, k_biases, y)
  }
  for (uint g = 0; g < GROUPS; ++g) {
    float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (uint j = g * GROUP / 64; j < (g + 1) * GROUP / 64; ++j) {
      uint codes[2][CODE_WORDS];
      for (uint y = 0; y < 2; ++y) spread<CODE_WORDS>(k[y][j], codes[y]);
      for (uint i = 0; i < 4; ++i) {
        uint a[4];
        for (uint n = 0; n < 4; ++n) {
          const uint pair = 2 * i + n / 2;
          a[n] = two_codes<CODE_BITS>(codes[n % 2][pair / PAIRS] >> (pair % PAIRS * CODE_BITS));
        }
        multiply_add(c, a, q[j][i]);
      }
    }
    for (uint y = 0; y < 2; ++y) {
      for (uint x = 0; x < 2; ++x) {
        score[y][x] += scales[y][g] * ALL_OF(c[2 * y + x]) + biases[y][g] * q_sums[g][x];
      }
    }
  }
  const uint now = at;
  at += SIMDS * 16;
  if (at < end) {
    FETCH_KEYS
  }

  float weight[2][2], shrink[2];
  for (uint x = 0; x < 2; ++x) {
    for (uint y = 0; y < 2; ++y) {
      score[y][x] = now + 8 * y + row < end ? score[y][x] * (scale / SMALLER / UNIT) : -INFINITY;
    }
    const float next = metal::max(best[x], column_max(metal::max(score[0][x], score[1][x])));
    shrink[x] = metal::fast::exp2(best[x] - next);
    for (uint y = 0; y < 2; ++y) weight[y][x] = metal::fast::exp2(score[y][x] - next);
    best[x] = next;
    total[x] = total[x] * shrink[x] + weight[0][x] + weight[1][x];
  }
  // A new maximum is rare.
  if (simd_any(shrink[0] != 1.0f || shrink[1] != 1.0f)) {
    for (uint x = 0; x < 2; ++x) {
      for (uint g = 0; g < GROUPS; ++g) bias_sums[g][x] *= shrink[x];
    }
    for (uint j = 0; j < BLOCKS; ++j) {
      for (uint i = 0; i < 4; ++i) {
        for (uint n = 0; n < 4; ++n) o[j][i][n] *= shrink[n % 2];
      }
    }
  }

  for (uint y = 0; y < 2; ++y) {
    WIDEN_SCALES(value, v_scales, v_biases, y)
  }
  for (uint g = 0; g < GROUPS; ++g) {
    uint w[2];
    for (uint y = 0; y < 2; ++y) {
      float scaled[2];
      for (uint x = 0; x < 2; ++x) {
        scaled[x] = weight[y][x] * scales[y][g];
        bias_sums[g][x] += weight[y][x] * biases[y][g];
      }
      const uint halves = pack_halves(scaled[0], scaled[1]);
      const uint rest = pack_halves((scaled[0] - low_half(halves)) * REST, (scaled[1] - high_half(halves)) * REST);
      w[y] = right_operand(column < 4 ? halves : rest);
    }
    for (uint j = g * GROUP / 64; j < (g + 1) * GROUP / 64; ++j) {
      uint codes[4][CODE_WORDS / 2];
      for (uint n = 0; n < 4; ++n) spread<CODE_WORDS / 2>(v[n][j], codes[n]);
      for (uint i = 0; i < 4; ++i) {
        uint a[4];
        for (uint n = 0; n < 4; ++n) {
          const uint code = 2 * i + n % 2, word = code / (2 * PAIRS);
          const uint both = same_halves(codes[n / 2 * 2][word], codes[n / 2 * 2 + 1][word], code / PAIRS % 2);
          a[n] = two_codes<CODE_BITS>(both >> (code % PAIRS * CODE_BITS));
        }
        multiply_add(o[j][i], a, w);
      }
    }
  }
  if (at < end) {
    FETCH_VALUES
  }
}

threadgroup float all_best[GT][SIMDS];
threadgroup float all_total[GT][SIMDS];
threadgroup float all_o[SIMDS][D];
for (uint x = 0; x < 2; ++x) {
  total[x] = column_sum(total[x]);
  for (uint g = 0; g < GROUPS; ++g) bias_sums[g][x] = column_sum(bias_sums[g][x]);
  if (row == 0 && column + x < GT) {
    all_best[column + x][simd] = best[x];
    all_total[column + x][simd] = total[x];
  }
}
// Of head h, in its column and in that of the rests.
#define PUT_OUTPUT(h, factor)                                                     \
  for (uint n = 0; n < 2; ++n) {                                                  \
    if (column == h / 2 * 2 + 4 * n) {                                            \
      for (uint j = 0; j < BLOCKS; ++j) {                                         \
        for (uint i = 0; i < 8; ++i) {                                            \
          const uint d = 64 * j + 8 * row + i, g = 64 * j / GROUP, m = i % 2 * 2; \
          const float sum = h % 2 ? o[j][i / 2][m + 1] : o[j][i / 2][m];          \
          const float bias_sum = h % 2 ? bias_sums[g][1] : bias_sums[g][0];       \
          if (n == 0) {                                                           \
            all_o[simd][d] = (sum / UNIT + bias_sum) * factor;                    \
          } else {                                                                \
            all_o[simd][d] += sum * (factor / UNIT / REST);                       \
          }                                                                       \
        }                                                                         \
      }                                                                           \
    }                                                                             \
    simdgroup_barrier(mem_flags::mem_threadgroup);                                \
  }
#include "attention_end.metal"
#undef ALL_OF
#undef FETCH_SCALES
#undef WIDEN_SCALES
#undef FETCH_KEYS
#undef FETCH_VALUES
#undef ROW_BEFORE_END
