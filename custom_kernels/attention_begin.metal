// Which keys this threadgroup is for: those of threadgroup (split or part, tile of GT heads, token).
constexpr uint N = D / 32;
constexpr uint TILES = H / GT;
constexpr uint WIDTH = (H + 2 * KV) * D;
#ifdef FINAL
// Threadgroups share the dimensions of a head's values, and all of them know all weights.
constexpr uint VN = N / PARTS;
const uint part = threadgroup_position_in_grid.x;
const uint split = 0;
const uint splits = 1;
#else
constexpr uint PARTS = 1;
constexpr uint VN = N;
const uint part = 0;
const uint split = threadgroup_position_in_grid.x;
const uint splits = threadgroups_per_grid.x;
#endif
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
