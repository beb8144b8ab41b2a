// A lane's share of a cache row of 32 N values, as it is in memory.
template <int N>
struct Share {
  uint words[N];
};

template <int N, class P>
METAL_FUNC void fetch(P rows, size_t row, uint lane, thread Share<N>& share) {
  load_raw<N>(rows + (row * 32 + lane) * N, share.words);
}

template <int N, class P>
METAL_FUNC void decode(P rows, uint, const thread Share<N>& share, thread float* x) {
  widen<N>(rows, share.words, x);
}
