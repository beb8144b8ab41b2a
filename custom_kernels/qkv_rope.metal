// Splits the fused rows [Q | K | V] of B x L tokens into heads and rotates queries and keys. One thread a pair of
// dimensions of one head of one token. With APPEND, keys and values go to their rows of the cache, in place.
const uint pair = thread_position_in_grid.x;
const uint head = thread_position_in_grid.y;
const uint L = qkv_shape[1];
const uint b = thread_position_in_grid.z / L;
const uint l = thread_position_in_grid.z % L;
const uint position = uint(positions[b]) + l;

device T* out;
if (head < H) {
  out = q + ((size_t(b) * H + head) * L + l) * D;
} else {
  const bool is_key = head < H + KV;
  const size_t kv_head = size_t(b) * KV + (head - H) % KV;
#ifdef APPEND
  // Padding is not written, nor what later tokens of this call overwrite.
  const uint capacity = keys_shape[2];
  const uint valid = uint(lengths[b]);
  if (l >= valid || l + capacity < valid) return;
  out = (device T*)(is_key ? keys : values) + (kv_head * capacity + position % capacity) * D;
#else
  out = (is_key ? k : v) + (kv_head * L + l) * D;
#endif
}

// Pairs below R / 2 are rotated; the others are neighbours that pass through.
const bool rotated = pair < R / 2;
const uint first = rotated ? pair : R + 2 * (pair - R / 2);
const uint second = rotated ? pair + R / 2 : first + 1;
const device T* row = qkv + ((size_t(b) * L + l) * (H + 2 * KV) + head) * D;
const float x1 = float(row[first]);
const float x2 = float(row[second]);
if (rotated && head < H + KV) {
  float c, s;
  rope_cos_sin(turns[pair], position, c, s);
  out[first] = T(x1 * c - x2 * s);
  out[second] = T(x2 * c + x1 * s);
} else {
  out[first] = T(x1);
  out[second] = T(x2);
}
