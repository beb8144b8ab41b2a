// Products of matrices by a simdgroup. It holds a matrix of 8 x 8 halves in a word of each lane, which are two
// neighbours in a row, and one of 8 x 8 floats as two floats of each lane. Other GPUs share out matrices otherwise, so
// their preludes have these functions anew.

METAL_FUNC uint matrix_row(uint lane) { return lane / 16 * 4 + lane / 2 % 4; }

// Of the first of the two neighbours.
METAL_FUNC uint matrix_column(uint lane) { return lane / 8 % 2 * 4 + lane % 2 * 2; }

// Over the lanes of a column.
METAL_FUNC float column_max(float x) {
  for (uint mask = 2; mask <= 16; mask = mask == 2 ? 4 : mask * 4) x = metal::max(x, simd_shuffle_xor(x, mask));
  return x;
}

METAL_FUNC float column_sum(float x) {
  for (uint mask = 2; mask <= 16; mask = mask == 2 ? 4 : mask * 4) x += simd_shuffle_xor(x, mask);
  return x;
}

// From the lane whose columns are four further, or four before.
METAL_FUNC float other_columns(float x) { return simd_shuffle_xor(x, 8); }

// The sum of a column of the first four, and of the column four further over `times`: both lanes get it.
METAL_FUNC float with_rest(float x, bool first, float times) {
  const float other = other_columns(x);
  return first ? x + other / times : other + x / times;
}

METAL_FUNC uint pack_halves(float low, float high) { return as_type<uint>(half2(half(low), half(high))); }

// A matrix as the right operand of a product.
METAL_FUNC uint right_operand(uint halves) { return halves; }

METAL_FUNC void multiply_add_8x8(thread float* c, uint a, uint b) {
  simdgroup_matrix<half, 8, 8> left, right;
  simdgroup_matrix<float, 8, 8> sum;
  reinterpret_cast<thread half2&>(left.thread_elements()) = as_type<half2>(a);
  reinterpret_cast<thread half2&>(right.thread_elements()) = as_type<half2>(b);
  reinterpret_cast<thread float2&>(sum.thread_elements()) = float2(c[0], c[1]);
  simdgroup_multiply_accumulate(sum, left, right, sum);
  const float2 both = reinterpret_cast<thread float2&>(sum.thread_elements());
  c[0] = both.x;
  c[1] = both.y;
}

// c += a b for matrices of 16 x 8, 16 x 16 and 16 x 8: c is its upper half and its lower half, a is the upper and lower
// half of its columns 0 to 7, then those of its columns 8 to 15, and b is two right operands.
METAL_FUNC void multiply_add(thread float* c, const thread uint* a, const thread uint* b) {
  for (uint i = 0; i < 2; ++i) {
    for (uint j = 0; j < 2; ++j) multiply_add_8x8(c + 2 * i, a[2 * j + i], b[j]);
  }
}

// The lowest codes of a word's lower and upper 16 bits, as two halves: below the normal ones, a half is its bits times
// 2^-24.
template <int BITS>
METAL_FUNC uint two_codes(uint word) { return word & (BITS == 8 ? 0x00ff00ffu : 0x000f000fu); }

// The lower or the upper 16 bits of two words.
METAL_FUNC uint same_halves(uint first, uint second, bool upper) {
  return upper ? (first >> 16) | (second & 0xffff0000u) : (first & 0xffffu) | (second << 16);
}
