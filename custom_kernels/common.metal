// Loads of a lane's share of a row, as wide as its alignment allows: a share of N values is a multiple of N values
// from the start of its buffer.

// N words.
template <int N>
METAL_FUNC void load_words(const device uint* p, thread uint* words) {
  if (N % 4 == 0) {
    for (int i = 0; i < N / 4; ++i) {
      const uint4 u = ((const device uint4*)p)[i];
      words[4 * i] = u.x;
      words[4 * i + 1] = u.y;
      words[4 * i + 2] = u.z;
      words[4 * i + 3] = u.w;
    }
  } else if (N % 2 == 0) {
    for (int i = 0; i < N / 2; ++i) {
      const uint2 u = ((const device uint2*)p)[i];
      words[2 * i] = u.x;
      words[2 * i + 1] = u.y;
    }
  } else {
    for (int i = 0; i < N; ++i) words[i] = p[i];
  }
}

// N values of 16 bits: two a word, or one where N is odd.
template <int N>
METAL_FUNC void load_halves(const device ushort* p, thread uint* words) {
  if (N % 2 == 0) {
    load_words<N / 2>((const device uint*)p, words);
  } else {
    for (int i = 0; i < N; ++i) words[i] = p[i];
  }
}

METAL_FUNC float low_bfloat(uint u) { return as_type<float>(u << 16); }
METAL_FUNC float high_bfloat(uint u) { return as_type<float>(u & 0xffff0000u); }

METAL_FUNC float low_half(uint u) { return float(as_type<half>(ushort(u & 0xffffu))); }
METAL_FUNC float high_half(uint u) { return float(as_type<half>(ushort(u >> 16))); }

// N values as they are in memory, in at most N words.
template <int N>
METAL_FUNC void load_raw(const device float* p, thread uint* words) {
  load_words<N>((const device uint*)p, words);
}

template <int N>
METAL_FUNC void load_raw(const device bfloat16_t* p, thread uint* words) {
  load_halves<N>((const device ushort*)p, words);
}

template <int N>
METAL_FUNC void load_raw(const device float16_t* p, thread uint* words) {
  load_halves<N>((const device ushort*)p, words);
}

// What load_raw loaded, in fp32; the pointer only tells the dtype.
template <int N>
METAL_FUNC void widen(const device float*, const thread uint* words, thread float* x) {
  for (int i = 0; i < N; ++i) x[i] = as_type<float>(words[i]);
}

template <int N>
METAL_FUNC void widen(const device bfloat16_t*, const thread uint* words, thread float* x) {
  for (int i = 0; i < N; ++i) {
    const uint word = words[N % 2 == 0 ? i / 2 : i];
    x[i] = N % 2 == 0 && i % 2 == 1 ? high_bfloat(word) : low_bfloat(word);
  }
}

template <int N>
METAL_FUNC void widen(const device float16_t*, const thread uint* words, thread float* x) {
  for (int i = 0; i < N; ++i) {
    const uint word = words[N % 2 == 0 ? i / 2 : i];
    x[i] = N % 2 == 0 && i % 2 == 1 ? high_half(word) : low_half(word);
  }
}

// x[0..N) = p[0..N) in fp32.
template <int N, class P>
METAL_FUNC void load(P p, thread float* x) {
  uint words[N];
  load_raw<N>(p, words);
  widen<N>(p, words, x);
}

// A row of a ring, one turn at most beyond its end.
METAL_FUNC uint wrapped(uint row, uint capacity) { return row >= capacity ? row - capacity : row; }
