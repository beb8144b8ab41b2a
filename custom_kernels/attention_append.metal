// New token t, of this simdgroup: its key and value in fp32, and both as the cache gets them, which it does from the
// threadgroup of the same token and of the first tile of its KV head.
const uint t = simd;
const bool write = t == l && tile % (TILES / KV) == 0;
float key[N], value[VN];
for (uint i = 0; i < N; ++i) key[i] = rotated[GT + t][d0 + i];
const uint v0 = (part * 32 + lane) * VN;
load<VN>(qkv + (size_t(b) * L + t) * WIDTH + (H + KV + kv_head) * D + v0, value);
const size_t to = base + (offset + t) % capacity;
#if defined(TURBO)
for (uint i = 0; i < N; ++i) value[i] *= sign_of(d0 + i);
hadamard<N>(lane, value);
store_levels<N>((device uint*)keys, (device T*)key_scales, to, lane, write, key);
store_levels<N>((device uint*)values, (device T*)value_scales, to, lane, write, value);
#elif defined(CODES)
Share<N, BITS, GROUP> share;
quantise((device uint*)keys, (device T*)key_scales, (device T*)key_biases, to, lane, write, share, key);
quantise((device uint*)values, (device T*)value_scales, (device T*)value_biases, to, lane, write, share, value);
#else
if (write && part == 0) {
  for (uint i = 0; i < N; ++i) ((device T*)keys)[to * D + d0 + i] = T(key[i]);
}
if (write) {
  for (uint i = 0; i < VN; ++i) ((device T*)values)[to * D + v0 + i] = T(value[i]);
}
#endif
